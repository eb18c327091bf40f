#include "../instantiate.cuh"

template flashbwd::DecodingKernels flashbwd::decoding_kernels<64, flashbwd::Float>();

#include "../instantiate.cuh"

template flashbwd::DecodingKernels flashbwd::decoding_kernels<256, flashbwd::BFloat16>();

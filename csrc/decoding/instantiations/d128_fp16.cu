#include "../instantiate.cuh"

template flashbwd::DecodingKernels flashbwd::decoding_kernels<128, flashbwd::Half>();

#include "../instantiate.cuh"

namespace flashbwd {

DecodingKernels half_decoding_kernels() { return decoding_kernels<Half>(); }

}  // namespace flashbwd

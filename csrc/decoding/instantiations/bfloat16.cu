#include "../instantiate.cuh"

namespace flashbwd {

DecodingKernels bfloat16_decoding_kernels() { return decoding_kernels<BFloat16>(); }

}  // namespace flashbwd

#include "../instantiate.cuh"

namespace flashbwd {

DecodingKernels float_decoding_kernels() { return decoding_kernels<Float>(); }

}  // namespace flashbwd

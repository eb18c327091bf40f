#include "probe.h"

namespace flashbwd {
namespace {

__global__ void probe_kernel() {}

}  // namespace

cudaError_t probe_current_device(int* capability) {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, probe_kernel);
  *capability = error == cudaSuccess ? attributes.ptxVersion : 0;
  return error;
}

}  // namespace flashbwd

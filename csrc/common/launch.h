// One way to launch a kernel: its own error comes back, and none stays behind for another launch to be blamed for.
#pragma once

#include <cuda_runtime.h>

#include <utility>

namespace flashbwd {

// cudaLaunchKernelEx returns what is wrong with this launch (or with the device for good); cudaGetLastError after a
// <<<>>> would also return what an earlier call left. A failed launch leaves its error in the runtime: it is cleared.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_kernel(const cudaLaunchConfig_t& config, void (*kernel)(Parameters...), Arguments&&... arguments) {
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

// Compute capability 9.0 and later: the kernel may begin while the launch before it on the stream still runs. It calls
// wait_for_launch_before() (launch_overlap.cuh) before it touches anything of that launch.
inline cudaLaunchAttribute overlap_with_launch_before() {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

// All CTAs of the kernel run at the same time, whatever else holds the GPU: it begins when there is room for all. An
// error where there never is.
inline cudaLaunchAttribute begin_together() {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  return attribute;
}

}  // namespace flashbwd

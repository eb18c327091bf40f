// Launches kernels so that an error is reported by the launch that caused it, and by no other.
#pragma once

#include <cuda_runtime.h>

#include <utility>

namespace flashbwd {

// cudaLaunchKernelEx returns the error of this launch (or an unrecoverable one of the device); cudaGetLastError after a
// <<<>>> would also return errors of earlier calls. A failed launch leaves its error in the runtime, so it is cleared
// here.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_kernel(const cudaLaunchConfig_t& config, void (*kernel)(Parameters...), Arguments&&... arguments) {
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

// Compute capability 9.0 and later: the kernel may start before the previous launch on the stream has finished
// (programmatic dependent launch). It must call wait_for_previous_launch() before it uses data of that launch.
inline cudaLaunchAttribute programmatic_dependent_launch() {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

// Cooperative launch: all CTAs of the kernel run at the same time. The launch waits until there is room for all of
// them, and fails if there never is.
inline cudaLaunchAttribute cooperative_launch() {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  return attribute;
}

}  // namespace flashbwd

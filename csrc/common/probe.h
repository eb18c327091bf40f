// Tests whether the current device can run this build's kernels.
#pragma once

#include <cuda_runtime_api.h>

namespace flashbwd {

// Returns cudaSuccess, or the reason why not: no driver, a driver older than the binary, or no code for the device.
// Launches nothing. `capability`: what the selected code was compiled for, for example 80 for 8.0.
cudaError_t probe_current_device(int* capability);

}  // namespace flashbwd

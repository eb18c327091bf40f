// Can kernels of this build run on the current device?
#pragma once

#include <cuda_runtime_api.h>

namespace flashbwd {

// cudaSuccess, or why not: no driver, a driver older than the binary, no machine code for the device. Launches nothing.
// `capability`: what the code that would run was compiled for, 80 for 8.0.
cudaError_t probe_current_device(int* capability);

}  // namespace flashbwd

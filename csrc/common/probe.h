// Can kernels of this build run on the current device?
#pragma once

#include <cuda_runtime_api.h>

namespace flashbwd {

// cudaSuccess, or why not: no driver, a driver older than the binary, no machine code for the device. Launches nothing.
cudaError_t probe_current_device();

}  // namespace flashbwd

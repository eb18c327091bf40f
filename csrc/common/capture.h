// Allows kernels to be loaded while a CUDA graph is being captured.
#pragma once

#include <cuda_runtime_api.h>

namespace flashbwd {

// While any thread captures in CUDA's default mode, a call that may wait for the GPU (cudaMalloc, loading a module)
// fails in every thread and invalidates the capture. In this scope, the calling thread may make such calls. The
// library's first calls load kernels and query the device, which does not touch the captured stream.
class AllowedInCapture {
 public:
  AllowedInCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~AllowedInCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  AllowedInCapture(const AllowedInCapture&) = delete;
  AllowedInCapture& operator=(const AllowedInCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace flashbwd

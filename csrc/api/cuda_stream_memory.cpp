#include "cuda_stream_memory.h"

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <utility>

#include "../common/capture.h"

namespace flashbwd {
namespace {

// Uses cudaMalloc rather than PyTorch's allocator, whose memory pools may be destroyed before the stream.
StreamMemory allocate(cudaStream_t stream) {
  constexpr size_t kArrivalBytes = sizeof(int) * StreamMemory::kArrivals;
  constexpr size_t kScratchBytes = sizeof(float) * StreamMemory::kScratch;
  const AllowedInCapture allowed;  // another thread may be capturing another stream
  void* memory = nullptr;
  cudaError_t error = cudaMalloc(&memory, kArrivalBytes + kScratchBytes);
  if (error == cudaSuccess) error = cudaMemsetAsync(memory, 0, kArrivalBytes, stream);
  if (error != cudaSuccess) {
    cudaGetLastError();  // clear the error: the call then allocates its own memory
    return {};
  }
  return {static_cast<int*>(memory), reinterpret_cast<float*>(static_cast<char*>(memory) + kArrivalBytes)};
}

}  // namespace

StreamMemory stream_memory(int device, void* stream) {
  static std::mutex mutex;
  static std::map<std::pair<int, void*>, StreamMemory> known;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (cuda_stream == cudaStreamPerThread) return {};  // this handle means a different stream in each thread
  // The default stream needs no check, since it cannot be captured.
  if (cuda_stream != nullptr) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(cuda_stream, &status) != cudaSuccess) {
      cudaGetLastError();
      return {};
    }
    if (status != cudaStreamCaptureStatusNone) return {};
  }
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find({device, stream});
  if (found != known.end()) return found->second;
  return known.emplace(std::make_pair(device, stream), allocate(cuda_stream)).first->second;
}

}  // namespace flashbwd

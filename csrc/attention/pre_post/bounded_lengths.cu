#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "../../common/launch.h"
#include "bounded_lengths.h"

namespace flashbwd {
namespace {

constexpr int kThreads = 1024;

struct BoundLengths {
  const int32_t* given;  // (sequences + 1,)
  int32_t* bounded;      // (sequences + 1,)
  int32_t rows;
};

// CTA 0 copies cu_seqlens_q, CTA 1 cu_seqlens_k: each element becomes the running maximum, clamped to [0, rows].
__global__ void __launch_bounds__(kThreads)
    bound_lengths_kernel(const BoundLengths q, const BoundLengths k, int32_t sequences) {
  const BoundLengths& lengths = blockIdx.x == 0 ? q : k;
  __shared__ int32_t warp_maxima[kThreads / 32];
  const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int32_t before = 0;  // maximum of the elements of earlier iterations
  for (int32_t first = 0; first <= sequences; first += kThreads) {
    const int32_t i = first + threadIdx.x;
    int32_t value = 0 < i && i <= sequences ? min(max(lengths.given[i], 0), lengths.rows) : 0;
#pragma unroll
    for (int32_t distance = 1; distance < 32; distance *= 2) {
      // the first `distance` lanes get their own value
      value = max(value, __shfl_up_sync(0xffffffffu, value, distance));
    }
    if (lane == 31) warp_maxima[warp] = value;
    __syncthreads();  // every warp has written its maximum
    value = max(value, before);
    for (int32_t w = 0; w < kThreads / 32; ++w) {
      if (w < warp) value = max(value, warp_maxima[w]);
      before = max(before, warp_maxima[w]);
    }
    if (i <= sequences) lengths.bounded[i] = value;
    __syncthreads();  // every thread has read the maxima
  }
}

}  // namespace

const char* launch_bound_lengths(AttentionBackwardParams* params, const WorkspaceLayout& workspace, void* stream) {
  if (params->cu_seqlens_q == nullptr) return nullptr;
  auto* const bounded_q =
      reinterpret_cast<int32_t*>(static_cast<uint8_t*>(params->workspace) + workspace.lengths_offset);
  int32_t* const bounded_k = bounded_q + params->batch + 1;
  const auto rows = [](int64_t total) {
    return static_cast<int32_t>(std::min<int64_t>(total, std::numeric_limits<int32_t>::max()));
  };
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(2);
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  const cudaError_t error =
      launch_kernel(config, bound_lengths_kernel, BoundLengths{params->cu_seqlens_q, bounded_q, rows(params->total_q)},
                    BoundLengths{params->cu_seqlens_k, bounded_k, rows(params->total_k)}, params->batch);
  params->cu_seqlens_q = bounded_q;
  params->cu_seqlens_k = bounded_k;
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace flashbwd

// A pipeline of buffers in shared memory, each with an mbarrier for full and one for empty.
#pragma once

#include "hopper.cuh"

namespace flashbwd {

// Initializes the barriers of a pipeline.
template <int kStages>
__device__ __forceinline__ void init_ring(uint64_t (&full)[kStages], uint32_t full_arrivals, uint64_t (&empty)[kStages],
                                          uint32_t empty_arrivals) {
  for (int stage = 0; stage < kStages; ++stage) {
    mbarrier_init(&full[stage], full_arrivals);
    mbarrier_init(&empty[stage], empty_arrivals);
  }
}

// Stage and parity of a pipeline of kStages buffers at iteration `index`.
template <int kStages>
struct Ring {
  static __device__ __forceinline__ int32_t stage(int32_t index) { return index % kStages; }
  static __device__ __forceinline__ uint32_t phase(int32_t index) { return index / kStages & 1; }
};

// Says that this warp has done its part: waiters see what its lanes did before. Before TMA may overwrite what a lane
// has read with a normal load, use the value of the load, or fence (fence_async_shared).
__device__ __forceinline__ void arrive_warp(uint64_t* barrier, int32_t lane) {
  __syncwarp();
  if (lane == 0) mbarrier_arrive(barrier);
}

}  // namespace flashbwd

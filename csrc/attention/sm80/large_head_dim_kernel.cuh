// The kernel for large head dimensions: persistent CTAs, each with global memory for dk and dv of its current key
// block.
#pragma once

#include "large_head_dim_mainloop.cuh"

namespace flashbwd::sm80 {

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) large_kernel(const __grid_constant__ KernelParams params) {
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(shared);
#pragma unroll 1
  for (;;) {
    if (threadIdx.x == 0) {
      // CTAs take work tiles in increasing order, so no CTA waits for a work tile that no CTA has taken yet.
      smem.work_index = atomicAdd(params.work_tile_counter, 1);
      if (smem.work_index < params.schedule.num_work_tiles())
        smem.work = WorkTile(params, smem.work_index, Traits::kBlockM, Traits::kBlockN);
    }
    __syncthreads();  // thread 0 has written the work tile
    if (smem.work_index >= params.schedule.num_work_tiles()) return;
    if (smem.work.exists) {
      LargeMainloop<Traits>::run(params, smem, smem.work);
      if constexpr (Traits::kFeatures) Epilogue<Traits>::zero_bias_gradient(params, smem.work);
    }
    __syncthreads();  // all threads are done with the work tile and its buffers
  }
}

}  // namespace flashbwd::sm80

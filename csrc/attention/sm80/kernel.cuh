// The kernel for all tiles but the large ones: persistent CTAs, each of which processes one key block of one KV head at
// a time. The loop starts with an empty work tile, whose only effect is that the main loop fetches the first one.
#pragma once

#include "epilogue.cuh"

namespace flashbwd::sm80 {

template <typename Traits>
__device__ __forceinline__ void backward(const KernelParams& params) {
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(shared);

  if (threadIdx.x == 0) {
    smem.work = typename Traits::WorkTile();
    smem.first_stage = smem.keys_offset = 0;
    smem.first_add = FirstAdd();
    for (SplitBarrier* barrier : {&smem.tiles_loaded, &smem.scores_stored, &smem.done}) barrier->init(Traits::kThreads);
  }
  __syncthreads();  // thread 0 has initialized the state: the first iteration of the loop has no work tile
  float dk[Traits::kKeyTiles][Traits::kGradientTiles][4];
  float dv[Traits::kKeyTiles][Traits::kGradientTiles][4];
#pragma unroll 1
  for (;;) {
    Mainloop<Traits>::run(params, smem, dk, dv);
    // ahead: the last iteration has started the copies of the next work tile; loaded: all of them, those of k too
    const bool ahead = Mainloop<Traits>::loads_ahead(params, smem), loaded = ahead && !Traits::kRefills;
    if (!loaded) __syncthreads();  // thread 0 has written next_work; all threads are done with the tiles of this one
    const bool more = smem.next_work.exists;
    if (more && !loaded) Mainloop<Traits>::start_next(params, smem, ahead);
    if (Traits::kFirstStores && threadIdx.x == 0) smem.first_add.release();  // for the last iteration
    if (smem.work.exists) {
      Epilogue<Traits>::store(params, smem.work, dk, dv);
      if constexpr (Traits::kFeatures) Epilogue<Traits>::zero_bias_gradient(params, smem.work);
    }
    if (!more) return;
    __syncthreads();  // all threads are done with smem.work, and have read the buffer offsets of the next work tile
    if (threadIdx.x == 0) {
      Mainloop<Traits>::switch_buffers(smem, loaded);
      smem.work = smem.next_work;
    }
    __syncthreads();  // thread 0 has written smem.work
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) backward_kernel(const __grid_constant__ KernelParams params) {
  backward<Traits>(params);
}

}  // namespace flashbwd::sm80

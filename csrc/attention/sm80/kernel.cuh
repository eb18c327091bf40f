// CTAs that stay, each with a block of keys of one KV head at a time.
#pragma once

#include "epilogue.cuh"

namespace flashbwd::sm80 {

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) backward_kernel(const __grid_constant__ KernelParams params) {
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(shared);

  if (threadIdx.x == 0) {
    smem.work = Work();
    smem.first_stage = smem.keys_offset = 0;
    smem.first_add = FirstAdd();
    for (SplitBarrier* barrier : {&smem.landed, &smem.scores_there, &smem.done}) barrier->init(Traits::kThreads);
  }
  __syncthreads();  // thread 0 has written that there is nothing to do before the first job
  float dk[Traits::kKeyTiles][Traits::kGradientTiles][4];
  float dv[Traits::kKeyTiles][Traits::kGradientTiles][4];
#pragma unroll 1
  for (;;) {
    Mainloop<Traits>::run(params, smem, dk, dv);
    const bool ahead = Mainloop<Traits>::loads_ahead(params, smem), loaded = ahead && !Traits::kRefills;
    if (!loaded) __syncthreads();  // thread 0 has written the next job; everybody is done with the tiles of this one
    const bool more = smem.next_work.exists;
    if (more && !loaded) Mainloop<Traits>::start_next(params, smem, ahead);
    if (Traits::kFirstStores && threadIdx.x == 0) smem.first_add.pass_on();  // of the last step
    if (smem.work.exists) {
      Epilogue<Traits>::store(params, smem.work, dk, dv);
      if constexpr (Traits::kFeatures) Epilogue<Traits>::zero_bias_gradient(params, smem.work);
    }
    if (!more) return;
    __syncthreads();  // everybody is done with this job and has read where the first tiles of the next one lie
    if (threadIdx.x == 0) {
      Mainloop<Traits>::change_places(smem, loaded);
      smem.work = smem.next_work;
    }
    __syncthreads();  // thread 0 has written it
  }
}

}  // namespace flashbwd::sm80

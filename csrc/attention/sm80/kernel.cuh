// CTAs that stay, each with a block of keys of one KV head at a time.
#pragma once

#include "epilogue.cuh"

namespace flashbwd::sm80 {

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) backward_kernel(const __grid_constant__ KernelParams params) {
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(shared);

  if (threadIdx.x == 0) smem.works[1] = Work();
  __syncthreads();  // thread 0 has written that there is nothing to do before the first job
  float dk[Traits::kKeyTiles][Traits::kGradientTiles][4];
  float dv[Traits::kKeyTiles][Traits::kGradientTiles][4];
#pragma unroll 1
  for (int32_t place = 1;; place ^= 1) {
    const Work& work = smem.works[place];
    Work& next = smem.works[place ^ 1];
    Mainloop<Traits>::run(params, smem, work, next, dk, dv);
    __syncthreads();  // thread 0 has written the next job; everybody is done with the tiles of this one
    if (next.exists) Mainloop<Traits>::start(params, smem, next);
    if (work.exists) {
      Epilogue<Traits>::store(params, work, dk, dv);
      if constexpr (Traits::kFeatures) Epilogue<Traits>::zero_bias_gradient(params, work);
    }
    if (!next.exists) return;
  }
}

}  // namespace flashbwd::sm80

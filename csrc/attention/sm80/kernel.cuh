// One CTA: the gradients of one block of keys of one KV head.
#pragma once

#include "epilogue.cuh"

namespace flashbwd::sm80 {

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) backward_kernel(const __grid_constant__ KernelParams params) {
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(shared);

  if (threadIdx.x == 0) {
    // In order: jobs are taken in the order in which CTAs start, so that nobody waits for one that has not.
    const int64_t index = params.jobs_taken != nullptr ? atomicAdd(params.jobs_taken, 1) : blockIdx.x;
    smem.work = Work(params, index, Traits::kBlockM, Traits::kBlockN);
  }
  __syncthreads();  // thread 0 has written what there is to do
  const Work& work = smem.work;
  if (!work.exists) return;

  float dk[Traits::kKeyTiles][Traits::kGradientTiles][4];
  float dv[Traits::kKeyTiles][Traits::kGradientTiles][4];
  Mainloop<Traits>::run(params, smem, work, dk, dv);
  Epilogue<Traits>::store(params, work, dk, dv);
  if constexpr (Traits::kFeatures) Epilogue<Traits>::zero_bias_gradient(params, work);
}

}  // namespace flashbwd::sm80

// The wide form: CTAs that stay, each with a place in global memory for dk and dv of one key block at a time.
#pragma once

#include "wide_mainloop.cuh"

namespace flashbwd::sm80 {

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) wide_kernel(const __grid_constant__ KernelParams params) {
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(shared);
#pragma unroll 1
  for (;;) {
    if (threadIdx.x == 0) {
      // In order: nobody waits for a job that has not been taken before its own.
      smem.job = atomicAdd(params.jobs_taken, 1);
      if (smem.job < params.jobs) smem.work = Work(params, smem.job, Traits::kBlockM, Traits::kBlockN);
    }
    __syncthreads();  // thread 0 has written what there is to do
    if (smem.job >= params.jobs) return;
    if (smem.work.exists) {
      WideMainloop<Traits>::run(params, smem, smem.work);
      if constexpr (Traits::kFeatures) Epilogue<Traits>::zero_bias_gradient(params, smem.work);
    }
    __syncthreads();  // everybody is done with the job and its tiles
  }
}

}  // namespace flashbwd::sm80

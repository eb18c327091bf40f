// The attention-backward kernel for Hopper: one CTA a key block, roles by warp.
#pragma once

#include "epilogue.cuh"
#include "mainloop.cuh"
#include "producer.cuh"

namespace flashbwd::sm90 {

template <typename Traits>
__global__ void __launch_bounds__(kThreads, 1) backward_kernel(const __grid_constant__ KernelParams params) {
  extern __shared__ __align__(1024) uint8_t storage[];
  typename Traits::SharedStorage& smem = *reinterpret_cast<typename Traits::SharedStorage*>(storage);
  using Producer = sm90::Producer<Traits>;

  const int32_t warpgroup = __shfl_sync(0xffffffffu, static_cast<int32_t>(threadIdx.x) / kWarpgroupThreads, 0);
  const int32_t warp = __shfl_sync(0xffffffffu, static_cast<int32_t>(threadIdx.x) / 32, 0);
  const typename Traits::Work& work = smem.work;

  if (threadIdx.x == 0) smem.work.find(params);
  if (threadIdx.x == 32) {
    prefetch_tensor_map(&params.q);
    prefetch_tensor_map(&params.k);
    prefetch_tensor_map(&params.v);
    prefetch_tensor_map(&params.dout);
    prefetch_tensor_map(&params.dq_accumulator);
    Traits::init_barriers(smem);
  }
  __syncthreads();
  if (!work.exists) return;  // the whole CTA: nothing to load, nothing to write

  if (warpgroup == 0) {
    shrink_registers<kProducerRegisters>();
    if (warp == 0) {
      if (threadIdx.x == 0 && work.steps > 0) Producer::load(params, smem, work);
    } else if (warp <= kConsumerWarpgroups) {
      Producer::store_dq(params, smem, work, warp - 1, threadIdx.x % 32);
    }
  } else {
    grow_registers<kConsumerRegisters>();
    float dk[Traits::kHeadDim / 2];
    float dv[Traits::kHeadDim / 2];
#pragma unroll
    for (int i = 0; i < Traits::kHeadDim / 2; ++i) dk[i] = dv[i] = 0.f;
    if (work.steps > 0) Mainloop<Traits>::compute(params, smem, work, warpgroup - 1, dk, dv);
    Epilogue<Traits>::store(params, smem, work, warpgroup - 1, dk, dv);  // zeros where nobody looked
  }
}

}  // namespace flashbwd::sm90

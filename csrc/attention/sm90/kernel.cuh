// The attention backward kernel for Hopper: a persistent kernel with one role per warp or warpgroup.
#pragma once

#include <type_traits>

#include "../../common/launch_overlap.cuh"
#include "dq_accumulate.cuh"
#include "epilogue.cuh"
#include "mainloop.cuh"
#include "producer.cuh"

namespace flashbwd::sm90 {

// The body of a kernel. `params` is the kernel's __grid_constant__ parameter.
template <typename Traits>
__device__ __forceinline__ void backward(const KernelParams& params) {
  extern __shared__ __align__(1024) uint8_t storage[];
  using SharedStorage = typename Traits::SharedStorage;
  static_assert(sizeof(SharedStorage) <= kSharedMemoryBytes, "the tile does not fit in shared memory");
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(storage);
  using Producer = sm90::Producer<Traits>;

  const int32_t warpgroup = __shfl_sync(0xffffffffu, static_cast<int32_t>(threadIdx.x) / kWarpgroupThreads, 0);
  const int32_t warp = __shfl_sync(0xffffffffu, static_cast<int32_t>(threadIdx.x) / 32, 0);
  const int32_t lane = threadIdx.x % 32;

  if (threadIdx.x == 0) {
    prefetch_tensor_maps(params.maps);
    if constexpr (Traits::kBias) prefetch_tensor_map(&params.maps.bias);
    Traits::init_barriers(smem);
  }
  if (params.preprocess.words == nullptr) wait_for_previous_launch();
  allow_next_launch();
  if constexpr (Traits::kDrops) {
    const PhiloxArguments& philox = params.attention.philox;
    if (threadIdx.x == 0) {
      smem.philox.seed = philox.current_seed();
      smem.philox.offset = philox.current_offset();
    }
  }
  __syncthreads();

  if (warpgroup == 0) {
    shrink_registers<kProducerRegisters>();
    if (warp == 0) {
      if (lane == 0 && assume_single_lane()) Producer::load_tiles(params, smem);
    } else if (warp == 1) {
      StoreWarps<Traits>::template store_dq<0>(params, smem, lane);
    } else if (warp == 2) {
      StoreWarps<Traits>::template store_dq<1>(params, smem, lane);
    } else {
      if (lane == 0) Producer::schedule_tiles(params, smem);
    }
  } else {
    // The number of a consumer is computed where it is used: held in a variable, it makes head dimension 128 spill.
    grow_registers<kConsumerRegisters>();
    const auto consume = [&](auto dq_columns) {
      using Mainloop = sm90::Mainloop<Traits, decltype(dq_columns)::value>;
      DqPhases dq_phases;
      if (warpgroup == 1) Mainloop::signal_scores(0);  // consumer 1 may pass its first wait_scores
      for_each_work_tile(smem, [&](const typename Traits::WorkTile& work) {
        float dk[Traits::kMmaTiles][Traits::kHeadDim / 2] = {};
        float dv[Traits::kMmaTiles][Traits::kHeadDim / 2] = {};
        if (work.iterations > 0) {
          Mainloop{params, smem, work, warpgroup - 1, dq_phases}.compute(dk, dv);
        }
        // Key blocks that no query sees still store zero dk and dv.
        if constexpr (Traits::kByQueries) Epilogue<Traits>::add_queries(smem, warpgroup - 1, dk, dv);
#pragma unroll
        for (int entry = 0; entry < Traits::kBatchEntries; ++entry) {
          Epilogue<Traits>::store(params, smem, work, warpgroup - 1, dq_phases, dk[entry], dv[entry], entry);
        }
      });
    };
    // ptxas serialises products that are outstanding across a branch, so the branch encloses the whole loop.
    if (Traits::kDqColumns != Traits::kLastDqColumns && warpgroup == kConsumerWarpgroups) {
      consume(std::integral_constant<int, Traits::kLastDqColumns>());
    } else {
      consume(std::integral_constant<int, Traits::kDqColumns>());
    }
    wait_for_previous_launch();  // later launches wait for this one only
  }
}

template <typename Traits>
__global__ void __launch_bounds__(kThreads, 1) backward_kernel(const __grid_constant__ KernelParams params) {
  sm90::backward<Traits>(params);
}

}  // namespace flashbwd::sm90

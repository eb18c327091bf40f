// The kernel for head dimensions above 128 and for calls with several features. A persistent CTA computes work tiles of
// 64 keys, or a cluster of two CTAs tiles of 128 keys, with a warpgroup for each of P, dS and dq.
#pragma once

#include "../../../common/launch_overlap.cuh"
#include "../epilogue.cuh"
#include "producer.cuh"

namespace flashbwd::sm90::large_head_dim {

// Stores dv of a work tile, staged in the buffer of P after the warpgroup of dS has read the last P.
template <typename Traits>
__device__ __forceinline__ void store_dv(const KernelParams& params, typename Traits::SharedStorage& smem,
                                         const typename Traits::WorkTile& work,
                                         const float (&dv)[Traits::kHeadDimV / 2]) {
  constexpr int kStagingAtoms = sizeof(smem.p) / Traits::kKeyAtomBytes;
  const int32_t next_index = work.first_index + work.iterations;
  mbarrier_wait(&smem.p_empty[threadIdx.x % kWarpgroupThreads / 32], (next_index & 1) ^ 1);
  store_gradient<typename Traits::T, Traits::kKeyAtomBytes, kStagingAtoms>(
      params.dv, work, 0, reinterpret_cast<uint8_t*>(smem.p), kProbabilityBarrier, dv);
  named_barrier_sync(kProbabilityBarrier, kWarpgroupThreads);  // the staged dv has been read
}

// Stores dk of a work tile, staged in v, which no product reads any more.
template <typename Traits>
__device__ __forceinline__ void store_dk(const KernelParams& params, typename Traits::SharedStorage& smem,
                                         const typename Traits::WorkTile& work, float (&dk)[Traits::kHeadDim / 2]) {
#pragma unroll
  for (int i = 0; i < Traits::kHeadDim / 2; ++i) dk[i] *= params.gradient_scale;
  store_gradient<typename Traits::T, Traits::kKeyAtomBytes, Traits::kAtomsV>(params.dk, work, 0, smem.v,
                                                                             kScoreGradientBarrier, dk);
  fence_async_shared();  // TMA writes there next
  mbarrier_arrive(&smem.v_empty);
}

// The body of a kernel. `params` is the kernel's __grid_constant__ parameter.
template <typename Traits>
__device__ __forceinline__ void backward(const KernelParams& params) {
  extern __shared__ __align__(1024) uint8_t storage[];
  using SharedStorage = typename Traits::SharedStorage;
  static_assert(sizeof(SharedStorage) <= kSharedMemoryBytes, "the tile does not fit in shared memory");
  using WorkTile = typename Traits::WorkTile;
  using Producer = large_head_dim::Producer<Traits>;
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(storage);
  const int32_t warpgroup = __shfl_sync(0xffffffffu, static_cast<int32_t>(threadIdx.x) / kWarpgroupThreads, 0);
  const int32_t warp = __shfl_sync(0xffffffffu, static_cast<int32_t>(threadIdx.x) / 32, 0);
  const int32_t lane = threadIdx.x % 32;

  if (threadIdx.x == 0) {
    prefetch_tensor_maps(params.maps);
    Traits::init_barriers(smem);
  }
  if (params.preprocess.words == nullptr) wait_for_previous_launch();
  allow_next_launch();
  cluster_sync();  // the other CTA has initialized its barriers

  if (warpgroup == 0) {
    shrink_registers<Traits::kRegisters.producer>();
    const auto rank = static_cast<int32_t>(rank_in_cluster());
    if (warp == 0) {
      if (elect_one()) Producer::load_queries(params, smem);
    } else if (warp <= kDqAdders) {
      if (elect_one()) Producer::store_dq(params, smem, rank, warp - 1);
    } else {
      Producer::schedule_tiles(params, smem, rank, lane);
    }
  } else if (warpgroup == 1) {
    grow_registers<Traits::kRegisters.probabilities>();
    for_each_work_tile(smem, [&](const WorkTile& work) {
      if (work.iterations == 0) {
        zero_gradient<typename Traits::T>(params.dv, work, 0);
        return;
      }
      float dv[Traits::kHeadDimV / 2] = {};
      Probabilities<Traits>{{params, smem, work}}.run(dv);
      store_dv<Traits>(params, smem, work, dv);
    });
  } else if (warpgroup == 2) {
    grow_registers<Traits::kRegisters.score_gradients>();
    for_each_work_tile(smem, [&](const WorkTile& work) {
      if (work.iterations == 0) {
        zero_gradient<typename Traits::T>(params.dk, work, 0);
        return;
      }
      float dk[Traits::kHeadDim / 2] = {};
      ScoreGradients<Traits>{{params, smem, work}}.run(dk);
      store_dk<Traits>(params, smem, work, dk);
    });
  } else {
    shrink_registers<Traits::kRegisters.dq>();
    const auto rank = static_cast<int32_t>(rank_in_cluster());
    QueryGradients<Traits>::expect_first(smem);
    int32_t count = 0;  // of atoms of 64 columns
    for_each_work_tile(smem, [&](const WorkTile& work) {
      if (work.iterations > 0) QueryGradients<Traits>::run(params, smem, work, rank, count);
    });
  }
  cluster_sync();              // the other CTA no longer writes to this one
  wait_for_previous_launch();  // later launches wait for this one only
}

template <typename Traits>
__global__ void __cluster_dims__(Traits::kCtas) __launch_bounds__(kLargeThreads, 1)
    backward_kernel(const __grid_constant__ KernelParams params) {
  large_head_dim::backward<Traits>(params);
}

}  // namespace flashbwd::sm90::large_head_dim

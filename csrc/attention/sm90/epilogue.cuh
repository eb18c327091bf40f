// Stores dk and dv of a consumer warpgroup from its accumulators to global memory.
#pragma once

#include "../../common/wgmma_store.cuh"
#include "mainloop.cuh"

namespace flashbwd::sm90 {

// The first element of a row of a gradient, counted within the sequence. `entry`: of the batch, counted from the work
// tile's first one.
template <typename WorkTile>
__device__ __forceinline__ int64_t element_of_row(const KeyGradient& gradient, const WorkTile& work, int32_t row,
                                                  int32_t entry = 0) {
  return (work.batch + entry) * gradient.view.batch_stride + work.gradient_head * gradient.view.head_stride +
         (work.sequence.begin_k + row) * gradient.view.seq_stride;
}

// Stores 64 rows of a gradient, from row `part_row` of the key block on. Called by the warpgroup that has them as an
// accumulator of (64, 2 * kValues). `staging`: as for store_16bit; kStagingAtoms is 0 if there is none.
template <typename T, int kAtomBytes, int kStagingAtoms, typename WorkTile, int kValues>
__device__ void store_gradient(const KeyGradient& gradient, const WorkTile& work, int32_t part_row, uint8_t* staging,
                               uint32_t barrier, const float (&values)[kValues], int32_t entry = 0) {
  const int32_t first_row = work.first_key + part_row, rows = work.sequence.rows_k - first_row;
  const int64_t first = element_of_row(gradient, work, first_row, entry);
  const int64_t& stride = gradient.view.seq_stride;
  if (gradient.dtype == DType::kFloat32) {
    store_elements(static_cast<float*>(gradient.view.data) + first, stride, gradient.columns, rows, values);
  } else if constexpr (kStagingAtoms == 0) {
    store_elements(static_cast<T*>(gradient.view.data) + first, stride, gradient.columns, rows, values);
  } else {
    store_16bit<T, kAtomBytes, kStagingAtoms>(static_cast<T*>(gradient.view.data) + first, stride, gradient.columns,
                                              gradient.vectors, rows, staging, barrier, values);
  }
}

// Stores zeros in these rows, because no query sees these keys. Called by one warpgroup. It uses no shared memory and
// arrives at no barrier, so no pipeline advances.
template <typename T, typename WorkTile>
__device__ void zero_gradient(const KeyGradient& gradient, const WorkTile& work, int32_t part_row) {
  const int32_t first_row = work.first_key + part_row;
  const int32_t rows = min(64, work.sequence.rows_k - first_row);  // may be negative
  const int64_t first = element_of_row(gradient, work, first_row);
  const int32_t warp = threadIdx.x % kWarpgroupThreads / 32, lane = threadIdx.x % 32;
#pragma unroll 1
  for (int32_t row = warp; row < rows; row += kWarpgroupThreads / 32) {
#pragma unroll 1
    for (int32_t column = lane; column < gradient.columns; column += 32) {
      const int64_t element = first + row * gradient.view.seq_stride + column;
      if (gradient.dtype == DType::kFloat32) {
        static_cast<float*>(gradient.view.data)[element] = 0.f;
      } else {
        static_cast<T*>(gradient.view.data)[element] = from_float<T>(0.f);
      }
    }
  }
}

template <typename Traits>
struct Epilogue {
  using Mainloop = sm90::Mainloop<Traits, Traits::kDqColumns>;
  using T = typename Traits::T;
  using WorkTile = typename Traits::WorkTile;
  static constexpr int kHeadDim = Traits::kHeadDim;

  static __device__ void store(const KernelParams& params, typename Traits::SharedStorage& smem, const WorkTile& work,
                               int32_t warpgroup, DqPhases& dq_phases, float (&dk)[kHeadDim / 2],
                               float (&dv)[kHeadDim / 2], int32_t entry) {
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) dk[i] *= params.gradient_scale;
    if constexpr (Traits::kDrops) {
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) dv[i] *= params.features.dropout_scale;
    }
    // With a block mask always: the loader may have put bits of the next work tile into dS.
    if (Traits::kBlockMask || work.tma_dkdv) {
      pass_to_store_warps(smem, warpgroup, dq_phases, work.first_index + work.iterations + entry, dv, dk);
      return;
    }
    if (Traits::kBatchEntries > 1 && work.batch + entry >= params.attention.batch) return;
    // The warpgroup stages in its own rows of ds, unless the next bias is loaded there.
    constexpr int kStagingAtoms = Traits::kBias ? 0 : Traits::kGradientAtoms;
    uint8_t* staging = Traits::kByQueries ? smem.ds[0][warpgroup] : smem.ds[0][0] + warpgroup * 64 * kAtomRowBytes;
    const uint32_t barrier = kWarpgroupBarrier + warpgroup;
    // Wait until the last dQ of both warpgroups has read ds. They meet as in two more iterations, so that the barriers
    // keep their order: synccheck objects to a barrier that is reached from different code.
    if constexpr (Traits::kByQueries) {
      named_barrier_sync(kConsumersBarrier, kConsumerThreads);
    } else if constexpr (kStagingAtoms > 0) {
      const int32_t end = work.first_index + work.iterations;
      for (int32_t index = end; index < end + 2; ++index) {
        Mainloop::signal_ds(warpgroup, index);
        Mainloop::wait_ds(warpgroup, index);
      }
    }
    store_gradient<T, Traits::kDsAtomBytes, kStagingAtoms>(params.dv, work, warpgroup * 64, staging, barrier, dv,
                                                           entry);
    store_gradient<T, Traits::kDsAtomBytes, kStagingAtoms>(params.dk, work, warpgroup * 64, staging, barrier, dk,
                                                           entry);
    if constexpr (kStagingAtoms > 0) {
      named_barrier_sync(barrier, kWarpgroupThreads);  // staged gradients are read: ds is free
    }
  }

  // With half of the queries per warpgroup: afterwards, MMA tile 0 of warpgroup 0 holds the gradients of the first 64
  // keys and MMA tile 0 of warpgroup 1 those of the other 64 keys. Each warpgroup passes its sums of the other keys
  // through its dS.
  static __device__ void add_queries(typename Traits::SharedStorage& smem, int32_t warpgroup,
                                     float (&dk)[Traits::kMmaTiles][kHeadDim / 2],
                                     float (&dv)[Traits::kMmaTiles][kHeadDim / 2]) {
    static_assert(Traits::kMmaTiles == 2 && sizeof(smem.ds[0][0]) >= kWarpgroupThreads * kHeadDim * sizeof(float));
    const int32_t thread = threadIdx.x % kWarpgroupThreads;
    float* outgoing = reinterpret_cast<float*>(smem.ds[0][warpgroup]) + thread;
    const float* incoming = reinterpret_cast<const float*>(smem.ds[0][warpgroup ^ 1]) + thread;
    named_barrier_sync(kWarpgroupBarrier + warpgroup, kWarpgroupThreads);  // the last dQ has read dS
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) {
      outgoing[2 * i * kWarpgroupThreads] = warpgroup == 0 ? dk[1][i] : dk[0][i];
      outgoing[(2 * i + 1) * kWarpgroupThreads] = warpgroup == 0 ? dv[1][i] : dv[0][i];
    }
    named_barrier_sync(kConsumersBarrier, kConsumerThreads);
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) {
      dk[0][i] = (warpgroup == 0 ? dk[0][i] : dk[1][i]) + incoming[2 * i * kWarpgroupThreads];
      dv[0][i] = (warpgroup == 0 ? dv[0][i] : dv[1][i]) + incoming[(2 * i + 1) * kWarpgroupThreads];
    }
    named_barrier_sync(kConsumersBarrier, kConsumerThreads);  // dS is free
  }

 private:
  // Passes dv and dk to the store warps in buffers of dq, as if they were dq of one or two more iterations.
  static __device__ __forceinline__ void pass_to_store_warps(typename Traits::SharedStorage& smem, int32_t warpgroup,
                                                             DqPhases& dq_phases, int32_t index,
                                                             const float (&dv)[kHeadDim / 2],
                                                             const float (&dk)[kHeadDim / 2]) {
    const auto stage = [&](int32_t buffer, int box, const float (&values)[kHeadDim / 2]) {
      __syncwarp();  // other lanes wrote dq here; the barriers order that too, but racecheck follows threads
      stage_16bit<T, 64 * kAtomRowBytes, 0, Traits::kGradientAtoms>(
          reinterpret_cast<uint8_t*>(smem.dq[buffer][warpgroup][box]), values);
    };
    int32_t buffer = index % kDqAdders;
    dq_phases.wait_empty(smem.dq_empty, buffer);
    stage(buffer, 0, dv);
    if constexpr (!Traits::kGradientsShareBuffer) {
      named_barrier_arrive(kDqFullBarrier + buffer, kDqFullThreads);
      buffer ^= 1;
      dq_phases.wait_empty(smem.dq_empty, buffer);
    }
    stage(buffer, Traits::kGradientsShareBuffer ? 1 : 0, dk);
    named_barrier_arrive(kDqFullBarrier + buffer, kDqFullThreads);
  }
};

}  // namespace flashbwd::sm90

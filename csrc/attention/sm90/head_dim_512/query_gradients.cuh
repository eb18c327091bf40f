// The kernel for dq of 64 queries. Warpgroup 0 computes S = Q K^T, P, dS and the left columns of dq, warpgroup 1
// computes dP = dO V^T and the right columns. Nothing is added in global memory, so dq needs no accumulator.
#pragma once

#include <algorithm>

#include "../../../common/launch_overlap.cuh"
#include "epilogue.cuh"
#include "exchange.cuh"
#include "producer.cuh"
#include "scores.cuh"

namespace flashbwd::sm90::head_dim_512 {

// A warp of the producer loads q and k (kLoadsValues: dout and v).
template <typename Traits, bool kLoadsValues>
__device__ void load_query_gradients(const KernelParams& params, typename Traits::QueryGradientsStorage& smem) {
  const AttentionBackwardParams& p = params.attention;
  const WorkTile& work = smem.work;
  if (work.blocks.empty()) return;
  Loader loader{params, smem.landed[kLoadsValues]};
  const TileRows queries = {kLoadsValues ? &params.dout : &params.q, work.kept_begin + work.first_row, work.head,
                            p.cu_seqlens_q != nullptr ? 0 : work.batch, work.valid_rows()};
  loader.load(queries, kLoadsValues ? smem.dout[0] : smem.q, 0, Traits::kAtoms,
              kLoadsValues ? &smem.dout_full : &smem.q_full);
  const int32_t head = work.head / (p.heads / p.heads_kv), batch = p.cu_seqlens_k != nullptr ? 0 : work.batch;
  int32_t slot = 0;
  uint32_t phase = 0;
#pragma unroll 1
  for (int32_t block = work.blocks.begin; block < work.blocks.end; ++block) {
    const TileRows keys = {kLoadsValues ? &params.v : &params.k, work.streamed_begin + block * kRows, head, batch,
                           work.valid_rows_of(block)};
    if constexpr (kLoadsValues) {
#pragma unroll 1
      for (int32_t atom = 0; atom < Traits::kAtoms; ++atom) {
        // A slot in dout is not empty at first: its barrier completes a phase when dout is in registers.
        mbarrier_wait(&smem.v_empty[slot], slot < Traits::kFreeSlots ? phase ^ 1 : phase);
        loader.load(keys, smem.value_slot(slot), atom, 1, &smem.v_full[slot]);
        if (++slot == Traits::kSlots) {
          slot = 0;
          phase ^= 1;
        }
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        mbarrier_wait(&smem.k_empty[half], phase ^ 1);
        loader.load(keys, smem.k + Traits::first_atom(half) * kAtomBytes, Traits::first_atom(half),
                    Traits::atoms_of(half), &smem.k_full[half]);
      }
      phase ^= 1;
    }
  }
}

template <typename Traits>
struct QueryGradientsConsumer {
  using T = typename Traits::T;
  static constexpr int kRightBytes = Traits::first_atom(1) * kAtomBytes;
  static constexpr int kAtomSteps = kAtomColumns / 16;   // of a product over the columns of an atom
  static constexpr int kAtomRegisters = kAtomSteps * 4;  // of a first operand

  const KernelParams& params;
  typename Traits::QueryGradientsStorage& smem;
  const WorkTile& work;
  ThreadPlace place = {};

  // Warpgroup 0.
  __device__ __forceinline__ void run_scores(float (&dq)[Traits::accumulators(0)]) {
    if (work.blocks.empty()) return;
    const int64_t row = params.lse_delta.index(work.batch, work.head, work.kept_begin) + work.first_row + place.row;
    const ValuesOfRows lse_log2 = load_rows(params.lse_delta.lse_log2 + row);
    const ValuesOfRows delta = load_rows(params.lse_delta.delta + row);
    mbarrier_wait(&smem.q_full, 0);
    uint32_t phase = 0;
#pragma unroll 1
    for (int32_t block = work.blocks.begin; block < work.blocks.end; ++block, phase ^= 1) {
      float s[kScores], derivative[kScores];
      uint32_t packed[kScores / 2];
      multiply(s, phase);
      arrive_warp(&smem.k_empty[1], place.lane);
      probabilities(params.attention, work, block, place, lse_log2, s, derivative);
      mbarrier_wait(&smem.dp_full, phase);
      score_gradients(params.attention, smem.exchange, place.thread, delta, s, derivative);
      pack<T>(packed, s);
      store_packed(smem.exchange, place.thread, packed);
      mbarrier_arrive(&smem.ds_full);
      product<T, true, ColumnsOperand>(dq, packed, smem_address(smem.k));
      wait_products<0>();
      arrive_warp(&smem.k_empty[0], place.lane);
    }
  }

  // Warpgroup 1. A thread writes its slots of the exchange buffer again only after it has read dS from them.
  __device__ __forceinline__ void run_values(float (&dq)[Traits::accumulators(1)]) {
    if (work.blocks.empty()) return;
    uint32_t dout[std::max(Traits::kRegisterAtoms, 1)][kAtomRegisters];
    load_dout(dout);
    int32_t slot = 0;
    uint32_t phase = 0, slot_phase = 0;
#pragma unroll 1
    for (int32_t block = work.blocks.begin; block < work.blocks.end; ++block, phase ^= 1) {
      uint32_t packed[kScores / 2];
      {
        float dp[kScores];
        multiply_values(dp, dout, slot, slot_phase);
#pragma unroll
        for (int j = 0; j < kScores / 4; ++j) {
          smem.exchange[j][place.thread] = make_float4(dp[4 * j], dp[4 * j + 1], dp[4 * j + 2], dp[4 * j + 3]);
        }
      }
      mbarrier_arrive(&smem.dp_full);
      mbarrier_wait(&smem.ds_full, phase);
      load_packed(packed, smem.exchange, place.thread);
      mbarrier_wait(&smem.k_full[1], phase);
      product<T, true, ColumnsOperand>(dq, packed, smem_address(smem.k) + kRightBytes);
      wait_products<0>();
      arrive_warp(&smem.k_empty[1], place.lane);
    }
  }

 private:
  // The values of this thread's rows. The preprocess wrote them to L2; this kernel has not waited for a launch, which
  // would clear older values from L1.
  static __device__ __forceinline__ ValuesOfRows load_rows(const float* first) {
    return {{__ldcg(first), __ldcg(first + 8)}};
  }

  // S: q and k, over all columns.
  __device__ __forceinline__ void multiply(float (&s)[kScores], uint32_t phase) {
    const uint32_t q = smem_address(smem.q), k = smem_address(smem.k);
    mbarrier_wait(&smem.k_full[0], phase);
    product<T, 4 * Traits::atoms_of(0), false, RowsOperand, RowsOperand>(s, q, k);
    mbarrier_wait(&smem.k_full[1], phase);
    product<T, 4 * Traits::atoms_of(1), true, RowsOperand, RowsOperand>(s, q + kRightBytes, k + kRightBytes);
    wait_products<0>();
    fence_registers(s);
  }

  // Moves the first atoms of dout to registers, and releases their slots. Without the fence, TMA may write v to a slot
  // before all of dout has been read from it.
  template <int kAtoms>
  __device__ __forceinline__ void load_dout(uint32_t (&dout)[kAtoms][kAtomRegisters]) {
    mbarrier_wait(&smem.dout_full, 0);
#pragma unroll
    for (int atom = 0; atom < Traits::kRegisterAtoms; ++atom) {
      load_operand<kAtomBytes, kAtomSteps>(dout[atom], smem_address(smem.dout[atom]), place.warp, place.lane);
    }
    fence_async_shared();
#pragma unroll
    for (int atom = 0; atom < Traits::kRegisterAtoms; ++atom) {
      mbarrier_arrive(&smem.v_empty[Traits::kFreeSlots + atom]);
    }
  }

  // dP: dout and v, whose atoms pass through the slots of a ring.
  template <int kAtoms>
  __device__ __forceinline__ void multiply_values(float (&dp)[kScores], uint32_t (&dout)[kAtoms][kAtomRegisters],
                                                  int32_t& slot, uint32_t& slot_phase) {
    int32_t before = 0;  // the slot before
#pragma unroll
    for (int atom = 0; atom < Traits::kAtoms; ++atom) {
      mbarrier_wait(&smem.v_full[slot], slot_phase);
      const uint32_t a = smem_address(smem.dout[atom]), b = smem_address(smem.value_slot(slot));
      constexpr int kFirstSteps = Traits::kRegisterAtoms > 0 ? kAtomSteps : 0;
      if (atom == 0) {
        product<T, kAtomSteps, kFirstSteps, false, RowsOperand, RowsOperand>(dp, dout[0], a, b);
      } else if (atom < Traits::kRegisterAtoms) {
        product<T, kAtomSteps, kAtomSteps, true, RowsOperand, RowsOperand>(dp, dout[atom % kAtoms], a, b);
      } else {
        product<T, kAtomSteps, true, RowsOperand, RowsOperand>(dp, a, b);
      }
      if (atom > 0) {
        wait_products<1>();
        mbarrier_arrive(&smem.v_empty[before]);
      }
      before = slot;
      const bool wraps = slot + 1 == Traits::kSlots;
      slot = wraps ? 0 : slot + 1;
      slot_phase ^= wraps;
    }
    wait_products<0>();
    mbarrier_arrive(&smem.v_empty[before]);
    fence_registers(dp);
  }
};

template <typename Traits, int kHalf>
__device__ void compute_query_gradients(const KernelParams& params, typename Traits::QueryGradientsStorage& smem) {
  float dq[Traits::accumulators(kHalf)];
#pragma unroll
  for (int i = 0; i < Traits::accumulators(kHalf); ++i) dq[i] = 0.f;
  QueryGradientsConsumer<Traits> consumer{params, smem, smem.work};
  if constexpr (kHalf == 0) {
    consumer.run_scores(dq);
  } else {
    consumer.run_values(dq);
  }
  fence_registers(dq);
#pragma unroll
  for (int i = 0; i < Traits::accumulators(kHalf); ++i) dq[i] *= params.attention.softmax_scale;
  // Each warpgroup stages in the operand that it alone has read.
  store_gradient<typename Traits::T, Traits::atoms_of(kHalf)>(
      params.dq, smem.work, Traits::first_atom(kHalf) * kAtomColumns, kHalf == 0 ? smem.q : smem.dout[0],
      kWarpgroupBarrier + kHalf, dq);
}

// Launched while the kernel for dk and dv may still run, whose results it does not read. That kernel has waited for the
// preprocess before it allowed this launch.
template <typename Traits>
__global__ void __launch_bounds__(kThreads, 1) query_gradients_kernel(const __grid_constant__ KernelParams params) {
  extern __shared__ __align__(1024) uint8_t storage[];
  auto& smem = *reinterpret_cast<typename Traits::QueryGradientsStorage*>(storage);
  const int32_t warp = __shfl_sync(0xffffffffu, static_cast<int32_t>(threadIdx.x) / 32, 0);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&params.q);
    prefetch_tensor_map(&params.k);
    prefetch_tensor_map(&params.v);
    prefetch_tensor_map(&params.dout);
    Traits::init_barriers(smem);
    find_work_tile<false>(smem.work, params.attention, blockIdx.x);
  }
  __syncthreads();
  if (smem.work.exists) {
    if (warp < kWarps) {
      shrink_registers<kProducerRegisters>();
      if (warp == 0) load_query_gradients<Traits, false>(params, smem);
      if (warp == 1) load_query_gradients<Traits, true>(params, smem);
    } else if (warp < 2 * kWarps) {
      grow_registers<kConsumerRegisters>();
      compute_query_gradients<Traits, 0>(params, smem);
    } else {
      grow_registers<kConsumerRegisters>();
      compute_query_gradients<Traits, 1>(params, smem);
    }
  }
  wait_for_previous_launch();  // so that this launch ends after the previous one, as a later launch expects
}

}  // namespace flashbwd::sm90::head_dim_512

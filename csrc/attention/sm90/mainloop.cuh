// The main loop of the consumer warpgroups, which own 64 keys each, or with Tile::by_queries half of the queries each.
// docs/kernels/attention_sm90.md, "One iteration", explains which operands lie in registers and in shared memory.
#pragma once

#include <algorithm>

#include "dq_accumulate.cuh"
#include "kernel_params.h"
#include "score_mod/score_mod.cuh"
#include "tile_mask.cuh"
#include "traits.cuh"

namespace flashbwd::sm90 {

// One work tile in one consumer warpgroup. kDqColumns: columns of dq that it computes.
template <typename Traits, int kDqColumns>
struct Mainloop {
  using T = typename Traits::T;
  using ScoreMod = sm90::ScoreMod<Traits>;
  using DqBuffer = sm90::DqBuffer<Traits>;
  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr bool kEarlyDv = Traits::kEarlyDv;
  static constexpr bool kByQueries = Traits::kByQueries;
  static constexpr bool kBias = Traits::kBias;
  static constexpr int kMmaTiles = Traits::kMmaTiles;
  static constexpr int kRowBytes = Traits::kRowBytes;
  using QueryRing = Ring<Traits::kStages>;
  using DoutRing = Ring<Traits::kDoutStages>;
  using KeyColumns = KMajorOperand<Traits::kKeyAtomBytes, kRowBytes>;
  using KeyRows = MnMajorOperand<Traits::kKeyAtomBytes, kRowBytes>;
  using QueryColumns = KMajorOperand<Traits::kQueryAtomBytes, kRowBytes>;
  using QueryRows = MnMajorOperand<Traits::kQueryAtomBytes, kRowBytes>;
  using DsOperand =
      std::conditional_t<kBias, KMajorOperand<Traits::kDsAtomBytes>, MnMajorOperand<Traits::kDsAtomBytes>>;
  // Per 64 keys of a warpgroup: accumulators and their 16-bit copies. Then the elements of dq that it computes.
  using Scores = float[kMmaTiles][Traits::kOwnQueries / 2];
  using Operand = uint32_t[kMmaTiles][Traits::kOwnQueries / 4];
  using KeyAccumulators = float[kMmaTiles][kHeadDim / 2];
  using Dq = float[kDqColumns / 2];  // (64 queries, kDqColumns)

  const KernelParams& params;
  typename Traits::SharedStorage& smem;
  const typename Traits::WorkTile& work;
  int32_t warpgroup;
  DqPhases& dq_phases;
  typename TileMask<Traits>::Iterator it = TileMask<Traits>::first_iteration(smem, work);
  TileMask<Traits> tile_mask{work};
  int32_t last_index_ = it.end - 1;
  int32_t warp = threadIdx.x % kWarpgroupThreads / 32;
  int32_t lane = threadIdx.x % 32;
  int32_t pair = lane % 4 * 2;  // first of this thread's two adjacent columns in each 8 of an accumulator
  float scale_log2 = params.attention.softmax_scale * kLog2E;
  float delta_factor = Traits::kDrops && !kBias ? 1.f / params.features.dropout_scale : 1.f;  // DroppedScores

  // First key and first query of this warpgroup within the tile.
  int32_t own_key = kByQueries ? 0 : warpgroup * 64, own_query = kByQueries ? warpgroup * 64 : 0;

  // Operands of this warpgroup: its rows of k and v, and the columns of k for its columns of dq.
  uint32_t k_rows = smem_address(smem.k) + own_key * kRowBytes;
  uint32_t v_rows = smem_address(smem.v) + own_key * kRowBytes;
  uint32_t k_columns = smem_address(smem.k) + (Traits::kBatchEntries > 1
                                                   ? warpgroup * Traits::kKeyBytes
                                                   : warpgroup % Traits::kDqColumnTiles * KeyRows::column_bytes(64));
  uint32_t ds_rows = warpgroup / Traits::kDqColumnTiles * (kBias ? 64 * kAtomRowBytes : Traits::kDsAtomBytes);
  uint32_t k_operand[4 * std::max(Traits::kKeySteps, 1)] = {}, v_operand[4 * std::max(Traits::kValueSteps, 1)] = {};

  // dk, dv: (64 keys, kHeadDim) accumulators of this warpgroup, zero at entry.
  __device__ __forceinline__ void compute(KeyAccumulators& dk, KeyAccumulators& dv) {
    wait_keys();
    load_operand<Traits::kKeyAtomBytes, Traits::kKeySteps, kRowBytes>(k_operand, k_rows, warp, lane);
    load_operand<Traits::kKeyAtomBytes, Traits::kValueSteps, kRowBytes>(v_operand, v_rows, warp, lane);
    run(dk, dv);
  }

  // One product always runs while the warps compute or wait (docs/kernels/attention_sm90.md, "One iteration"). The loop
  // body starts where no product is outstanding, after dS of one iteration, and ends with dS of the next, because ptxas
  // cannot follow an accumulator that the loop reads across its back edge.
  __device__ __forceinline__ void run(KeyAccumulators& dk, KeyAccumulators& dv) {
    Operand p16, ds16;  // first operands of dV and dK
    Dq dq;
    {
      Scores s;
      wait_q();
      issue_s(s);
      score_gradients(s, p16, ds16, dv);
    }
#pragma unroll 1
    while (it.index < last_index()) {
      const int32_t index = it.index, stage = QueryRing::stage(index), dout_stage = DoutRing::stage(index);
      issue_covered_dq(p16, ds16, dq, dk, dv);
      ScoreMod::store_bias_gradient(*this, ds16);
      wait_products<1>();  // dK or dV is complete, so the registers of its first operand are free
      it.advance(work);
      Scores s;
      wait_q();
      wait_scores();
      issue_s(s);
      if constexpr (kEarlyDv) {
        const bool is_last = DqBuffer::wait_buffer(*this, index);
        wait_products<kMmaTiles>();  // dQ is complete
        signal_scores(warpgroup);
        release(stage, dout_stage);
        DqBuffer::write(*this, dq, index, is_last);
      } else {
        signal_scores(warpgroup);
        issue_dk(ds16, dk, stage);
        const bool is_last = DqBuffer::wait_buffer(*this, index);
        wait_products<2 * kMmaTiles>();  // dQ is complete
        DqBuffer::write(*this, dq, index, is_last);
        wait_products<0>();
        release(stage, dout_stage);
      }
      score_gradients(s, p16, ds16, dv);
    }
    const int32_t stage = QueryRing::stage(it.index);
    arrive_warp(&smem.v_empty, lane);
    issue_covered_dq(p16, ds16, dq, dk, dv);
    ScoreMod::store_bias_gradient(*this, ds16);
    if constexpr (!kEarlyDv) issue_dk(ds16, dk, stage);
    const bool is_last = DqBuffer::wait_buffer(*this, it.index);
    wait_products<0>();
    release(stage, DoutRing::stage(it.index));
    arrive_warp(&smem.k_empty, lane);
    DqBuffer::write(*this, dq, it.index, is_last);
#pragma unroll
    for (int m = 0; m < kMmaTiles; ++m) {
      fence_registers(dk[m]);
      fence_registers(dv[m]);
    }
  }

  // Read from shared memory again if batch entries share the work tile: that loop has no register left for it.
  __device__ __forceinline__ int32_t last_index() const {
    return Traits::kBatchEntries > 1 ? work.first_index + work.iterations - 1 : last_index_;
  }

  // Orders the products S: warpgroup 1 issues S of iteration i, then warpgroup 0, then warpgroup 1 that of i + 1.
  __device__ __forceinline__ void wait_scores() const {
    if constexpr (Traits::kOrdersScores) named_barrier_sync(kScoresBarrier + warpgroup, kConsumerThreads);
  }
  static __device__ __forceinline__ void signal_scores(int32_t warpgroup) {
    if constexpr (Traits::kOrdersScores) named_barrier_arrive(kScoresBarrier + (warpgroup ^ 1), kConsumerThreads);
  }

  // Each warpgroup says that it has written its dS of an iteration, and waits for the other's.
  static __device__ __forceinline__ void signal_ds(int32_t warpgroup, int32_t index) {
    named_barrier_arrive(kDsBarrier + 2 * (index % 2) + (warpgroup ^ 1), kConsumerThreads);
  }
  static __device__ __forceinline__ void wait_ds(int32_t warpgroup, int32_t index) {
    named_barrier_sync(kDsBarrier + 2 * (index % 2) + warpgroup, kConsumerThreads);
  }

  // Issues dQ when dS of all keys that it sums over is written.
  __device__ __forceinline__ void issue_dq(Dq& dq, int32_t index) {
    if constexpr (kByQueries) {
      named_barrier_sync(kWarpgroupBarrier + warpgroup, kWarpgroupThreads);
    } else {
      wait_ds(warpgroup, index);
    }
    product<T, kBlockN / 16, false, DsOperand, KeyRows>(
        dq, smem_address(smem.ds[index % Traits::kDsBuffers][0]) + ds_rows, k_columns);
  }

  // May zero rows, which synchronizes both warpgroups: call it only where the other one cannot be waiting for this one.
  __device__ __forceinline__ void wait_q() { wait_queries<QueryRing>(smem.q_full, smem.q); }

  __device__ __forceinline__ void issue_s(Scores& s) {
#pragma unroll
    for (int m = 0; m < kMmaTiles; ++m) {
      product<T, kHeadDim / 16, Traits::kKeySteps, false, KeyColumns, QueryColumns>(
          s[m], k_operand, k_rows + m * Traits::kTileKeyBytes,
          smem_address(smem.q[QueryRing::stage(it.index)]) + m * Traits::kTileQueryBytes + own_query * kRowBytes);
    }
  }

  __device__ __forceinline__ void issue_dp(Scores& dp, uint32_t dout) {
    constexpr bool kDeltaFirst = ScoreMod::kDeltaFirst;
    constexpr ScaleIn kSign = kDeltaFirst ? ScaleIn::Neg : ScaleIn::One;
#pragma unroll
    for (int m = 0; m < kMmaTiles; ++m) {
      product<T, kHeadDim / 16, Traits::kValueSteps, kDeltaFirst, KeyColumns, QueryColumns, kSign>(
          dp[m], v_operand, v_rows + m * Traits::kTileKeyBytes,
          dout + m * Traits::kTileQueryBytes + own_query * kRowBytes);
    }
  }

  __device__ __forceinline__ void issue_dv(Operand& p16, KeyAccumulators& dv, int32_t stage) {
    multiply_rows(p16, dv, smem_address(smem.dout[stage]));
  }

  __device__ __forceinline__ void issue_dk(Operand& ds16, KeyAccumulators& dk, int32_t stage) {
    multiply_rows(ds16, dk, smem_address(smem.q[stage]));
  }

  __device__ __forceinline__ void multiply_rows(Operand& a, KeyAccumulators& gradient, uint32_t queries) {
#pragma unroll
    for (int m = 0; m < kMmaTiles; ++m) {
      product<T, true, QueryRows>(gradient[m], a[m], queries + m * Traits::kTileQueryBytes + own_query * kRowBytes);
    }
  }

  // Issues dK or dV, which covers the wait for the other warpgroup, and then dQ of this iteration.
  __device__ __forceinline__ void issue_covered_dq(Operand& p16, Operand& ds16, Dq& dq, KeyAccumulators& dk,
                                                   KeyAccumulators& dv) {
    if constexpr (kEarlyDv) {
      issue_dk(ds16, dk, QueryRing::stage(it.index));
    } else {
      issue_dv(p16, dv, DoutRing::stage(it.index));
    }
    issue_dq(dq, it.index);
  }

  // From an outstanding S to dS in registers and in shared memory. No product is outstanding at exit.
  __device__ __forceinline__ void score_gradients(Scores& s, Operand& p16, Operand& ds16, KeyAccumulators& dv) {
    const int32_t stage = DoutRing::stage(it.index);
    Scores dp;  // delta - dP^T or dP^T, then dS^T: (64 keys, kBlockM)
    wait_queries<DoutRing>(smem.dout_full, smem.dout);
    QueryValues<Traits::kEarlyLse> lse(&smem.lse_log2[QueryRing::stage(it.index)][own_query + pair]);
    lse.load_early();
    const float* const first_delta = &smem.delta[stage][own_query + pair];
    tile_mask.find(*this);
    ScoreMod mod(*this);
    if constexpr (ScoreMod::kDeltaFirst) {
      for_each_query<0, kBlockM / 2>(QueryValues<0>(first_delta), [&](int i, float row) { dp[0][i] = row; });
    }
    // Issuing dP right after S, without this wait, was 2 to 5 % slower.
    wait_products<0>();
    fence_parts(s);
    issue_dp(dp, smem_address(smem.dout[stage]));
    QueryValues<Traits::kEarlyDelta> delta(first_delta);
    if constexpr (!kEarlyDv) delta.load_early();  // before the branch of a mask, over which ptxas moves no load
    mod.probabilities(*this, s, p16, lse);
    if constexpr (kEarlyDv) {
      delta.load_early();  // dropout needs it; no register was left before
      mod.pack_probabilities(*this, p16, s);
      issue_dv(p16, dv, stage);
      wait_products<kMmaTiles>();
    } else {
      wait_products<0>();
    }
    fence_parts(dp);
    mod.gradients(*this, s, p16, dp, lse, delta);
    mod.pack_gradients(*this, ds16, dp);
    if constexpr (!kEarlyDv) mod.pack_probabilities(*this, p16, s);
    // The dS buffer is free: both warpgroups waited for the dQ that read it two iterations ago before they arrived at
    // the last dS barrier. With kByQueries, the warps of this warpgroup met after the dQ that read it (kMeetsAtDq).
    ScoreMod::store_gradients(*this, ds16);
    fence_async_shared();
    if constexpr (!kByQueries) signal_ds(warpgroup, it.index);
    if constexpr (kEarlyDv) wait_products<0>();
  }

  // The first key of this thread within the tile.
  __device__ __forceinline__ int32_t first_own_key() const { return own_key + warp * 16 + lane / 4; }

  static __device__ __forceinline__ void fence_parts(Scores& values) {
#pragma unroll
    for (int m = 0; m < kMmaTiles; ++m) fence_registers(values[m]);
  }

  // Releases these stages of q and dout. Every thread arrives, because each has read lse and delta.
  __device__ __forceinline__ void release(int32_t stage, int32_t dout_stage) {
    ScoreMod::release_gradients();
    mbarrier_arrive(&smem.dout_empty[dout_stage]);
    mbarrier_arrive(&smem.q_empty[stage]);
  }

  __device__ __forceinline__ void wait_keys() {
    mbarrier_wait(&smem.k_full, work.keys_phase);
    mbarrier_wait(&smem.v_full, work.keys_phase);
    const int32_t valid = work.visibility.seqlen_k - work.first_key;
    if (params.rows_may_be_poisoned && valid < kBlockN) {
      zero_invalid_rows<Traits::kAtoms, Traits::kKeyAtomBytes, kConsumerThreads, kRowBytes>(smem.k, valid,
                                                                                            kConsumersBarrier);
      zero_invalid_rows<Traits::kAtoms, Traits::kKeyAtomBytes, kConsumerThreads, kRowBytes>(smem.v, valid,
                                                                                            kConsumersBarrier);
    }
    if constexpr (kBias) KeyMask<Traits>::apply(*this);
  }

  template <typename Ring>
  __device__ __forceinline__ void wait_queries(uint64_t* full, uint8_t (*tiles)[sizeof(smem.q[0])]) {
    const int32_t stage = Ring::stage(it.index);
    mbarrier_wait(&full[stage], Ring::phase(it.index));
    // With a block mask, tensors are dense, and TMA loads zeros past their end.
    if (Traits::kTestsPoisonFirst && (Traits::kBlockMask || !params.rows_may_be_poisoned)) return;
    const int32_t valid = work.visibility.seqlen_q - it.query_block() * kBlockM;
    if (params.rows_may_be_poisoned && valid < kBlockM) {
      zero_invalid_rows<Traits::kAtoms, Traits::kQueryAtomBytes, kConsumerThreads, kRowBytes>(tiles[stage], valid,
                                                                                              kConsumersBarrier);
    }
  }
};

}  // namespace flashbwd::sm90

// The three consumer warpgroups, each a stage of a pipeline over the query blocks of 64 keys. Probabilities computes
// P^T and dv, ScoreGradients dS^T and dk, QueryGradients dq. docs/kernels/attention_sm90.md, "Large head dimensions",
// shows what they hand to one another.
#pragma once

#include <algorithm>

#include "../../pre_post/bias_gradient_writer.cuh"
#include "../dq_boxes.cuh"
#include "consumer.cuh"
#include "features.cuh"
#include "score_mod.cuh"

namespace flashbwd::sm90::large_head_dim {

template <typename Traits>
struct Probabilities : Consumer<Traits> {
  using Base = Consumer<Traits>;
  using Base::params, Base::smem, Base::work, Base::it, Base::thread, Base::warp, Base::lane, Base::pair;
  using typename Base::T;
  using QueryRing = typename Base::QueryRing;
  using DoutRing = typename Base::DoutRing;
  static constexpr int kBlockM = Traits::kBlockM;

  static constexpr int kOperandRegisters = 4 * std::max(Traits::kKeySteps, 1);  // of k, see Traits::kKeySteps
  uint32_t visible = ~0u;  // block masks: a bit for each score of this thread (BitMask)
  // At head dimension 256 the outstanding operands leave no registers to draw the dropout mask while S is computed.
  static constexpr bool kMaskUnderS = Traits::kHeadDimV <= 192;

  // dv: (kBlockN, kHeadDimV). The loop body starts and ends where no product is outstanding, because ptxas cannot
  // follow an accumulator that the loop reads across its back edge.
  __device__ __forceinline__ void run(float (&dv)[Traits::kHeadDimV / 2]) {
    bool ends;                  // is_last(), read before P is stored, because a load waits for the stores before it
    uint32_t p16[kBlockM / 4];  // first operand of dv
    uint32_t k_operand[kOperandRegisters];
    mbarrier_wait(&smem.k_full, work.keys_phase);
    if (this->has_poisoned_keys()) {
      zero_invalid_rows<Traits::kAtoms, Traits::kKeyAtomBytes, kWarpgroupThreads>(smem.k, this->valid_keys(),
                                                                                  kProbabilityBarrier);
    }
    load_operand<Traits::kKeyAtomBytes, Traits::kKeySteps>(k_operand, smem_address(smem.k), warp, lane);
    {
      float s[kBlockM / 2];  // S^T, then P^T: (kBlockN, kBlockM)
      issue_s(s, k_operand);
      uint32_t dropped = kMaskUnderS ? draw() : 0;
      wait_products<0>();
      if constexpr (!kMaskUnderS) dropped = draw();
      ends = this->is_last();
      probabilities(s, p16, dropped);
    }
#pragma unroll 1
    while (!ends) {
      const int32_t stage = DoutRing::stage(it.index);
      float s[kBlockM / 2];
      this->wait_dout();
      issue_dv(p16, dv, stage);
      it.advance(work);
      issue_s(s, k_operand);
      uint32_t dropped = kMaskUnderS ? draw() : 0;
      wait_products<1>();
      arrive_warp(&smem.dout_empty[stage], lane);
      wait_products<0>();
      if constexpr (!kMaskUnderS) dropped = draw();
      ends = this->is_last();
      probabilities(s, p16, dropped);
    }
    arrive_warp(&smem.k_empty, lane);
    const int32_t stage = DoutRing::stage(it.index);
    this->wait_dout();
    issue_dv(p16, dv, stage);
    wait_products<0>();
    arrive_warp(&smem.dout_empty[stage], lane);
    fence_registers(dv);
  }

 private:
  __device__ __forceinline__ void issue_s(float (&s)[kBlockM / 2], uint32_t (&k_operand)[kOperandRegisters]) {
    const int32_t stage = QueryRing::stage(it.index);
    mbarrier_wait(&smem.q_full[stage], QueryRing::phase(it.index));
    if (this->has_poisoned_queries()) {
      zero_invalid_rows<Traits::kAtoms, Traits::kQueryAtomBytes, kWarpgroupThreads>(
          smem.q[stage], this->valid_queries(), kProbabilityBarrier);
    }
    if constexpr (Traits::kBlockMask) visible = this->load_visible();
    if constexpr (Traits::kFeatures) score_tile().start(s);
    product<T, Traits::kHeadDim / 16, Traits::kKeySteps, Traits::kFeatures, typename Base::KeyColumns,
            typename Base::QueryColumns>(s, k_operand, not_hoisted(smem_address(smem.k)),
                                         not_hoisted(smem_address(smem.q[stage])));
  }

  __device__ __forceinline__ ScoreTile<Traits> score_tile() const {
    return {params, work, it.head(), it.query_block() * kBlockM + pair, work.first_key + warp * 16 + lane / 4};
  }

  __device__ __forceinline__ uint32_t draw() const {
    if constexpr (Traits::kFeatures) return score_tile().dropped();
    return 0;
  }

  __device__ __forceinline__ void issue_dv(uint32_t (&p16)[kBlockM / 4], float (&dv)[Traits::kHeadDimV / 2],
                                           int32_t stage) {
    product<T, true, typename Base::QueryRows>(dv, p16, smem_address(smem.dout[stage]));
  }

  // From a complete S to P in p16, and to what the warpgroup of dS needs in shared memory.
  __device__ __forceinline__ void probabilities(float (&s)[kBlockM / 2], uint32_t (&p16)[kBlockM / 4],
                                                uint32_t dropped) {
    const int32_t stage = QueryRing::stage(it.index);
    fence_registers(s);
    if constexpr (Traits::kFeatures) {
      mbarrier_wait(&smem.p_empty[warp], (it.index & 1) ^ 1);
      score_tile().probabilities(s, &smem.lse_log2[stage][pair], dropped, &smem.p[0][thread]);
      mbarrier_arrive(&smem.q_empty[stage]);
      mbarrier_arrive(&smem.p_full[warp]);
      pack<T>(p16, s);
    } else if constexpr (Traits::kScoreMod) {
      mbarrier_wait(&smem.p_empty[warp], (it.index & 1) ^ 1);
      modified_probabilities<Traits>(*this, visible, s, p16, &smem.lse_log2[stage][pair], &smem.p[0][thread]);
      mbarrier_arrive(&smem.q_empty[stage]);
      mbarrier_arrive(&smem.p_full[warp]);
    } else {
      const BlockRange interior = work.interior;
      exponentiate(s, QueryValues<0>(&smem.lse_log2[stage][pair]), params.attention.softmax_scale * kLog2E);
      mbarrier_arrive(&smem.q_empty[stage]);
      if constexpr (Traits::kBlockMask) {
        if (visible != ~0u) keep_visible(s, [&](int half) { return visible >> 16 * half; });
      } else if (!interior.contains(it.query_block())) {
        const TileVisibility tile(work.visibility, work.first_key, it.query_block() * kBlockM);
        mask<kBlockM>(s, tile, warp * 16 + lane / 4, pair);
      }
      mbarrier_wait(&smem.p_empty[warp], (it.index & 1) ^ 1);
      send<0, kBlockM / 2>(s, &smem.p[0][thread]);
      mbarrier_arrive(&smem.p_full[warp]);
      pack<T>(p16, s);
    }
  }
};

template <typename Traits>
struct ScoreGradients : Consumer<Traits> {
  using Base = Consumer<Traits>;
  using Base::params, Base::smem, Base::work, Base::it, Base::thread, Base::warp, Base::lane, Base::pair;
  using typename Base::T;
  using QueryRing = typename Base::QueryRing;
  using DsRing = typename Base::DsRing;
  using DoutRing = typename Base::DoutRing;
  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kOperandRegisters = 4 * std::max(Traits::kValueSteps, 1);  // of v, see Traits::kValueSteps
  // Unused in kernels without a bias gradient.
  BiasGradientWriter<T, kBlockM, typename Traits::WorkTile> bias_gradient{
      Base::params.features.bias_gradient,
      Base::params.attention,
      Base::work,
      Base::lane,
      Base::work.key_block * Traits::kWarps + Base::warp,
      Base::work.first_key + Base::warp * 16 + Base::lane / 4};

  // dk: (kBlockN, kHeadDim)
  __device__ __forceinline__ void run(float (&dk)[Traits::kHeadDim / 2]) {
    uint32_t ds16[kBlockM / 4];  // first operand of dk
    uint32_t v_operand[kOperandRegisters];
    mbarrier_wait(&smem.v_full, work.keys_phase);
    if (this->has_poisoned_keys()) {
      zero_invalid_rows<Traits::kAtomsV, Traits::kKeyAtomBytes, kWarpgroupThreads>(smem.v, this->valid_keys(),
                                                                                   kScoreGradientBarrier);
    }
    load_operand<Traits::kKeyAtomBytes, Traits::kValueSteps>(v_operand, smem_address(smem.v), warp, lane);
    {
      float dp[kBlockM / 2];  // dP^T, then dS^T: (kBlockN, kBlockM)
      this->wait_dout();
      issue_dp(dp, v_operand);
      wait_products<0>();
      score_gradients(dp);
      store(ds16, dp);
    }
#pragma unroll 1
    while (!this->is_last()) {
      const int32_t index = it.index;
      float dp[kBlockM / 2];
      issue_dk(ds16, dk, index);
      it.advance(work);
      this->wait_dout();
      issue_dp(dp, v_operand);
      wait_products<0>();
      release_queries(index);
      score_gradients(dp);
      store(ds16, dp);
    }
    issue_dk(ds16, dk, it.index);
    wait_products<0>();
    release_queries(it.index);
    fence_registers(dk);
  }

 private:
  __device__ __forceinline__ void release_queries(int32_t index) {
    uint64_t* const empty = &smem.q_empty[QueryRing::stage(index)];
    if constexpr (Traits::kSendsScores) {
      mbarrier_arrive(empty);
    } else {
      arrive_warp(empty, lane);
    }
  }

  __device__ __forceinline__ void issue_dp(float (&dp)[kBlockM / 2], uint32_t (&v_operand)[kOperandRegisters]) {
    product<T, Traits::kHeadDimV / 16, Traits::kValueSteps, false, typename Base::KeyColumns,
            typename Base::QueryColumns>(dp, v_operand, not_hoisted(smem_address(smem.v)),
                                         not_hoisted(smem_address(smem.dout[DoutRing::stage(it.index)])));
  }

  // P of this iteration was computed from q, so q is complete and scrubbed.
  __device__ __forceinline__ void issue_dk(uint32_t (&ds16)[kBlockM / 4], float (&dk)[Traits::kHeadDim / 2],
                                           int32_t index) {
    mbarrier_wait(&smem.q_full[QueryRing::stage(index)], QueryRing::phase(index));
    product<T, true, typename Base::QueryRows>(dk, ds16, smem_address(smem.q[QueryRing::stage(index)]));
  }

  // dP, which is complete, becomes dS = P * (dP - delta).
  __device__ __forceinline__ void score_gradients(float (&dp)[kBlockM / 2]) {
    const int32_t stage = DoutRing::stage(it.index);
    fence_registers(dp);
    mbarrier_wait(&smem.p_full[warp], it.index & 1);
    if constexpr (Traits::kSendsScores) {
      const int32_t query_stage = QueryRing::stage(it.index);
      mbarrier_wait(&smem.q_full[query_stage], QueryRing::phase(it.index));  // lse and the entry of this stage
      modified_gradients<Traits>(*this, dp, &smem.p[0][read_thread() % kWarpgroupThreads],
                                 &smem.lse_log2[query_stage][pair], &smem.delta[stage][pair]);
    } else {
      multiply_probabilities(dp);
    }
    mbarrier_arrive(&smem.p_empty[warp]);
    // TMA may overwrite delta as soon as its only stage is empty, but the last loads may still be under way where the
    // scores have features. With two stages it also waits for q_empty, which follows the next dS.
    if constexpr (Traits::kDoutStages == 1 && !has_plain_scores(Traits::kTile)) fence_async_shared();
    mbarrier_arrive(&smem.dout_empty[stage]);
  }

  __device__ __forceinline__ void multiply_probabilities(float (&dp)[kBlockM / 2]) const {
    const int32_t stage = DoutRing::stage(it.index);
#pragma unroll
    for (int j = 0; j < kBlockM / 8; ++j) {
      const float2 delta = *reinterpret_cast<const float2*>(&smem.delta[stage][8 * j + pair]);
      const float4 p = smem.p[j][thread];
      dp[4 * j + 0] = score_gradient(p.x, dp[4 * j + 0], delta.x);
      dp[4 * j + 1] = score_gradient(p.y, dp[4 * j + 1], delta.y);
      dp[4 * j + 2] = score_gradient(p.z, dp[4 * j + 2], delta.x);
      dp[4 * j + 3] = score_gradient(p.w, dp[4 * j + 3], delta.y);
    }
  }

  __device__ __forceinline__ float score_gradient(float p, float dp, float delta) const {
    if constexpr (Traits::kFeatures) {
      // A row that its bias hides has probabilities of 0 and any delta.
      return p != 0.f ? fabsf(p) * ((is_kept(p) ? dp * params.features.dropout_scale : 0.f) - delta) : 0.f;
    } else {
      return p * (dp - delta);
    }
  }

  // No product is outstanding.
  __device__ __forceinline__ void store(uint32_t (&ds16)[kBlockM / 4], const float (&ds)[kBlockM / 2]) {
    if constexpr (Traits::kBiasGradient) {
      bias_gradient.add(ds, it.head(), it.query_block() * kBlockM + pair);
      if (this->is_last() || params.attention.heads != params.attention.heads_kv) {
        bias_gradient.add_key_sums(it.head());
      }
    }
    const int32_t buffer = DsRing::stage(it.index);
    pack<T>(ds16, ds);
    mbarrier_wait(&smem.ds_empty[buffer], DsRing::phase(it.index) ^ 1);
    const int32_t own_lane = Traits::kSendsScores ? read_thread() % 32 : lane;  // offsets in registers would spill
    store_operand<Traits::kBlockN>(smem_address(smem.ds[buffer]), ds16, warp * 16, own_lane);
    fence_async_shared();
    arrive_warp(&smem.ds_full[buffer], lane);
    if (Traits::kPairs && elect_one()) {
      constexpr int kBytes = Traits::kDsBytes / Traits::kWarps;  // the rows of this warp's keys
      bulk_copy_to_cta(smem.ds_other[buffer] + warp * kBytes, &smem.ds_other_full[buffer], rank_in_cluster() ^ 1,
                       smem.ds[buffer] + warp * kBytes, kBytes);
    }
  }
};

template <typename Traits>
struct QueryGradients {
  using KeyRows = MnMajorOperand<Traits::kKeyAtomBytes>;
  using DsRing = Ring<Traits::kDsBuffers>;
  using DqRing = Ring<Traits::kDqBuffers>;

  // Called before the first work tile.
  static __device__ __forceinline__ void expect_first(typename Traits::SharedStorage& smem) {
    if (Traits::kPairs && threadIdx.x % kWarpgroupThreads == 0) {
      for (int buffer = 0; buffer < Traits::kDsBuffers; ++buffer) expect_ds(smem, buffer);
    }
  }

  // `count`: atoms of 64 columns so far, over all work tiles.
  static __device__ void run(const KernelParams& params, typename Traits::SharedStorage& smem,
                             const typename Traits::WorkTile& work, int32_t rank, int32_t& count) {
    const int32_t thread = threadIdx.x % kWarpgroupThreads, warp = thread / 32, lane = thread % 32;
    const uint32_t k = smem_address(smem.k);
    const uint32_t k_other = smem_address(smem.k_other) - Traits::first_other_atom(rank) * Traits::kKeyAtomBytes;
    mbarrier_wait(&smem.k_full, work.keys_phase);
    if constexpr (Traits::kPairs) mbarrier_wait(&smem.k_other_full, work.keys_phase);
    const int32_t valid = max(work.visibility.seqlen_k - work.first_key - other_keys<Traits>(rank), 0);
    if (Traits::kPairs && params.rows_may_be_poisoned && valid < Traits::kBlockN) {
      zero_invalid_rows<Traits::kOtherAtoms, Traits::kKeyAtomBytes, kWarpgroupThreads>(smem.k_other, valid, kDqBarrier);
    }
#pragma unroll 1
    for (typename Traits::WorkTile::Iterator it(work); it.index < it.end; it.advance(work)) {
      const int32_t buffer = DsRing::stage(it.index);
      const BlockRange atoms = Traits::atoms_of(rank, it.query_block());
      mbarrier_wait(&smem.ds_full[buffer], DsRing::phase(it.index));
      if constexpr (Traits::kPairs) {
        mbarrier_wait(&smem.ds_other_full[buffer], DsRing::phase(it.index));
        if (thread == 0) expect_ds(smem, buffer);
      }
#pragma unroll 1
      for (int32_t atom = atoms.begin; atom < atoms.end; ++atom, ++count) {
        float dq[32];  // (kBlockM, 64)
        product<typename Traits::T, Traits::kBlockN / 16, false, KeyRows, KeyRows>(dq, smem_address(smem.ds[buffer]),
                                                                                   k + atom * Traits::kKeyAtomBytes);
        if constexpr (Traits::kPairs) {
          product<typename Traits::T, Traits::kBlockN / 16, true, KeyRows, KeyRows>(
              dq, smem_address(smem.ds_other[buffer]), k_other + atom * Traits::kKeyAtomBytes);
        }
        wait_products<0>();
        fence_registers(dq);
        if (atom == atoms.end - 1) {
          release(smem, buffer, rank, lane);
          if (it.index == it.end - 1) release_keys(smem, lane);
        }
        mbarrier_wait(&smem.dq_empty[DqRing::stage(count)], DqRing::phase(count) ^ 1);
        store_dq_boxes(smem.dq[DqRing::stage(count)], dq, params.attention.head_dim - atom * 64, warp, lane);
        arrive_warp(&smem.dq_full[it.index % kDqAdders][DqRing::stage(count)], lane);
      }
    }
  }

 private:
  static __device__ __forceinline__ void expect_ds(typename Traits::SharedStorage& smem, int32_t buffer) {
    mbarrier_arrive_expect(&smem.ds_other_full[buffer], Traits::kDsBytes);
  }

  // dS of both CTAs has been read.
  static __device__ __forceinline__ void release(typename Traits::SharedStorage& smem, int32_t buffer, int32_t rank,
                                                 int32_t lane) {
    __syncwarp();
    if (lane == 0) {
      mbarrier_arrive(&smem.ds_empty[buffer]);
      if constexpr (Traits::kPairs) mbarrier_arrive_in_cta(&smem.ds_empty[buffer], rank ^ 1);
    }
  }

  // Called after the last product of a work tile.
  static __device__ __forceinline__ void release_keys(typename Traits::SharedStorage& smem, int32_t lane) {
    if (lane == 0) {
      mbarrier_arrive(&smem.k_empty);
      if constexpr (Traits::kPairs) mbarrier_arrive(&smem.k_other_empty);
    }
  }
};

}  // namespace flashbwd::sm90::large_head_dim

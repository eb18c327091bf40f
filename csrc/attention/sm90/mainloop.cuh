// The consumer warpgroups. Each owns 64 keys. With S^T = K Q^T and dP^T = V dO^T, its accumulators hold P^T and dS^T in
// the register layout of a first operand, so dV += P^T dO and dK += dS^T Q read them from registers. Only dQ = dS K
// needs the keys of both warpgroups, so dS goes through shared memory. With Tile::by_queries, dk and dv of all keys fit
// in the registers of one warpgroup; each has half of the queries instead and needs only its own dS.
#pragma once

#include <algorithm>

#include "bias.cuh"
#include "fragments.cuh"
#include "kernel_params.h"
#include "scores.cuh"
#include "traits.cuh"

namespace flashbwd::sm90 {

// Says that this warpgroup has written its dS of iteration `index`.
inline __device__ void signal_ds(int32_t warpgroup, int32_t index) {
  named_barrier_arrive(kDsBarrier + 2 * (index % 2) + (warpgroup ^ 1), kConsumerThreads);
}

// Waits until the other warpgroup has written its dS.
inline __device__ void wait_ds(int32_t warpgroup, int32_t index) {
  named_barrier_sync(kDsBarrier + 2 * (index % 2) + warpgroup, kConsumerThreads);
}

// Says that this warpgroup has issued its S of an iteration.
inline __device__ void signal_scores(int32_t warpgroup) {
  named_barrier_arrive(kScoresBarrier + (warpgroup ^ 1), kConsumerThreads);
}

// Waits until the other warpgroup has issued its S; in warpgroup 1, that of the iteration before.
inline __device__ void wait_scores(int32_t warpgroup) {
  named_barrier_sync(kScoresBarrier + warpgroup, kConsumerThreads);
}

// kDqColumns: columns of the calling warpgroup's part of dq.
template <typename Traits, int kDqColumns>
struct Mainloop {
  using T = typename Traits::T;
  using SharedStorage = typename Traits::SharedStorage;
  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr bool kEarlyDv = Traits::kEarlyDv;
  static constexpr bool kDeltaFirst = Traits::kDeltaFirst;
  static constexpr bool kByQueries = Traits::kByQueries;
  static constexpr bool kDrops = Traits::kDrops;
  static constexpr bool kBias = Traits::kBias;
  static constexpr bool kScores = Traits::kScores;
  static constexpr int kKeyParts = Traits::kKeyParts;
  static constexpr int kOwnQueries = Traits::kOwnQueries;
  // How many values of a thread become P while dP is multiplied.
  static constexpr int kScoresUnderDp = kOwnQueries / (kScores && !kEarlyDv ? 4 : 2);
  using QueryRing = Ring<Traits::kStages>;
  using DoutRing = Ring<Traits::kDoutStages>;
  using WorkTile = typename Traits::WorkTile;
  static constexpr int kRowBytes = Traits::kRowBytes;
  using KeyColumns = AlongColumns<Traits::kKeyChunkBytes, kRowBytes>;
  using KeyRows = AlongRows<Traits::kKeyChunkBytes, kRowBytes>;
  using QueryColumns = AlongColumns<Traits::kQueryChunkBytes, kRowBytes>;
  using QueryRows = AlongRows<Traits::kQueryChunkBytes, kRowBytes>;
  using DsOperand = std::conditional_t<kBias, AlongColumns<Traits::kDsChunkBytes>, AlongRows<Traits::kDsChunkBytes>>;
  // Per 64 keys of a warpgroup: accumulators and their 16-bit copies. Then its part of dq.
  using Scores = float[kKeyParts][kOwnQueries / 2];
  using Operand = uint32_t[kKeyParts][kOwnQueries / 4];
  using KeyAccumulators = float[kKeyParts][kHeadDim / 2];
  using Dq = float[kDqColumns / 2];  // (64 queries, kDqColumns)

  // dk, dv: (64 keys, kHeadDim) accumulators of this warpgroup, zero at entry.
  // last_turns: a phase bit for each buffer of dq, flipped by each last add.
  static __device__ void compute(const KernelParams& params, SharedStorage& smem, const WorkTile& work,
                                 int32_t warpgroup, uint32_t& last_turns, KeyAccumulators& dk, KeyAccumulators& dv) {
    Consumer consumer{params, smem, work, warpgroup, last_turns, QueryIterator(work, work.first_index)};
    wait_keys(params, smem, work);
    consumer.load_operands();
    consumer.run(dk, dv);
  }

 private:
  struct Consumer {
    const KernelParams& params;
    SharedStorage& smem;
    const WorkTile& work;
    int32_t warpgroup;
    uint32_t& last_turns;
    QueryIterator step;
    // Copied from work, because every iteration needs them and shared memory would answer too late.
    BlockRange interior = work.interior;
    int32_t last_step = step.end - 1;
    int32_t warp = threadIdx.x % kWarpgroupThreads / 32;
    int32_t lane = threadIdx.x % 32;
    int32_t pair = lane % 4 * 2;  // first of this thread's two adjacent columns in each 8 of an accumulator
    float scale_log2 = params.attention.softmax_scale * kLog2E;
    // The scale of dropout is multiplied after the loop, so delta is divided by it. With a bias gradient it is
    // multiplied with dP instead.
    float delta_factor = kDrops && !kBias ? 1.f / params.features.dropout_scale : 1.f;

    // First key and first query of this warpgroup within the tile.
    int32_t own_key = kByQueries ? 0 : warpgroup * 64, own_query = kByQueries ? warpgroup * 64 : 0;

    // Operands of this warpgroup: its rows of k and v, and the columns of k for its part of dq.
    uint32_t k_rows = smem_address(smem.k) + own_key * kRowBytes;
    uint32_t v_rows = smem_address(smem.v) + own_key * kRowBytes;
    uint32_t k_columns = smem_address(smem.k) + warpgroup % Traits::kDqColumnParts * KeyRows::column_bytes(64);
    uint32_t ds_part = warpgroup / Traits::kDqColumnParts * (kBias ? 64 * kChunkRowBytes : Traits::kDsChunkBytes);
    uint32_t k_operand[4 * std::max(Traits::kKeySteps, 1)], v_operand[4 * std::max(Traits::kValueSteps, 1)];

    __device__ __forceinline__ void load_operands() {
      load_operand<Traits::kKeyChunkBytes, Traits::kKeySteps, kRowBytes>(k_operand, k_rows, warp, lane);
      load_operand<Traits::kKeyChunkBytes, Traits::kValueSteps, kRowBytes>(v_operand, v_rows, warp, lane);
    }

    // The products of an iteration are S and dP, then dV, dK and dQ. One of them always runs while the warps compute or
    // wait: dP under P, dV under dS, dK under the barrier, and the next S under the write of dq. If registers do not
    // allow dV so early, dV runs under the barrier, and S and dK under the write of dq. ptxas cannot follow an
    // accumulator that the loop reads across its back edge, so the loop body starts where no product is outstanding,
    // after dS of one iteration, and ends with dS of the next.
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
      while (step.index < last_step) {
        const int32_t index = step.index, stage = QueryRing::stage(index), dout_stage = DoutRing::stage(index);
        issue_dq(p16, ds16, dq, dk, dv);
        if constexpr (kBias) store_bias_gradient();
        wait_products<1>();  // the product before the barrier, so that its first operand leaves the registers
        step.advance(work);
        Scores s;
        wait_q();
        if constexpr (Traits::kOrdersScores) wait_scores(warpgroup);
        issue_s(s);
        if constexpr (!kEarlyDv) {
          if constexpr (Traits::kOrdersScores) signal_scores(warpgroup);
          issue_dk(ds16, dk, stage);
        }
        const bool is_last = wait_dq_buffer(index);
        wait_products<kEarlyDv ? kKeyParts : 2 * kKeyParts>();  // dQ
        if constexpr (kEarlyDv) {
          if constexpr (Traits::kOrdersScores) signal_scores(warpgroup);
          release(stage, dout_stage);
        }
        write_dq(dq, index, is_last);
        if constexpr (!kEarlyDv) {
          wait_products<0>();
          release(stage, dout_stage);
        }
        score_gradients(s, p16, ds16, dv);
      }
      const int32_t stage = QueryRing::stage(step.index);
      arrive(&smem.v_empty);
      issue_dq(p16, ds16, dq, dk, dv);
      if constexpr (kBias) store_bias_gradient();
      if constexpr (!kEarlyDv) issue_dk(ds16, dk, stage);
      const bool is_last = wait_dq_buffer(step.index);
      wait_products<0>();
      release(stage, DoutRing::stage(step.index));
      arrive(&smem.k_empty);
      write_dq(dq, step.index, is_last);
#pragma unroll
      for (int part = 0; part < kKeyParts; ++part) {
        fence_registers(dk[part]);
        fence_registers(dv[part]);
      }
    }

    // Writes dS to the buffer of iteration `index`. The other warpgroup waits for it in `multiply_dq`.
    __device__ __forceinline__ void hand_over_ds(const Operand& ds16, int32_t index) {
      const int32_t buffer = index % Traits::kDsBuffers;
      if constexpr (kBias) {
        store_score_tile(bias_place(index), ds16[0]);
      } else {
#pragma unroll
        for (int part = 0; part < kKeyParts; ++part) {
          store_ds<kBlockN>(smem_address(smem.ds[buffer][kByQueries ? warpgroup : 0]), ds16[part],
                            own_key + part * 64 + warp * 16, lane);
        }
      }
      fence_async_shared();
      if constexpr (!kByQueries) signal_ds(warpgroup, index);
    }

    // Issues dQ when dS of all keys that it sums over is written.
    __device__ __forceinline__ void multiply_dq(Dq& dq, int32_t index) {
      if constexpr (kByQueries) {
        named_barrier_sync(kWarpgroupBarrier + warpgroup, kWarpgroupThreads);
      } else {
        wait_ds(warpgroup, index);
      }
      product<T, kBlockN / 16, false, DsOperand, KeyRows>(
          dq, smem_address(smem.ds[index % Traits::kDsBuffers][0]) + ds_part, k_columns);
    }

    // Both warpgroups may meet here to scrub, so the other one must not be waiting for this one elsewhere.
    __device__ __forceinline__ void wait_q() { wait_queries<QueryRing>(params, work, step, smem.q_full, smem.q); }

    __device__ __forceinline__ void issue_s(Scores& s) {
#pragma unroll
      for (int part = 0; part < kKeyParts; ++part) {
        product<T, kHeadDim / 16, Traits::kKeySteps, false, KeyColumns, QueryColumns>(
            s[part], k_operand, k_rows + part * 64 * kRowBytes,
            smem_address(smem.q[QueryRing::stage(step.index)]) + own_query * kRowBytes);
      }
    }

    template <bool kAccumulate, ScaleIn kSign>
    __device__ __forceinline__ void issue_dp(Scores& dp, uint32_t dout) {
#pragma unroll
      for (int part = 0; part < kKeyParts; ++part) {
        product<T, kHeadDim / 16, Traits::kValueSteps, kAccumulate, KeyColumns, QueryColumns, kSign>(
            dp[part], v_operand, v_rows + part * 64 * kRowBytes, dout + own_query * kRowBytes);
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
      for (int part = 0; part < kKeyParts; ++part) {
        product<T, true, QueryRows>(gradient[part], a[part], queries + own_query * kRowBytes);
      }
    }

    // Issues dQ of this iteration after a product that covers the wait for the other warpgroup.
    __device__ __forceinline__ void issue_dq(Operand& p16, Operand& ds16, Dq& dq, KeyAccumulators& dk,
                                             KeyAccumulators& dv) {
      if constexpr (kEarlyDv) {
        issue_dk(ds16, dk, QueryRing::stage(step.index));
      } else {
        issue_dv(p16, dv, DoutRing::stage(step.index));
      }
      multiply_dq(dq, step.index);
    }

    // From an outstanding S to dS in registers and in shared memory. No product is outstanding at exit.
    __device__ __forceinline__ void score_gradients(Scores& s, Operand& p16, Operand& ds16, KeyAccumulators& dv) {
      const int32_t stage = DoutRing::stage(step.index);
      Scores dp;  // delta - dP^T or dP^T, then dS^T: (64 keys, kBlockM)
      wait_queries<DoutRing>(params, work, step, smem.dout_full, smem.dout);
      const float* const lse = &smem.lse_log2[QueryRing::stage(step.index)][own_query + pair];
      const float* const delta = &smem.delta[stage][own_query + pair];
      const EarlyRows<Traits::kEarlyLse> early_lse(lse);
      uint32_t dropped[kOwnQueries / 64];
      if constexpr (kDrops) draw(dropped);
      ScoreFunction function;
      if constexpr (kScores) function = score_function();
      if constexpr (kDeltaFirst) {
        for_each_delta(delta, EarlyRows<0>(delta), [&](int i, float value) { dp[0][i] = value; });
      }
      // Issuing dP right after S, without this wait, was 2 to 5 % slower.
      wait_products<0>();
      fence_parts(s);
      const uint32_t dout = smem_address(smem.dout[stage]);
      if constexpr (kDeltaFirst) {
        issue_dp<true, ScaleIn::Neg>(dp, dout);
      } else {
        issue_dp<false, ScaleIn::One>(dp, dout);
      }
      // P = exp(scale * S - lse), 0 where masked.
      if constexpr (kBias) {
        exponentiate_with_bias<T>(s[0], bias_place(step.index), lse, scale_log2, early_lse);
      } else if constexpr (kScores) {
        function.template exponentiate<0, kScoresUnderDp, T>(s[0], p16[0], lse, early_lse);
      } else if constexpr (Traits::kShifts) {
        score_function().exponentiate(s[0], lse, early_lse);
      } else {
#pragma unroll
        for (int part = 0; part < kKeyParts; ++part) {
          exponentiate<0, kOwnQueries / 2>(s[part], lse, scale_log2, early_lse);
        }
      }
      const bool masked = !interior.contains(step.query_block);
      if (!kScores && masked) mask_scores(s);
      if constexpr (kDrops) mark_dropped(s[0], dropped);
      const EarlyRows<Traits::kEarlyDelta> early_delta(delta);
      if constexpr (kEarlyDv) {
        if constexpr (!kScores) pack_parts<kDrops>(p16, s);
        if (kScores && masked) mask_pairs(p16);
        issue_dv(p16, dv, stage);
        wait_products<kKeyParts>();
      } else {
        wait_products<0>();
      }
      fence_parts(dp);
      // dS = P * (dP - delta)
#pragma unroll
      for (int part = 0; part < kKeyParts; ++part) {
        if constexpr (kDeltaFirst) {
#pragma unroll
          for (int i = 0; i < kOwnQueries / 2; ++i) dp[part][i] = s[part][i] * -dp[part][i];
        } else if constexpr (kDrops) {
          for_each_delta(delta, early_delta, [&](int i, float value) {
            const float of_kept = kBias ? dp[part][i] * params.features.dropout_scale : dp[part][i];
            dp[part][i] = fmaxf(s[part][i], 0.f) * of_kept - fabsf(s[part][i]) * (value * delta_factor);
          });
        } else {
          const auto subtract = [&](int i, float value) { dp[part][i] = s[part][i] * (dp[part][i] - value); };
          for_each_delta<0, kScoresUnderDp>(delta, early_delta, subtract);
          if constexpr (kScores) {  // the rest, because registers do not hold all of P and dP
            function.template exponentiate<kScoresUnderDp, kOwnQueries / 2, T>(s[0], p16[0], lse, early_lse);
            for_each_delta<kScoresUnderDp>(delta, early_delta, subtract);
          }
        }
      }
      if constexpr (!kEarlyDv && !kScores) pack_parts<kDrops>(p16, s);
      pack_parts<false>(ds16, dp);
      if (kScores && masked) {
        if constexpr (!kEarlyDv) mask_pairs(p16);
        mask_pairs(ds16);
      }
      // This buffer of dS was read two iterations ago, by products that both warpgroups waited for before they arrived
      // at the last barrier of dS. With kByQueries, this warpgroup waited for them before it wrote dq.
      hand_over_ds(ds16, step.index);
      if constexpr (kEarlyDv) wait_products<0>();
    }

    // Draws which probabilities of this iteration dropout drops.
    __device__ __forceinline__ void draw(uint32_t (&dropped)[kOwnQueries / 64]) const {
      const AttentionBackwardParams& p = params.attention;
      const uint64_t plane = uint64_t{static_cast<uint32_t>(work.batch)} * p.heads + step.head;
      const int32_t first_query = step.query_block * kBlockM;
      if constexpr (Traits::kEfficientDropout) {
        const uint64_t seed = uniform(smem.philox.seed);
        const WordNumbering numbering(smem.philox.offset, plane, p.seqlen_q, p.seqlen_k,
                                      p.dropout_layout == DropoutLayout::kEfficient32, work.visibility.seqlen_k);
#pragma unroll
        for (int word = 0; word < kOwnQueries / 64; ++word) {
          dropped[word] =
              draw_dropped_words<true>(seed, numbering, first_query + word * 64, work.first_key + own_key + warp * 16,
                                       params.features.dropout_threshold, lane);
        }
      } else {
        // The bits pass through this iteration's buffer of dS: no product reads it (see above), and a warp writes its
        // rows of dS only after it has read the bits in them.
        const int32_t first_key = own_key + warp / 2 * 32;  // of a pair of warps, within the tile
        uint8_t* const places = smem.ds[step.index % Traits::kDsBuffers][0] + first_key * kChunkRowBytes;
        draw_dropped<16 * kChunkRowBytes>(
            dropped, smem.philox, plane, first_query, work.first_key + first_key, params.features.dropout_threshold,
            warp % 2, lane, places, [&] { named_barrier_sync(kWarpgroupBarrier + warpgroup, kWarpgroupThreads); });
      }
    }

    // Shared memory address of this thread's part of the bias and of dS of iteration `index` (bias.cuh).
    __device__ __forceinline__ uint32_t bias_place(int32_t index) const {
      return smem_address(smem.ds[index % Traits::kDsBuffers][warpgroup]) + score_tile_place(warp, lane);
    }

    // Stores dS of this iteration as the gradient of the bias. The whole warpgroup has written it.
    __device__ __forceinline__ void store_bias_gradient() const {
      if (params.features.bias_gradient.mode == BiasGradientMode::kStore && threadIdx.x % kWarpgroupThreads == 0) {
        tensor_store_4d(&params.maps.bias_gradient, smem.ds[step.index % Traits::kDsBuffers][warpgroup],
                        work.first_key + own_key, step.query_block * kBlockM, step.head, work.batch, kEvictFirst);
        bulk_commit();
      }
    }

    __device__ __forceinline__ void mask_scores(Scores& s) const {
#pragma unroll
      for (int part = 0; part < kKeyParts; ++part) {
        mask(s[part], tile_visibility(), own_row() + part * 64, own_query + pair);
      }
    }
    __device__ __forceinline__ void mask_pairs(Operand& pairs) const {
      sm90::mask_pairs(pairs[0], tile_visibility(), own_row(), pair);
    }
    // The mask of this iteration's tile.
    __device__ __forceinline__ TileVisibility tile_visibility() const {
      return {work.visibility, work.first_key, step.query_block * kBlockM};
    }
    // The first key of this thread within the tile.
    __device__ __forceinline__ int32_t own_row() const { return own_key + warp * 16 + lane / 4; }

    __device__ __forceinline__ ScoreFunction score_function() const {
      const AttentionBackwardParams& p = params.attention;
      const int32_t head = step.head;
      const int32_t key = work.first_key + own_row();
      float slope = 0.f, biases[2] = {};
      if (p.alibi_slopes != nullptr) slope = p.alibi_slopes[work.batch * p.alibi_batch_stride + head];
      if (p.bias.data != nullptr) {  // one number per key, the same for all queries
        const int64_t first = work.batch * p.bias.batch_stride + head * p.bias.head_stride;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (key + 8 * half >= work.visibility.seqlen_k) continue;
          const int64_t place = first + (key + 8 * half) * p.bias.col_stride;
          biases[half] = p.bias.dtype == DType::kFloat32 ? static_cast<const float*>(p.bias.data)[place]
                                                         : to_float(static_cast<const T*>(p.bias.data)[place]);
        }
      }
      const int32_t off = work.diagonal(p);
      return {p.softmax_scale, p.softcap, biases, slope,
              static_cast<float>(step.query_block * kBlockM + pair + off - key)};
    }

    static __device__ __forceinline__ void fence_parts(Scores& values) {
#pragma unroll
      for (int part = 0; part < kKeyParts; ++part) fence_registers(values[part]);
    }

    template <bool kPositive>
    static __device__ __forceinline__ void pack_parts(Operand& packed, const Scores& values) {
#pragma unroll
      for (int part = 0; part < kKeyParts; ++part) pack<T, kPositive>(packed[part], values[part]);
    }

    // Calls visit(i, delta) for accumulator value i with delta of its query. `rows` points at this thread's first
    // query.
    template <int kBegin = 0, int kEnd = kOwnQueries / 2, int kEarly, typename Visit>
    static __device__ __forceinline__ void for_each_delta(const float* rows, const EarlyRows<kEarly>& early,
                                                          Visit visit) {
#pragma unroll
      for (int j = kBegin / 4; j < kEnd / 4; ++j) {
        const float2 delta = early.pair(rows, j);
#pragma unroll
        for (int i = 0; i < 4; ++i) visit(4 * j + i, i % 2 == 0 ? delta.x : delta.y);
      }
    }

    // Says that this warp has read what the barrier guards.
    __device__ __forceinline__ void arrive(uint64_t* barrier) {
      __syncwarp();
      if (lane == 0) mbarrier_arrive(barrier);
    }

    // Releases these stages of q and dout. Every thread arrives, because each has read row statistics.
    __device__ __forceinline__ void release(int32_t stage, int32_t dout_stage) {
      if constexpr (kBias) bulk_wait_read<0>();  // of dS, because the next bias is loaded there
      mbarrier_arrive(&smem.dout_empty[dout_stage]);
      mbarrier_arrive(&smem.q_empty[stage]);
    }

    // Waits for the buffer of this iteration. Returns true if this is the last add to its tile: then the buffer holds
    // the sums of the earlier adds. The answer arrives while products run.
    __device__ __forceinline__ bool wait_dq_buffer(int32_t index) {
      if constexpr (!Traits::kLastWritesDq) return false;
      const int32_t buffer = index % kStoreWarps;
      named_barrier_sync(kDqEmptyBarrier + 2 * buffer + warpgroup, kDqEmptyThreads);
      const bool is_last = mbarrier_test(&smem.sums_full[buffer], last_turns >> buffer & 1);
      last_turns ^= static_cast<uint32_t>(is_last) << buffer;
      return is_last;
    }

    // Columns of the head dimension from the first one of this warpgroup's part of dq on.
    __device__ __forceinline__ int32_t dq_columns() const {
      return params.attention.head_dim - warpgroup % Traits::kDqColumnParts * 64;
    }

    // Writes dq to the buffer of this iteration when the store warp has released it.
    __device__ __forceinline__ void write_dq(Dq& dq, int32_t index, bool is_last = false) {
      fence_registers(dq);
      const int32_t buffer = index % kStoreWarps;
      if constexpr (!Traits::kLastWritesDq) {
        named_barrier_sync(kDqEmptyBarrier + 2 * buffer + warpgroup, kDqEmptyThreads);
      }
      if (Traits::kLastWritesDq && is_last) {
        finish_dq(dq, smem.dq[buffer][warpgroup]);
      } else {
        store_dq_boxes(smem.dq[buffer][warpgroup], dq, dq_columns(), warp, lane);
      }
      named_barrier_arrive(kDqFullBarrier + buffer, kDqFullThreads);
    }

    // Adds the sums of the earlier adds and writes dq in 16 bits: one chunk of 64 columns in place of the first box. A
    // warp overwrites only its own rows.
    __device__ __forceinline__ void finish_dq(Dq& dq, float (*boxes)[64 * 32]) {
      add_dq_boxes(dq, boxes, dq_columns(), warp, lane);
#pragma unroll
      for (float& value : dq) value *= params.gradient_scale;
      __syncwarp();
      stage_16bit<T, 64 * kChunkRowBytes, 0, 1>(reinterpret_cast<uint8_t*>(boxes), dq);
    }
  };

  static __device__ void wait_keys(const KernelParams& params, SharedStorage& smem, const WorkTile& work) {
    mbarrier_wait(&smem.k_full, work.keys_phase);
    mbarrier_wait(&smem.v_full, work.keys_phase);
    const int32_t valid = work.visibility.seqlen_k - work.first_key;
    if (params.rows_may_be_poisoned && valid < kBlockN) {
      scrub<Traits::kChunks, Traits::kKeyChunkBytes, kConsumerThreads, kRowBytes>(smem.k, valid, kConsumersBarrier);
      scrub<Traits::kChunks, Traits::kKeyChunkBytes, kConsumerThreads, kRowBytes>(smem.v, valid, kConsumersBarrier);
    }
  }

  template <typename Ring>
  static __device__ __forceinline__ void wait_queries(const KernelParams& params, const WorkTile& work,
                                                      const QueryIterator& step, uint64_t* full,
                                                      uint8_t (*tiles)[Traits::kQueryBytes]) {
    const int32_t stage = Ring::stage(step.index);
    mbarrier_wait(&full[stage], Ring::phase(step.index));
    const int32_t valid = work.visibility.seqlen_q - step.query_block * kBlockM;
    if (params.rows_may_be_poisoned && valid < kBlockM) {
      scrub<Traits::kChunks, Traits::kQueryChunkBytes, kConsumerThreads, kRowBytes>(tiles[stage], valid,
                                                                                    kConsumersBarrier);
    }
  }
};

}  // namespace flashbwd::sm90

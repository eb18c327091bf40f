// The loop of a CTA over its pairs of a sequence and a KV head, and over the query heads of each.
//
// For each block of 64 keys, a warp computes p and ds of its 16 queries and adds to their dq, which stays in registers.
// p and ds go through shared memory. Then each warp computes dv, dk or both of 16 keys. No CTA needs another one.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../sm80/store_tile.cuh"
#include "features.cuh"

namespace flashbwd::short_sequences {

template <typename Traits>
struct Mainloop {
  using T = typename Traits::T;
  using M = typename Traits::M;
  using Scores = typename Traits::Scores;
  using Gradient = typename Traits::Gradient;
  using SharedStorage = typename Traits::SharedStorage;
  using ScoreWork = std::conditional_t<Traits::kFeatures, Features<Traits>, PlainScores<Traits>>;
  using Copies = Tiles<Traits>;

  static __device__ __forceinline__ void run(const KernelParams& params, SharedStorage& smem) {
    const AttentionBackwardParams& p = params.attention;
    ScoreWork::begin(params, smem);
    Copies::load_keys(p, smem, Pair(p, blockIdx.y, blockIdx.x));
#pragma unroll 1
    for (int32_t batch = blockIdx.y; batch < p.batch; batch += params.slots) {
#pragma unroll 1
      for (int32_t head = 0; head < params.heads_per_kv; ++head) run_head(params, smem, batch, head);
    }
    ScoreWork::end(params, smem);
  }

 private:
  // One query head of a pair, of which k and v are in shared memory or on their way.
  static __device__ __forceinline__ void run_head(const KernelParams& params, SharedStorage& smem, int32_t batch,
                                                  int32_t head_in_group) {
    const AttentionBackwardParams& p = params.attention;
    const Pair pair(p, batch, blockIdx.x);
    const int32_t head = pair.head_kv * params.heads_per_kv + head_in_group;
    Copies::load_queries(p, smem, pair, head);
    copy_async_commit();
    RowStatistics<Traits> rows(p, pair, head);
    const ScoreWork scores(params, smem, pair, head);
    copy_async_wait<0>();
    __syncthreads();  // the copies of all threads are complete
    rows.finish(smem.dout);

    Gradient dq = {};
    const int32_t steps = max(scores.steps(), (pair.sequence.rows_k + Traits::kStepKeys - 1) / Traits::kStepKeys);
    const BlockRange visited = key_blocks(pair.visibility, Traits::warp(), kWarpRows, Traits::kStepKeys);
    // The loop runs once even without keys, to store dq.
#pragma unroll 1
    for (int32_t first_step = 0; first_step == 0 || first_step < steps; first_step += Traits::kBlockSteps) {
      compute_scores(smem, scores, rows, visited, first_step, min(first_step + Traits::kBlockSteps, steps), dq);
      __syncthreads();  // all warps have stored p and ds, and are done with k and v of this block
      if (first_step + Traits::kBlockSteps >= steps) {
        store_queries(params, pair, head, dq);
        if (head_in_group + 1 == params.heads_per_kv && batch + params.slots < p.batch) {
          Copies::load_keys(p, smem, Pair(p, batch + params.slots, blockIdx.x));
        }
      }
      const int32_t first_key = first_step * Traits::kStepKeys + Traits::warp() % 4 * 16;
      if (first_key < pair.sequence.rows_k) {
        // Four warps: each computes dv, then dk of 16 keys. Eight warps: the first four compute dv, the others dk.
#pragma unroll 1
        for (int32_t i = Traits::warp() / 4; i < 2; i += Traits::kWarps / 4) {
          finish_keys(params, smem, pair, head_in_group, first_key, i);
        }
      }
      __syncthreads();  // all warps are done with p, ds, q and dout
    }
  }

  // Stores p and ds of this warp's queries and the key steps [first_step, end_step), and adds to dq.
  static __device__ __forceinline__ void compute_scores(SharedStorage& smem, const ScoreWork& scores,
                                                        const RowStatistics<Traits>& rows, const BlockRange& visited,
                                                        int32_t first_step, int32_t end_step, Gradient& dq) {
    const int32_t lane = renew(Traits::lane()), first_row = Traits::warp() * kWarpRows;
    const typename M::template ColumnsB<Traits::kRowBytes, Traits::kHeadDim, true> key_columns(smem_address(smem.k),
                                                                                               lane, 0);
#pragma unroll 1
    for (int32_t step = first_step; step < end_step; ++step) {
      if (!visited.contains(step)) {
        scores.skip(step);
        continue;
      }
      Scores s = {}, dp = {};
      multiply(smem, lane, step * Traits::kStepKeys, s, dp);
      scores.apply(step, rows, s, dp);
#pragma unroll
      for (int i = 0; i < Traits::kStepKeys / M::kStep; ++i) {
        const int32_t column = (step - first_step) * Traits::kStepKeys + i * M::kStep;
        const typename M::Held p = M::hold(s + 2 * i), ds = M::hold(dp + 2 * i);
        M::template store<Traits::kScoreRowBytes>(smem_address(smem.p), first_row, column, lane, p);
        M::template store<Traits::kScoreRowBytes>(smem_address(smem.ds), first_row, column, lane, ds);
        const typename M::A a = M::operand(ds);
#pragma unroll
        for (int t = 0; t < Traits::kColumnTiles; t += 2) {
          const typename M::B b[1] = {key_columns.load(step * (Traits::kStepKeys / M::kStep) + i, t * 8)};
          M::multiply(dq[0] + t, a, b);
        }
      }
    }
  }

  // s = q k^T and dp = dout v^T of this warp's queries and the 32 keys from first_key on.
  static __device__ __forceinline__ void multiply(const SharedStorage& smem, int32_t lane, int32_t first_key, Scores& s,
                                                  Scores& dp) {
    using RowsA = typename M::template RowsA<Traits::kRowBytes, Traits::kHeadDim / M::kStep>;
    using RowsB = typename M::template RowsB<Traits::kRowBytes>;
    const int32_t first_row = Traits::warp() * kWarpRows;
    const RowsA q(smem_address(smem.q), lane, first_row), dout(smem_address(smem.dout), lane, first_row);
    const RowsB k(smem_address(smem.k), lane, 0), v(smem_address(smem.v), lane, 0);
#pragma unroll
    for (int i = 0; i < Traits::kHeadDim / M::kStep; ++i) {
      const typename M::B b_k[2] = {k.load(first_key, i), k.load(first_key + 16, i)};
      M::multiply(s, q.load(0, i), b_k);
      const typename M::B b_v[2] = {v.load(first_key, i), v.load(first_key + 16, i)};
      M::multiply(dp, dout.load(0, i), b_v);
    }
  }

  // Computes dv = p^T dout (which = 0) or dk = ds^T q (which = 1) of 16 keys. Stores it after the last query head of
  // the KV head; until then the sums over the heads are in shared memory.
  static __device__ __forceinline__ void finish_keys(const KernelParams& params, SharedStorage& smem, const Pair& pair,
                                                     int32_t head_in_group, int32_t first_key, int32_t which) {
    const int32_t lane = renew(Traits::lane());
    const typename M::template ColumnsA<Traits::kScoreRowBytes, 16> keys(smem_address(smem.p) + which * sizeof(smem.p),
                                                                         lane, first_key % kKeyBlock);
    const typename M::template ColumnsB<Traits::kRowBytes, Traits::kHeadDim, false> columns(
        smem_address(which == 0 ? smem.dout : smem.q), lane, 0);
    // One key block has dv and dk for four warps, or one of them for eight.
    const int32_t tile = Traits::kWarps == 4 ? which : first_key / kKeyBlock;
    float4* const region =
        Traits::region(smem, params.shared.key_sums) + tile * (Traits::kColumnTiles * Traits::kThreads);
    Gradient sums = {};
    if (head_in_group > 0) load_sums(region, sums);
    const BlockRange queries = query_blocks(pair.visibility, first_key / 16, kWarpRows, 16);
#pragma unroll 1
    for (int32_t step = queries.begin; step < queries.end; ++step) {
      const typename M::A a = keys.load(step, 0);
#pragma unroll
      for (int t = 0; t < Traits::kColumnTiles; t += 2) {
        const typename M::B b[1] = {columns.load(step, t * 8)};
        M::multiply(sums[0] + t, a, b);
      }
    }
    if (head_in_group + 1 < params.heads_per_kv) {
      store_sums(region, sums);
      return;
    }
    scale(which == 0 ? 1.f : params.attention.softmax_scale, sums);
    store_rows(params.keys[which], pair.batch, pair.head_kv, pair.sequence.begin_k, first_key, pair.sequence.rows_k,
               sums);
  }

  static __device__ __forceinline__ void load_sums(const float4* region, Gradient& sums) {
#pragma unroll
    for (int t = 0; t < Traits::kColumnTiles; ++t) {
      const float4 vector = region[t * Traits::kThreads];
      sums[0][t][0] = vector.x;
      sums[0][t][1] = vector.y;
      sums[0][t][2] = vector.z;
      sums[0][t][3] = vector.w;
    }
  }
  static __device__ __forceinline__ void store_sums(float4* region, const Gradient& sums) {
#pragma unroll
    for (int t = 0; t < Traits::kColumnTiles; ++t) {
      region[t * Traits::kThreads] = make_float4(sums[0][t][0], sums[0][t][1], sums[0][t][2], sums[0][t][3]);
    }
  }

  static __device__ __forceinline__ void scale(float factor, Gradient& gradient) {
#pragma unroll
    for (int t = 0; t < Traits::kColumnTiles; ++t) {
#pragma unroll
      for (int e = 0; e < 4; ++e) gradient[0][t][e] *= factor;
    }
  }

  static __device__ __forceinline__ void store_queries(const KernelParams& params, const Pair& pair, int32_t head,
                                                       Gradient& dq) {
    scale(params.attention.softmax_scale, dq);
    store_rows(params.dq, pair.batch, head, pair.sequence.begin_q, Traits::warp() * kWarpRows, pair.sequence.rows_q,
               dq);
  }
  // Stores the 16 rows from first_row on of a sequence that has `rows` rows.
  static __device__ __forceinline__ void store_rows(const GradientTarget& target, int32_t batch, int32_t head,
                                                    int64_t begin, int32_t first_row, int32_t rows,
                                                    const Gradient& gradient) {
    const HeadsView& view = target.view;
    const int32_t row = first_row + renew(Traits::lane()) / 4;
    const int64_t offset = batch * view.batch_stride + head * view.head_stride + (begin + row) * view.seq_stride;
    sm80::StoreTile<T, 1, Traits::kColumnTiles>::store(target, offset, rows - row, 0, gradient);
  }
};

}  // namespace flashbwd::short_sequences

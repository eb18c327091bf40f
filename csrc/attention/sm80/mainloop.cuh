// The walk of one CTA over the query tiles of its key block.
//
// s^T = k q^T and dp^T = v dout^T are computed transposed, so that p^T and ds^T of a warp are already operand A of
// dv += p^T dout and dk += ds^T q, which stay in registers; ds^T goes through shared memory for dq = ds k, which is
// added to fp32 rows in global memory. docs/kernels/attention_sm80.md draws a step.
#pragma once

#include <cstdint>

#include "../../common/mma.cuh"
#include "config.h"
#include "scores.cuh"

namespace flashbwd::sm80 {

// Where the next query tile comes from.
template <typename T>
struct Source {
  const T* q;
  const T* dout;
  const float* lse;
  const float* delta;
  int32_t rows;  // that exist, from the first of the tile
};

template <typename T_, int kTileIndex, bool kFeatures_>
struct Traits {
  using T = T_;
  static constexpr Tile kTile = kTiles[kTileIndex];
  static constexpr bool kFeatures = kFeatures_;  // bias, ALiBi, softcap, dropout
  static constexpr int kHeadDim = kTile.head_dim;
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kWarpsN = kTile.warps_n;
  static constexpr int kWarpsS = kTile.warps_s;
  static constexpr int kWarpsQ = kTile.warps_q;
  static constexpr int kWarpsD = kTile.warps() / kWarpsQ;
  static constexpr int kThreads = kTile.threads();
  static constexpr int kStages = kTile.stages;
  static constexpr int kRowBytes = kTile.row_bytes();
  static constexpr int kScoreRowBytes = kBlockM * static_cast<int>(sizeof(T));
  static constexpr bool kExchange = kWarpsS > 1;  // p and ds of a warp's keys come from several warps

  static constexpr int kKeyTiles = kBlockN / kWarpsN / 16;       // of s, dk, dv: 16 keys each
  static constexpr int kScoreTiles = kBlockM / kWarpsS / 8;      // of s: 8 queries each
  static constexpr int kGradientTiles = kHeadDim / kWarpsS / 8;  // of dk, dv: 8 columns each
  static constexpr int kQueryTiles = kBlockM / kWarpsQ / 16;     // of dq: 16 queries each
  static constexpr int kColumnTiles = kHeadDim / kWarpsD / 8;    // of dq: 8 columns each
  static_assert(kTile.element_bytes == sizeof(T), "the tile is for elements of another size");
  static_assert(kKeyTiles * kWarpsN * 16 == kBlockN && kQueryTiles * kWarpsQ * 16 == kBlockM, "whole rows of tiles");
  static_assert(kScoreTiles % 2 == 0 && kScoreTiles * kWarpsS * 8 == kBlockM, "queries in pairs of 8");
  static_assert(kGradientTiles % 2 == 0 && kGradientTiles * kWarpsS * 8 == kHeadDim, "columns in pairs of 8");
  static_assert(kColumnTiles % 2 == 0 && kColumnTiles * kWarpsD * 8 == kHeadDim, "columns in pairs of 8");
  static_assert(kRowPadding % kBlockM == 0, "the statistics of a tile are one aligned run");

  static __device__ __forceinline__ int32_t lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int32_t warp() { return threadIdx.x / 32; }
  static __device__ __forceinline__ int32_t warp_n() { return warp() / kWarpsS; }
  static __device__ __forceinline__ int32_t warp_s() { return warp() % kWarpsS; }
  static __device__ __forceinline__ int32_t warp_q() { return warp() / kWarpsD; }
  static __device__ __forceinline__ int32_t warp_d() { return warp() % kWarpsD; }

  struct SharedStorage {
    alignas(1024) uint8_t k[kBlockN * kRowBytes];
    alignas(1024) uint8_t v[kBlockN * kRowBytes];
    alignas(1024) uint8_t q[kStages][kBlockM * kRowBytes];
    alignas(1024) uint8_t dout[kStages][kBlockM * kRowBytes];
    alignas(1024) uint8_t ds[kBlockN * kScoreRowBytes];                  // (kBlockN, kBlockM)
    alignas(1024) uint8_t p[kExchange ? kBlockN * kScoreRowBytes : 16];  // (kBlockN, kBlockM)
    alignas(16) float lse[kStages][kBlockM];
    alignas(16) float delta[kStages][kBlockM];
    // Read from here where they are needed: registers are for accumulators.
    Work work;
    Source<T> source;
  };
};

// Rows of one head, from the first row of a sequence.
template <typename T>
__device__ __forceinline__ T* head_rows(const HeadsView& view, int32_t batch, int32_t head, int64_t first_row) {
  return static_cast<T*>(view.data) + batch * view.batch_stride + head * view.head_stride + first_row * view.seq_stride;
}

// kRows rows of which `rows` exist, each of `columns` elements; zeros elsewhere. Not `aligned`: element by element.
template <typename Traits, int kRows, typename T>
__device__ __forceinline__ void load_tile(uint8_t* tile, const T* source, int64_t stride, int32_t rows, int32_t columns,
                                          bool aligned) {
  using Swizzle = PieceSwizzle<Traits::kRowBytes>;
  constexpr int kPieces = Traits::kRowBytes / 16;        // a row
  constexpr int kElements = 16 / sizeof(T);              // a piece
  constexpr int kPassRows = Traits::kThreads / kPieces;  // rows that all threads copy at once
  static_assert(Traits::kThreads % kPieces == 0 && kRows % kPassRows == 0, "a thread has one piece of some rows");
  const int32_t piece = threadIdx.x % kPieces, first_row = threadIdx.x / kPieces;
  const int32_t left = columns - piece * kElements;
  if (aligned) {
    const int32_t bytes = max(min(left, kElements), 0) * static_cast<int32_t>(sizeof(T));
    const uint32_t place = smem_address(tile) + Swizzle::offset(first_row, piece);
    const T* pointer = source + first_row * stride + (left > 0 ? piece * kElements : 0);
    const int64_t pass_stride = kPassRows * stride;
#pragma unroll
    for (int row = 0; row < kRows; row += kPassRows) {
      const bool exists = first_row + row < rows;
      // Rows eight apart have their pieces in the same order.
      const uint32_t to = kPassRows % 8 == 0 ? place + row * Traits::kRowBytes
                                             : smem_address(tile) + Swizzle::offset(first_row + row, piece);
      copy_async_16(to, exists ? pointer : source, exists ? bytes : 0);
      pointer += pass_stride;
    }
    return;
  }
#pragma unroll 1
  for (int32_t row = first_row; row < kRows; row += kPassRows) {
    alignas(16) T values[kElements];
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      values[e] = row < rows && e < left ? source[row * stride + piece * kElements + e] : from_float<T>(0.f);
    }
    *reinterpret_cast<uint4*>(tile + Swizzle::offset(row, piece)) = *reinterpret_cast<const uint4*>(values);
  }
}

template <typename Traits>
struct Mainloop {
  using T = typename Traits::T;
  using M = Mma<T>;
  using SharedStorage = typename Traits::SharedStorage;
  using Gradient = float[Traits::kKeyTiles][Traits::kGradientTiles][4];
  using ScoreTile = typename Scores<Traits>::Accumulator;
  static constexpr int kQuerySteps = Traits::kBlockM / M::kStep;    // of dk and dv
  static constexpr int kWarpSteps = kQuerySteps / Traits::kWarpsS;  // those of a warp's own queries
  using Held = typename M::Held[Traits::kKeyTiles][kWarpSteps];
  // Steps in flight: fragments of fp32 are twice as large, and their products take twelve times as long.
  static constexpr int kUnroll = sizeof(T) == 4 ? 1 : 16;

  // Zeroes dk and dv and adds all query tiles of the work to them.
  static __device__ __forceinline__ void run(const KernelParams& params, SharedStorage& smem, const Work& work,
                                             Gradient& dk, Gradient& dv) {
#pragma unroll
    for (int mt = 0; mt < Traits::kKeyTiles; ++mt) {
#pragma unroll
      for (int nt = 0; nt < Traits::kGradientTiles; ++nt) {
#pragma unroll
        for (int e = 0; e < 4; ++e) dk[mt][nt][e] = dv[mt][nt][e] = 0.f;
      }
    }
    const int32_t steps = work.steps();
    if (steps == 0) return;

    const AttentionBackwardParams& p = params.attention;
    Scores<Traits> scores(params, work);
    Step step(work);
    if (threadIdx.x == 0) set_source(params, smem, work, step);
    load_keys(params, smem, work);
    __syncthreads();  // thread 0 has written the source
    load_queries(params, smem, 0);
    load_douts(params, smem, 0);
    copy_async_commit();
    if (Traits::kStages > 1) {
      __syncthreads();  // everybody has read the source
      if (threadIdx.x == 0) advance_source(params, smem, work, step);
    }

#pragma unroll 1
    for (; step.index < steps; step.advance(work)) {
      const int32_t stage = step.index % Traits::kStages;
      const int32_t query_block = step.query_block(work);
      const int32_t rows = work.sequence.seqlen_q - query_block * Traits::kBlockM;
      const bool more = step.index + 1 < steps;
      ScoreTile s, dp;
      scores.start(step.head, query_block, s);
      copy_async_wait<0>();
      __syncthreads();  // this step's tiles and the next source are there; everybody is done with the step before
      if (Traits::kStages > 1 && more) {
        load_queries(params, smem, stage ^ 1);
        load_douts(params, smem, stage ^ 1);
        copy_async_commit();
      }
      if (Traits::kStages == 1 && threadIdx.x == 0) advance_source(params, smem, work, step);

      multiply_keys(smem.k, smem.q[stage], s);
#pragma unroll
      for (int mt = 0; mt < Traits::kKeyTiles; ++mt) {
#pragma unroll
        for (int nt = 0; nt < Traits::kScoreTiles; ++nt) {
#pragma unroll
          for (int e = 0; e < 4; ++e) dp[mt][nt][e] = 0.f;
        }
      }
      multiply_keys(smem.v, smem.dout[stage], dp);
      scores.apply(step.head, query_block, smem.lse[stage], smem.delta[stage], s, dp);
      Held p_held, ds_held;
      hold(s, p_held);
      hold(dp, ds_held);
      store_scores(smem.ds, ds_held);
      if constexpr (Traits::kExchange) {
        store_scores(smem.p, p_held);
      } else {
        add_from_registers(p_held, smem.dout[stage], dv);
      }
      __syncthreads();  // ds (and p) of all warps are there
      if constexpr (Traits::kExchange) add_from_shared(smem.p, smem.dout[stage], dv);
      if constexpr (Traits::kStages > 1) {
        if (threadIdx.x == 0) {
          Step next = step;
          next.advance(work);
          advance_source(params, smem, work, next);
        }
        add_dq(params, smem, work, step.head, query_block,
               rows);  // its additions are on their way under the next product
        add_dk(ds_held, smem, stage, dk);
      } else {
        if (!Traits::kExchange && more) load_douts(params, smem, 0);
        add_dk(ds_held, smem, stage, dk);
        __syncthreads();  // everybody is done with q (and dout)
        if (more) {
          if constexpr (Traits::kExchange) load_douts(params, smem, 0);
          load_queries(params, smem, 0);
        }
        copy_async_commit();
        add_dq(params, smem, work, step.head, query_block, rows);  // under the copies
      }
      if (step.last_of_head(work)) scores.finish_head(step.head);
    }
#pragma unroll
    for (int mt = 0; mt < Traits::kKeyTiles; ++mt) {
#pragma unroll
      for (int nt = 0; nt < Traits::kGradientTiles; ++nt) {
#pragma unroll
        for (int e = 0; e < 4; ++e) dk[mt][nt][e] *= p.softmax_scale;
      }
    }
  }

 protected:
  static __device__ __forceinline__ void load_keys(const KernelParams& params, SharedStorage& smem, const Work& work) {
    const AttentionBackwardParams& p = params.attention;
    const int32_t first = work.key_block * Traits::kBlockN;
    const int32_t rows = work.sequence.seqlen_k - first;
    load_tile<Traits, Traits::kBlockN>(smem.k,
                                       head_rows<const T>(p.k, work.batch, work.head_kv, work.sequence.begin_k + first),
                                       p.k.seq_stride, rows, p.head_dim, params.k_aligned);
    load_tile<Traits, Traits::kBlockN>(smem.v,
                                       head_rows<const T>(p.v, work.batch, work.head_kv, work.sequence.begin_k + first),
                                       p.v.seq_stride, rows, p.head_dim_v, params.v_aligned);
  }

  // The source of the tile at `step`, by one thread.
  static __device__ __forceinline__ void set_source(const KernelParams& params, SharedStorage& smem, const Work& work,
                                                    const Step& step) {
    const AttentionBackwardParams& p = params.attention;
    const int32_t first = step.query_block(work) * Traits::kBlockM;
    const int64_t row = params.statistics.index(work.batch, step.head, work.sequence.begin_q) + first;
    smem.source.q = head_rows<const T>(p.q, work.batch, step.head, work.sequence.begin_q + first);
    smem.source.dout = head_rows<const T>(p.dout, work.batch, step.head, work.sequence.begin_q + first);
    smem.source.lse = params.statistics.lse_log2 + row;
    smem.source.delta = params.statistics.delta + row;
    smem.source.rows = work.sequence.seqlen_q - first;
  }

  // From the tile at `step` to the one after it, by one thread: within a head, an addition each.
  static __device__ __forceinline__ void advance_source(const KernelParams& params, SharedStorage& smem,
                                                        const Work& work, const Step& step) {
    if (step.last_of_head(work)) {
      Step next = step;
      next.advance(work);
      set_source(params, smem, work, next);
      return;
    }
    const int32_t rows = work.descending ? -Traits::kBlockM : Traits::kBlockM;
    smem.source.q += rows * params.attention.q.seq_stride;
    smem.source.dout += rows * params.attention.dout.seq_stride;
    smem.source.lse += rows;
    smem.source.delta += rows;
    smem.source.rows -= rows;
  }

  static __device__ __forceinline__ void load_queries(const KernelParams& params, SharedStorage& smem, int32_t stage) {
    load_tile<Traits, Traits::kBlockM>(smem.q[stage], smem.source.q, params.attention.q.seq_stride, smem.source.rows,
                                       params.attention.head_dim, params.q_aligned);
  }

  // With lse and delta of the same rows.
  static __device__ __forceinline__ void load_douts(const KernelParams& params, SharedStorage& smem, int32_t stage) {
    load_tile<Traits, Traits::kBlockM>(smem.dout[stage], smem.source.dout, params.attention.dout.seq_stride,
                                       smem.source.rows, params.attention.head_dim_v, params.dout_aligned);
    constexpr int kPieces = Traits::kBlockM / 4;
    static_assert(2 * kPieces <= Traits::kThreads, "a thread a piece");
    if (threadIdx.x < 2 * kPieces) {
      const bool is_delta = threadIdx.x >= kPieces;
      const int32_t piece = threadIdx.x % kPieces * 4;
      copy_async_16(smem_address((is_delta ? smem.delta : smem.lse)[stage] + piece),
                    (is_delta ? smem.source.delta : smem.source.lse) + piece, 16);
    }
  }

  // c (keys, queries) += keys (kBlockN, kHeadDim) * queries (kBlockM, kHeadDim)^T, this warp's part.
  static __device__ __forceinline__ void multiply_keys(const uint8_t* keys, const uint8_t* queries, ScoreTile& c) {
    const int32_t lane = Traits::lane();
    const typename M::template RowsA<Traits::kRowBytes> rows_a(smem_address(keys), lane,
                                                               Traits::warp_n() * Traits::kKeyTiles * 16);
    const typename M::template RowsB<Traits::kRowBytes> rows_b(smem_address(queries), lane,
                                                               Traits::warp_s() * Traits::kScoreTiles * 8);
#pragma unroll(kUnroll)
    for (int k = 0; k < Traits::kHeadDim / M::kStep; ++k) {
      typename M::A a[Traits::kKeyTiles];
#pragma unroll
      for (int mt = 0; mt < Traits::kKeyTiles; ++mt) a[mt] = rows_a.load(mt * 16, k);
#pragma unroll
      for (int nt = 0; nt < Traits::kScoreTiles; nt += 2) {
        const typename M::B b = rows_b.load(nt * 8, k);
#pragma unroll
        for (int mt = 0; mt < Traits::kKeyTiles; ++mt) M::multiply(c[mt][nt], c[mt][nt + 1], a[mt], b);
      }
    }
  }

  static __device__ __forceinline__ void hold(const ScoreTile& c, Held& held) {
#pragma unroll
    for (int mt = 0; mt < Traits::kKeyTiles; ++mt) {
#pragma unroll
      for (int k = 0; k < kWarpSteps; ++k) held[mt][k] = M::hold(c[mt] + k * M::kHeldTiles);
    }
  }

  static __device__ __forceinline__ void store_scores(uint8_t* tile, const Held& held) {
#pragma unroll
    for (int mt = 0; mt < Traits::kKeyTiles; ++mt) {
#pragma unroll
      for (int k = 0; k < kWarpSteps; ++k) {
        M::template store<Traits::kScoreRowBytes>(smem_address(tile), (Traits::warp_n() * Traits::kKeyTiles + mt) * 16,
                                                  Traits::warp_s() * Traits::kScoreTiles * 8 + k * M::kStep,
                                                  Traits::lane(), held[mt][k]);
      }
    }
  }

  static __device__ __forceinline__ void add_dk(const Held& ds_held, const SharedStorage& smem, int32_t stage,
                                                Gradient& dk) {
    if constexpr (Traits::kExchange) {
      add_from_shared(smem.ds, smem.q[stage], dk);
    } else {
      add_from_registers(ds_held, smem.q[stage], dk);
    }
  }

  // c (keys, columns) += held (keys, queries) * rows (kBlockM, kHeadDim).
  static __device__ __forceinline__ void add_from_registers(const Held& held, const uint8_t* rows, Gradient& c) {
    const typename M::template ColumnsB<Traits::kRowBytes, true> columns_b(smem_address(rows), Traits::lane(), 0);
#pragma unroll
    for (int k = 0; k < kQuerySteps; ++k) {
      typename M::A a[Traits::kKeyTiles];
#pragma unroll
      for (int mt = 0; mt < Traits::kKeyTiles; ++mt) a[mt] = M::operand(held[mt][k]);
#pragma unroll
      for (int nt = 0; nt < Traits::kGradientTiles; nt += 2) {
        const typename M::B b = columns_b.load(k, nt * 8);
#pragma unroll
        for (int mt = 0; mt < Traits::kKeyTiles; ++mt) M::multiply(c[mt][nt], c[mt][nt + 1], a[mt], b);
      }
    }
  }

  // The same with scores (kBlockN, kBlockM) in shared memory; this warp's columns.
  static __device__ __forceinline__ void add_from_shared(const uint8_t* scores, const uint8_t* rows, Gradient& c) {
    const int32_t lane = Traits::lane();
    const typename M::template RowsA<Traits::kScoreRowBytes> rows_a(smem_address(scores), lane,
                                                                    Traits::warp_n() * Traits::kKeyTiles * 16);
    const typename M::template ColumnsB<Traits::kRowBytes, false> columns_b(
        smem_address(rows), lane, Traits::warp_s() * Traits::kGradientTiles * 8);
#pragma unroll(kUnroll)
    for (int k = 0; k < kQuerySteps; ++k) {
      typename M::A a[Traits::kKeyTiles];
#pragma unroll
      for (int mt = 0; mt < Traits::kKeyTiles; ++mt) a[mt] = rows_a.load(mt * 16, k);
#pragma unroll
      for (int nt = 0; nt < Traits::kGradientTiles; nt += 2) {
        const typename M::B b = columns_b.load(k, nt * 8);
#pragma unroll
        for (int mt = 0; mt < Traits::kKeyTiles; ++mt) M::multiply(c[mt][nt], c[mt][nt + 1], a[mt], b);
      }
    }
  }

  // dq (queries, columns) = ds (kBlockN, kBlockM)^T * k (kBlockN, kHeadDim), added to the accumulator in global memory.
  static __device__ __forceinline__ void add_dq(const KernelParams& params, SharedStorage& smem, const Work& work,
                                                int32_t head, int32_t query_block, int32_t rows) {
    const int32_t lane = Traits::lane();
    float dq[Traits::kQueryTiles][Traits::kColumnTiles][4] = {};
    const typename M::template ColumnsA<Traits::kScoreRowBytes> columns_a(smem_address(smem.ds), lane,
                                                                          Traits::warp_q() * Traits::kQueryTiles * 16);
    const typename M::template ColumnsB<Traits::kRowBytes, false> columns_b(
        smem_address(smem.k), lane, Traits::warp_d() * Traits::kColumnTiles * 8);
#pragma unroll(kUnroll)
    for (int k = 0; k < Traits::kBlockN / M::kStep; ++k) {
      typename M::A a[Traits::kQueryTiles];
#pragma unroll
      for (int mt = 0; mt < Traits::kQueryTiles; ++mt) a[mt] = columns_a.load(k, mt * 16);
#pragma unroll
      for (int nt = 0; nt < Traits::kColumnTiles; nt += 2) {
        const typename M::B b = columns_b.load(k, nt * 8);
#pragma unroll
        for (int mt = 0; mt < Traits::kQueryTiles; ++mt) M::multiply(dq[mt][nt], dq[mt][nt + 1], a[mt], b);
      }
    }

    if (params.turns != nullptr) Turn(params, work, head, query_block, Traits::kBlockM, Traits::kBlockN).wait();
    add_rows(params, work, head, query_block, rows, dq);
    if (params.turns != nullptr) Turn(params, work, head, query_block, Traits::kBlockM, Traits::kBlockN).pass_on();
  }

  // Lanes of neighbouring rows exchange half of what they have: an instruction then adds to four rows of eight
  // consecutive columns, whole 32-byte sectors, and not to half sectors of eight rows.
  static __device__ __forceinline__ void add_rows(const KernelParams& params, const Work& work, int32_t head,
                                                  int32_t query_block, int32_t rows,
                                                  const float (&dq)[Traits::kQueryTiles][Traits::kColumnTiles][4]) {
    const AttentionBackwardParams& p = params.attention;
    const int32_t lane = Traits::lane();
    const bool odd = lane / 4 % 2 == 1;
    const int32_t row = Traits::warp_q() * Traits::kQueryTiles * 16 + lane / 8 * 2;
    const int32_t column = Traits::warp_d() * Traits::kColumnTiles * 8 + lane % 4 * 2 + (odd ? 1 : 0);
    const int64_t first_row = p.cu_seqlens_q != nullptr ? work.sequence.begin_q : int64_t{work.batch} * p.seqlen_q;
    float* destination =
        params.dq_accumulator + first_row * p.heads * params.dq_row_stride +
        dq_row_offset(head, 0, query_block * Traits::kBlockM + row, 1, work.sequence.rows_q, params.dq_row_stride) +
        column;
    if (rows >= Traits::kBlockM && p.head_dim == Traits::kHeadDim) {
      add_fragments<false>(destination, params.dq_row_stride, odd, 0, 0, dq);
    } else {
      add_fragments<true>(destination, params.dq_row_stride, odd, rows - row, p.head_dim - column, dq);
    }
  }

  // kPartial: of `rows` and `columns` from the destination on.
  template <bool kPartial>
  static __device__ __forceinline__ void add_fragments(
      float* destination, int64_t row_stride, bool odd, int32_t rows, int32_t columns,
      const float (&dq)[Traits::kQueryTiles][Traits::kColumnTiles][4]) {
#pragma unroll
    for (int mt = 0; mt < Traits::kQueryTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t row = mt * 16 + half * 8;
        float* const even_row = destination + row * row_stride;
        float* const odd_row = even_row + row_stride;
#pragma unroll
        for (int nt = 0; nt < Traits::kColumnTiles; ++nt) {
          const float left = dq[mt][nt][half * 2], right = dq[mt][nt][half * 2 + 1];
          const float received = __shfl_xor_sync(0xffffffffu, odd ? left : right, 4);
          const bool column_exists = !kPartial || nt * 8 < columns;
          if (column_exists && (!kPartial || row < rows)) add(even_row + nt * 8, odd ? received : left);
          if (column_exists && (!kPartial || row + 1 < rows)) add(odd_row + nt * 8, odd ? right : received);
        }
      }
    }
  }

  // No result to wait for.
  static __device__ __forceinline__ void add(float* place, float value) {
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(place), "f"(value) : "memory");
  }
};

}  // namespace flashbwd::sm80

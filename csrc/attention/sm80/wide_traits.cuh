// The wide form of the kernel: sizes, shared memory, and the stream of pieces of tiles that all of it is fed by.
#pragma once

#include <cstdint>

#include "mainloop.cuh"

namespace flashbwd::sm80 {

// Names are those of Traits, so that scores and products are the same code: there `head dim` is one piece of columns.
template <typename T_, int kTileIndex, Extras kExtras_, typename M_ = Mma<T_>>
struct WideTraits {
  using T = T_;
  using M = M_;
  static constexpr Tile kTile = kTiles[kTileIndex];
  static constexpr Extras kExtras = kExtras_;
  static constexpr bool kFeatures = kExtras != Extras::kNone;
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kWarpsN = kTile.warps_n;
  static constexpr int kWarpsS = kTile.warps_s;
  static constexpr int kWarpsQ = kTile.warps_q;
  static constexpr int kWarpsD = kTile.warps() / kWarpsQ;
  static constexpr int kThreads = kTile.threads();
  static constexpr int kElementBytes = sizeof(T);
  static constexpr int kRowBytes = 128;  // of pieces for scores
  static constexpr int kHeadDim = kRowBytes / kElementBytes;
  static constexpr int kScoreRowBytes = kBlockM * kElementBytes;
  static constexpr bool kExchange = true;
  static constexpr int kPieces = kTile.stages;

  static constexpr int kPartRows = kBlockN;  // of q, dout and k in pieces for gradients
  static constexpr int kParts = kBlockM / kPartRows;
  static constexpr int kGradientColumns = kTile.gradient_columns();
  static constexpr int kGradientRowBytes = kGradientColumns * kElementBytes;
  static constexpr int kDqStep = 64;  // columns of dq in registers

  static constexpr int kKeyTiles = kBlockN / kWarpsN / 16;               // of s, dk, dv: 16 keys each
  static constexpr int kScoreTiles = kBlockM / kWarpsS / 8;              // of s: 8 queries each
  static constexpr int kGradientTiles = kGradientColumns / kWarpsS / 8;  // of dk, dv: 8 columns each
  static constexpr int kQueryTiles = kBlockM / kWarpsQ / 16;             // of dq: 16 queries each
  static constexpr int kColumnTiles = kDqStep / kWarpsD / 8;             // of dq: 8 columns each
  // Warps take pairs of tiles of dk and dv in turn, so that all have work where the last block of columns is not full.
  static constexpr int kPairColumns = 16 * kWarpsS;
  static constexpr int kPairs = kGradientTiles / 2;
  static_assert(kTile.wide && kTile.element_bytes == sizeof(T), "the tile is for another form or element");
  static_assert(kKeyTiles * kWarpsN * 16 == kBlockN && kQueryTiles * kWarpsQ * 16 == kBlockM, "whole rows of tiles");
  static_assert(kScoreTiles % 2 == 0 && kScoreTiles * kWarpsS * 8 == kBlockM, "queries in pairs of 8");
  static_assert(kColumnTiles % 2 == 0 && kColumnTiles * kWarpsD * 8 == kDqStep, "columns in pairs of 8");
  static_assert(kGradientColumns % kDqStep == 0 && kParts * kPartRows == kBlockM, "whole parts");

  static __device__ __forceinline__ int32_t lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int32_t warp() { return threadIdx.x / 32; }
  static __device__ __forceinline__ int32_t warp_n() { return warp() / kWarpsS; }
  static __device__ __forceinline__ int32_t warp_s() { return warp() % kWarpsS; }
  static __device__ __forceinline__ int32_t warp_q() { return warp() / kWarpsD; }
  static __device__ __forceinline__ int32_t warp_d() { return warp() % kWarpsD; }

  struct SharedStorage {
    alignas(1024) uint8_t pieces[kPieces][kTile.piece_bytes()];
    alignas(1024) uint8_t ds[kBlockN * kScoreRowBytes];  // (kBlockN, kBlockM)
    alignas(1024) uint8_t p[kBlockN * kScoreRowBytes];   // (kBlockN, kBlockM)
    alignas(16) float lse[kBlockM];
    alignas(16) float delta[kBlockM];
    Work work;
    int32_t job;
  };
};

// What a query tile takes, in this order.
enum class Phase : int32_t { kScores, kScoreGradients, kDv, kDk, kDq, kEnd };

// Walks the pieces of all query tiles of a job. Every thread has its own copy: the loads run ahead of the products.
template <typename Traits>
struct PieceCursor {
  Step step;
  Phase phase = Phase::kScores;
  int32_t block = 0;  // of columns
  int32_t part = 0;   // of rows: kDv, kDk

  __device__ __forceinline__ explicit PieceCursor(const Work& work) : step(work) {}

  // Parts of a query tile that see a key of the block: the rest of p and ds is zeros.
  static __device__ __forceinline__ BlockRange parts(const Work& work, int32_t query_block) {
    const BlockRange seen = query_blocks(work.visibility, work.key_block, Traits::kPartRows, Traits::kBlockN);
    const int32_t first = query_block * Traits::kParts;
    return {max(seen.begin - first, 0), min(seen.end - first, Traits::kParts)};
  }

  static __device__ __forceinline__ int32_t blocks_for_scores(int32_t columns) {
    return (columns + Traits::kHeadDim - 1) / Traits::kHeadDim;
  }
  static __device__ __forceinline__ int32_t blocks_for_gradients(int32_t columns) {
    return (columns + Traits::kGradientColumns - 1) / Traits::kGradientColumns;
  }

  __device__ __forceinline__ bool for_scores() const { return phase < Phase::kDv; }
  __device__ __forceinline__ bool by_parts() const { return phase == Phase::kDv || phase == Phase::kDk; }
  // Of v and dout, else of q and k.
  __device__ __forceinline__ bool of_values() const { return phase == Phase::kScoreGradients || phase == Phase::kDv; }

  __device__ __forceinline__ void advance(const AttentionBackwardParams& p, const Work& work) {
    if (by_parts() && ++part < parts(work, step.query_block(work)).end) return;
    const int32_t columns = of_values() ? p.head_dim_v : p.head_dim;
    if (++block == (for_scores() ? blocks_for_scores(columns) : blocks_for_gradients(columns))) {
      block = 0;
      phase = static_cast<Phase>(static_cast<int32_t>(phase) + 1);
      if (phase == Phase::kEnd) {
        phase = Phase::kScores;
        step.advance(work);
      }
    }
    if (by_parts()) part = parts(work, step.query_block(work)).begin;
  }
};

template <typename Traits, int kRowBytes_>
struct PieceRows {
  static constexpr int kThreads = Traits::kThreads;
  static constexpr int kRowBytes = kRowBytes_;
};

// The pieces in shared memory, in turn.
template <typename Traits>
struct PieceStream {
  using T = typename Traits::T;
  using SharedStorage = typename Traits::SharedStorage;
  static constexpr int kPieces = Traits::kPieces;
  static_assert(kPieces >= 2 && kPieces <= 4, "one to work on; see load_statistics for the most");

  const KernelParams& params;
  SharedStorage& smem;
  const Work& work;
  PieceCursor<Traits> next;       // to be loaded
  int32_t current = kPieces - 1;  // place of the piece that is worked on

  __device__ __forceinline__ PieceStream(const KernelParams& params, SharedStorage& smem, const Work& work)
      : params(params), smem(smem), work(work), next(work) {
    for (int32_t place = 0; place + 1 < kPieces; ++place) load(place);
  }

  // The next piece. Everybody is done with the one before.
  __device__ __forceinline__ const uint8_t* acquire() {
    copy_async_wait<kPieces - 2>();
    __syncthreads();  // this piece, p and ds of all warps are there; the piece before may be overwritten
    load(current);
    current = current + 1 == kPieces ? 0 : current + 1;
    return smem.pieces[current];
  }

 private:
  // Issues the copies of the next piece and advances. A group of copies in any case: waits count them.
  __device__ __forceinline__ void load(int32_t place) {
    if (next.step.index < work.steps()) {
      if (next.for_scores()) {
        load_score_piece(smem.pieces[place]);
      } else {
        load_gradient_piece(smem.pieces[place]);
      }
      next.advance(params.attention, work);
    }
    copy_async_commit();
  }

  template <int kRowBytes, int kRows>
  __device__ __forceinline__ void load_rows(uint8_t* to, const HeadsView& view, int32_t head, int64_t first_row,
                                            int32_t rows, int32_t column, int32_t columns, bool aligned) const {
    load_tile<PieceRows<Traits, kRowBytes>, kRows>(to, head_rows<const T>(view, work.batch, head, first_row) + column,
                                                   view.seq_stride, rows, columns - column, aligned);
  }

  // (kBlockN, kHeadDim) of k or v, then (kBlockM, kHeadDim) of q or dout.
  __device__ __forceinline__ void load_score_piece(uint8_t* place) {
    const AttentionBackwardParams& p = params.attention;
    const bool values = next.of_values();
    const int32_t column = next.block * Traits::kHeadDim, columns = values ? p.head_dim_v : p.head_dim;
    const int32_t first_key = work.key_block * Traits::kBlockN;
    const int32_t first_query = next.step.query_block(work) * Traits::kBlockM;
    const int32_t queries = work.sequence.seqlen_q - first_query;
    load_rows<Traits::kRowBytes, Traits::kBlockN>(place, values ? p.v : p.k, work.head_kv,
                                                  work.sequence.begin_k + first_key, work.sequence.seqlen_k - first_key,
                                                  column, columns, values ? params.v_aligned : params.k_aligned);
    load_rows<Traits::kRowBytes, Traits::kBlockM>(place + Traits::kBlockN * Traits::kRowBytes, values ? p.dout : p.q,
                                                  next.step.head, work.sequence.begin_q + first_query, queries, column,
                                                  columns, values ? params.dout_aligned : params.q_aligned);
    if (next.phase == Phase::kScores && next.block == 0) load_statistics(first_query, queries);
  }

  // lse and delta of the query tile. Those before are not needed any more: at most three pieces are ahead, and after
  // the scores a query tile has as many. Past the end of the sequence zeros do: there q and dout are zeros too.
  __device__ __forceinline__ void load_statistics(int32_t first_query, int32_t queries) {
    constexpr int kVectors = Traits::kBlockM / 4;
    const int64_t first = params.statistics.index(work.batch, next.step.head, work.sequence.begin_q) + first_query;
    for (int32_t vector = threadIdx.x; vector < 2 * kVectors; vector += Traits::kThreads) {
      const bool is_delta = vector >= kVectors;
      const int32_t row = vector % kVectors * 4;
      const float* source = is_delta ? params.statistics.delta : params.statistics.lse_log2;
      copy_async_16(smem_address((is_delta ? smem.delta : smem.lse) + row), source + first + (row < queries ? row : 0),
                    row < queries ? 16 : 0);
    }
  }

  // (kPartRows, kGradientColumns) of dout for dv, of q for dk, of k for dq.
  __device__ __forceinline__ void load_gradient_piece(uint8_t* place) {
    const AttentionBackwardParams& p = params.attention;
    const bool keys = next.phase == Phase::kDq, values = next.of_values();
    const int32_t first = keys ? work.key_block * Traits::kBlockN
                               : next.step.query_block(work) * Traits::kBlockM + next.part * Traits::kPartRows;
    load_rows<Traits::kGradientRowBytes, Traits::kPartRows>(
        place,
        keys     ? p.k
        : values ? p.dout
                 : p.q,
        keys ? work.head_kv : next.step.head, (keys ? work.sequence.begin_k : work.sequence.begin_q) + first,
        (keys ? work.sequence.seqlen_k : work.sequence.seqlen_q) - first, next.block * Traits::kGradientColumns,
        values ? p.head_dim_v : p.head_dim,
        keys     ? params.k_aligned
        : values ? params.dout_aligned
                 : params.q_aligned);
  }
};

}  // namespace flashbwd::sm80

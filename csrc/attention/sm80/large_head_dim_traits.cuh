// Sizes and shared memory of large head dimensions, and the stream of pieces from which all operands are read.
#pragma once

#include <cstdint>

#include "mainloop.cuh"

namespace flashbwd::sm80 {

// The names are those of Traits, so that both forms share the code for scores and products. kHeadDim is one piece here.
template <typename T_, int kTileIndex, Extras kExtras_, typename M_ = Mma<T_>>
struct LargeTraits {
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
  static constexpr int kRowBytes = 128;  // of pieces for s and dp
  static constexpr int kHeadDim = kRowBytes / kElementBytes;
  static constexpr int kScoreRowBytes = kBlockM * kElementBytes;
  static constexpr bool kExchange = true;
  static constexpr int kPieces = kTile.stages;

  static constexpr int kPartRows = kBlockN;  // rows of q, dout or k in pieces for dv, dk and dq
  static constexpr int kParts = kBlockM / kPartRows;
  static constexpr int kGradientColumns = kTile.gradient_columns();
  static constexpr int kGradientRowBytes = kGradientColumns * kElementBytes;
  static constexpr int kDqStep = 64;  // columns of dq that are in registers at a time

  static constexpr int kKeyTiles = kBlockN / kWarpsN / 16;               // of s, dk, dv: 16 keys each
  static constexpr int kScoreTiles = kBlockM / kWarpsS / 8;              // of s: 8 queries each
  static constexpr int kGradientTiles = kGradientColumns / kWarpsS / 8;  // of dk, dv: 8 columns each
  static constexpr int kQueryTiles = kBlockM / kWarpsQ / 16;             // of dq: 16 queries each
  static constexpr int kColumnTiles = kDqStep / kWarpsD / 8;             // of dq: 8 columns each
  // Warps alternate over pairs of tiles of dk and dv, so that all of them have work if the last column block is
  // partial.
  static constexpr int kPairColumns = 16 * kWarpsS;
  static constexpr int kPairs = kGradientTiles / 2;
  static_assert(kTile.large && kTile.element_bytes == sizeof(T), "the tile is for another form or element");
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
    WorkTile work;
    int32_t work_index;
  };
};

// The phases of one query tile, in this order.
enum class Phase : int32_t { kScores, kScoreGradients, kDv, kDk, kDq, kEnd };

// The position in the sequence of pieces of all query tiles of a work tile. Every thread has its own copy for the
// loads, which run ahead of the products.
template <typename Traits>
struct PieceCursor {
  QueryIteration step;
  Phase phase = Phase::kScores;
  int32_t block = 0;  // block of columns
  int32_t part = 0;   // part of the rows; kDv and kDk only

  __device__ __forceinline__ explicit PieceCursor(const WorkTile& work) : step(work) {}

  // The parts of a query tile that see a key of the block. p and ds are zero in the other parts.
  static __device__ __forceinline__ BlockRange parts(const WorkTile& work, int32_t query_block) {
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
  // Whether the piece is from v and dout, not from q and k.
  __device__ __forceinline__ bool of_values() const { return phase == Phase::kScoreGradients || phase == Phase::kDv; }

  __device__ __forceinline__ void advance(const AttentionBackwardParams& p, const WorkTile& work) {
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

// A ring buffer of pieces in shared memory.
template <typename Traits>
struct PieceStream {
  using T = typename Traits::T;
  using SharedStorage = typename Traits::SharedStorage;
  static constexpr int kPieces = Traits::kPieces;
  static_assert(kPieces >= 2 && kPieces <= 4, "one to work on; see load_statistics for the most");

  const KernelParams& params;
  SharedStorage& smem;
  const WorkTile& work;
  PieceCursor<Traits> next;       // the next piece to load
  int32_t current = kPieces - 1;  // index of the current piece

  __device__ __forceinline__ PieceStream(const KernelParams& params, SharedStorage& smem, const WorkTile& work)
      : params(params), smem(smem), work(work), next(work) {
    for (int32_t place = 0; place + 1 < kPieces; ++place) load(place);
  }

  // Returns the next piece. All threads must be done with the previous one.
  __device__ __forceinline__ const uint8_t* acquire() {
    copy_async_wait<kPieces - 2>();
    __syncthreads();  // this piece is loaded, p and ds of all warps are stored; the previous piece may be overwritten
    load(current);
    current = current + 1 == kPieces ? 0 : current + 1;
    return smem.pieces[current];
  }

 private:
  // Starts the copies of the next piece and advances. Commits a group even if there is no piece, because waits count
  // groups.
  __device__ __forceinline__ void load(int32_t place) {
    if (next.step.index < work.num_iterations()) {
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

  // Copies lse and delta of the query tile. At most three pieces are loaded ahead, and each query tile has at least
  // three pieces after its scores, so the previous tile's values are no longer needed. Rows past the end of the
  // sequence get zeros; their q and dout are zero too.
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

// Sizes and shared memory of large head dimensions, and the ring of stages from which all operands are read.
#pragma once

#include <cstdint>

#include "mainloop.cuh"

namespace flashbwd::sm80 {

// The names are those of Traits, so that both share the code for scores and products. kHeadDim is the number of columns
// of q, k, v and dout in one stage here.
template <typename T_, int kTileIndex, Variant kVariant_, typename M_ = Mma<T_>>
struct LargeTraits {
  using T = T_;
  using M = M_;
  static constexpr Tile kTile = kTiles[kTileIndex];
  static constexpr Variant kVariant = kVariant_;
  static constexpr bool kFeatures = kVariant != Variant::kPlain;
  static constexpr bool kListed = false, kGenerated = false;
  using WorkTile = sm80::WorkTile;
  using QueryIteration = sm80::QueryIteration;
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kWarpsN = kTile.warps_n;
  static constexpr int kWarpsS = kTile.warps_s;
  static constexpr int kWarpsQ = kTile.warps_q;
  static constexpr int kWarpsD = kTile.warps() / kWarpsQ;
  static constexpr int kThreads = kTile.threads();
  static constexpr int kElementBytes = sizeof(T);
  static constexpr int kRowBytes = 128;  // of a stage for s and dp
  static constexpr int kHeadDim = kRowBytes / kElementBytes;
  static constexpr int kScoreRowBytes = kBlockM * kElementBytes;
  static constexpr bool kExchange = true;
  static constexpr int kStages = kTile.stages;

  static constexpr int kSubtileRows = kBlockN;  // rows of q, dout or k in a stage for dv, dk and dq
  static constexpr int kSubtiles = kBlockM / kSubtileRows;
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
  static_assert(kTile.large && kTile.element_bytes == sizeof(T), "the tile is for other head dimensions or elements");
  static_assert(kKeyTiles * kWarpsN * 16 == kBlockN && kQueryTiles * kWarpsQ * 16 == kBlockM, "whole rows of tiles");
  static_assert(kScoreTiles % 2 == 0 && kScoreTiles * kWarpsS * 8 == kBlockM, "queries in pairs of 8");
  static_assert(kColumnTiles % 2 == 0 && kColumnTiles * kWarpsD * 8 == kDqStep, "columns in pairs of 8");
  static_assert(kGradientColumns % kDqStep == 0 && kSubtiles * kSubtileRows == kBlockM, "whole subtiles");

  static __device__ __forceinline__ int32_t lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int32_t warp() { return threadIdx.x / 32; }
  static __device__ __forceinline__ int32_t warp_n() { return warp() / kWarpsS; }
  static __device__ __forceinline__ int32_t warp_s() { return warp() % kWarpsS; }
  static __device__ __forceinline__ int32_t warp_q() { return warp() / kWarpsD; }
  static __device__ __forceinline__ int32_t warp_d() { return warp() % kWarpsD; }

  struct SharedStorage {
    alignas(1024) uint8_t stages[kStages][kTile.stage_bytes()];
    alignas(1024) uint8_t ds[kBlockN * kScoreRowBytes];  // (kBlockN, kBlockM)
    alignas(1024) uint8_t p[kBlockN * kScoreRowBytes];   // (kBlockN, kBlockM)
    alignas(16) float lse[kBlockM];
    alignas(16) float delta[kBlockM];
    WorkTile work;
    int32_t work_index;
    uint32_t key_bits[kVariant == Variant::kAllFeatures ? kThreads / 32 : 1];  // see KeyBits
  };
};

// The phases of one query tile, in this order.
enum class Phase : int32_t { kScores, kScoreGradients, kDv, kDk, kDq, kEnd };

// The position in the sequence of operand loads of all query tiles of a work tile. Every thread has its own copy for
// the loads, which run ahead of the products.
template <typename Traits>
struct OperandCursor {
  QueryIteration iteration;
  Phase phase = Phase::kScores;
  int32_t block = 0;    // block of columns
  int32_t subtile = 0;  // subtile of the rows; kDv and kDk only

  __device__ __forceinline__ explicit OperandCursor(const WorkTile& work) : iteration(work) {}

  // The subtiles of a query tile that see a key of the block. p and ds are zero in the other subtiles.
  static __device__ __forceinline__ BlockRange subtiles(const WorkTile& work, int32_t query_block) {
    const BlockRange seen = query_blocks(work.visibility, work.key_block, Traits::kSubtileRows, Traits::kBlockN);
    const int32_t first = query_block * Traits::kSubtiles;
    return {max(seen.begin - first, 0), min(seen.end - first, Traits::kSubtiles)};
  }

  static __device__ __forceinline__ int32_t blocks_for_scores(int32_t columns) {
    return (columns + Traits::kHeadDim - 1) / Traits::kHeadDim;
  }
  static __device__ __forceinline__ int32_t blocks_for_gradients(int32_t columns) {
    return (columns + Traits::kGradientColumns - 1) / Traits::kGradientColumns;
  }

  __device__ __forceinline__ bool for_scores() const { return phase < Phase::kDv; }
  __device__ __forceinline__ bool by_subtiles() const { return phase == Phase::kDv || phase == Phase::kDk; }
  // Whether the stage holds v or dout, not q or k.
  __device__ __forceinline__ bool of_values() const { return phase == Phase::kScoreGradients || phase == Phase::kDv; }

  __device__ __forceinline__ void advance(const AttentionBackwardParams& p, const WorkTile& work) {
    if (by_subtiles() && ++subtile < subtiles(work, iteration.query_block(work)).end) return;
    const int32_t columns = of_values() ? p.head_dim_v : p.head_dim;
    if (++block == (for_scores() ? blocks_for_scores(columns) : blocks_for_gradients(columns))) {
      block = 0;
      phase = static_cast<Phase>(static_cast<int32_t>(phase) + 1);
      if (phase == Phase::kEnd) {
        phase = Phase::kScores;
        iteration.advance(work);
      }
    }
    if (by_subtiles()) subtile = subtiles(work, iteration.query_block(work)).begin;
  }
};

template <typename Traits, int kRowBytes_>
struct OperandRows {
  static constexpr int kThreads = Traits::kThreads;
  static constexpr int kRowBytes = kRowBytes_;
};

// The ring buffer of operand stages in shared memory.
template <typename Traits>
struct OperandStream {
  using T = typename Traits::T;
  using SharedStorage = typename Traits::SharedStorage;
  static constexpr int kStages = Traits::kStages;
  static_assert(kStages >= 2 && kStages <= 4, "one stage is read, the others load; load_lse_delta requires at most 4");

  const KernelParams& params;
  SharedStorage& smem;
  const WorkTile& work;
  OperandCursor<Traits> next;     // what the next stage loads
  int32_t current = kStages - 1;  // index of the current stage

  __device__ __forceinline__ OperandStream(const KernelParams& params, SharedStorage& smem, const WorkTile& work)
      : params(params), smem(smem), work(work), next(work) {
    for (int32_t stage = 0; stage + 1 < kStages; ++stage) load(stage);
  }

  // Returns the next stage. All threads must be done with the previous one.
  __device__ __forceinline__ const uint8_t* acquire() {
    copy_async_wait<kStages - 2>();
    // All threads arrive when their copies of this stage have landed, p and ds are stored and the previous stage is
    // read.
    __syncthreads();
    load(current);
    current = current + 1 == kStages ? 0 : current + 1;
    return smem.stages[current];
  }

 private:
  // Starts the copies of the next stage and advances. Commits a group even if nothing is left to load, because waits
  // count groups.
  __device__ __forceinline__ void load(int32_t stage) {
    if (next.iteration.index < work.num_iterations()) {
      if (next.for_scores()) {
        load_score_operands(smem.stages[stage]);
      } else {
        load_gradient_operand(smem.stages[stage]);
      }
      next.advance(params.attention, work);
    }
    copy_async_commit();
  }

  template <int kRowBytes, int kRows, typename Wanted = AllRows>
  __device__ __forceinline__ void load_rows(uint8_t* to, const HeadsView& view, int32_t head, int64_t first_row,
                                            int32_t rows, int32_t column, int32_t columns, bool aligned,
                                            const Wanted& wanted = {}) const {
    load_tile<OperandRows<Traits, kRowBytes>, kRows>(to, head_rows<const T>(view, work.batch, head, first_row) + column,
                                                     view.seq_stride, rows, columns - column, aligned, wanted);
  }

  // For load_rows: the rows that the key mask shows if the rows are keys, otherwise all.
  __device__ __forceinline__ auto wanted_rows(bool keys) const {
    if constexpr (Traits::kVariant == Variant::kAllFeatures) {
      if (!keys) return ShownKeys();
      return ShownKeys(params.attention.key_mask, work.batch, work.key_block * Traits::kBlockN);
    } else {
      return AllRows();
    }
  }

  // (kBlockN, kHeadDim) of k or v, then (kBlockM, kHeadDim) of q or dout.
  __device__ __forceinline__ void load_score_operands(uint8_t* stage) {
    const AttentionBackwardParams& p = params.attention;
    const bool values = next.of_values();
    const int32_t column = next.block * Traits::kHeadDim, columns = values ? p.head_dim_v : p.head_dim;
    const int32_t first_key = work.key_block * Traits::kBlockN;
    const int32_t first_query = next.iteration.query_block(work) * Traits::kBlockM;
    const int32_t queries = work.sequence.seqlen_q - first_query;
    load_rows<Traits::kRowBytes, Traits::kBlockN>(
        stage, values ? p.v : p.k, work.head_kv, work.sequence.begin_k + first_key, work.sequence.seqlen_k - first_key,
        column, columns, values ? params.v_aligned : params.k_aligned, wanted_rows(!values));
    load_rows<Traits::kRowBytes, Traits::kBlockM>(stage + Traits::kBlockN * Traits::kRowBytes, values ? p.dout : p.q,
                                                  next.iteration.head, work.sequence.begin_q + first_query, queries,
                                                  column, columns, values ? params.dout_aligned : params.q_aligned);
    if (next.phase == Phase::kScores && next.block == 0) load_lse_delta(first_query, queries);
  }

  // Copies lse and delta of the query tile; zeros past the end of the sequence, where q and dout are zero too. At most
  // three stages load ahead, and each query tile has at least three stages after its scores, so no thread needs the
  // values of the previous tile any more.
  __device__ __forceinline__ void load_lse_delta(int32_t first_query, int32_t queries) {
    constexpr int kVectors = Traits::kBlockM / 4;
    const int64_t first = params.lse_delta.index(work.batch, next.iteration.head, work.sequence.begin_q) + first_query;
    for (int32_t vector = threadIdx.x; vector < 2 * kVectors; vector += Traits::kThreads) {
      const bool is_delta = vector >= kVectors;
      const int32_t row = vector % kVectors * 4;
      const float* source = is_delta ? params.lse_delta.delta : params.lse_delta.lse_log2;
      copy_async_16(smem_address((is_delta ? smem.delta : smem.lse) + row), source + first + (row < queries ? row : 0),
                    row < queries ? 16 : 0);
    }
  }

  // (kSubtileRows, kGradientColumns) of dout for dv, of q for dk, of k for dq.
  __device__ __forceinline__ void load_gradient_operand(uint8_t* stage) {
    const AttentionBackwardParams& p = params.attention;
    const bool keys = next.phase == Phase::kDq, values = next.of_values();
    const int32_t first =
        keys ? work.key_block * Traits::kBlockN
             : next.iteration.query_block(work) * Traits::kBlockM + next.subtile * Traits::kSubtileRows;
    load_rows<Traits::kGradientRowBytes, Traits::kSubtileRows>(
        stage,
        keys     ? p.k
        : values ? p.dout
                 : p.q,
        keys ? work.head_kv : next.iteration.head, (keys ? work.sequence.begin_k : work.sequence.begin_q) + first,
        (keys ? work.sequence.seqlen_k : work.sequence.seqlen_q) - first, next.block * Traits::kGradientColumns,
        values ? p.head_dim_v : p.head_dim,
        keys     ? params.k_aligned
        : values ? params.dout_aligned
                 : params.q_aligned,
        wanted_rows(keys));
  }
};

}  // namespace flashbwd::sm80

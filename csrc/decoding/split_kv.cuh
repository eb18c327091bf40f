// Split-KV attention for short queries. A CTA handles one KV head, one tile of the query rows that attend to it, and
// one split of the keys. With GQA, the query rows of a KV head are those of all query heads of the group, head by head.
// Each warp streams key tiles through its own cp.async ring and keeps its own online softmax, without CTA barriers.
//
//   warp w:  key tiles  w, w + kWarps, w + 2 kWarps ...   (K and V of 16 keys, or of 8 in float32; one ring stage)
//            S = Q K^T -> scale, score_mod, mask -> online softmax -> O += P V
//   then:    merge the (max, sum, O) of all warps (merge.cuh)
//
// nvcc compiles this for the built-in modifications, NVRTC for a user's. Results: docs/kernels/flex_decoding.md.
#pragma once

#include "block_lists.cuh"
#include "elements.cuh"
#include "last_block.cuh"
#include "merge.cuh"
#include "mod.cuh"
#include "online_softmax.cuh"
#include "ring.cuh"

#ifdef __CUDACC__

namespace flashbwd {

// kD: both head dimensions, padded to 64, 128 or 256. kM: query rows per tile, a multiple of 16. kAligned: every row of
// q, k and v is 16-byte aligned and a multiple of 16 bytes long.
template <int kD, int kM, int kWarps, class T, bool kAligned, class Mod>
class SplitKv {
  using Storage = typename T::Storage;
  using Tile = SharedTile<T, kD>;
  using ModRow = typename Mod::Row;
  static constexpr int kKeys = keys_of(kBytes<T>);
  static constexpr int kStages = stages_of(kD);
  static constexpr int kMmaM = kM / 16;    // MMA tiles along the rows
  static constexpr int kMmaN = kKeys / 8;  // MMA tiles along the keys of a key tile
  static constexpr uint32 kAllVisible = (1u << kMmaN * 4) - 1;
  static constexpr bool kQInShared = q_in_shared(kD, kM, kBytes<T>);
  static constexpr bool kModRowsInShared = Mod::kHasRow && mod_rows_in_shared(kD, kM);
  static_assert(!kModRowsInShared || (kQInShared && sizeof(ModRow) <= kModRowBytes && kM <= 32));
  using Scores = float[kMmaM][kMmaN][4];                              // (kM, kKeys) in MMA tiles of (16, 8)
  using QOperands = uint32[kMmaM][kQInShared ? 1 : Tile::kSteps][4];  // A operands: all of Q, or those of one step

  // In each MMA tile of 16 rows, this lane holds rows lane / 4 and lane / 4 + 8 (the MMA accumulator layout). Arrays of
  // per-row values have the index [MMA tile][half] for these two rows.
  struct QueryRows {
    int head[kMmaM][2], query[kMmaM][2];
    ModRow mod[kMmaM][2];  // per-row state of the modification
  };

  struct Accumulators {
    float tO[kMmaM][kD / 8][4];  // (kM, kD) in MMA tiles of (16, 8)
    float row_max[kMmaM][2], row_sum[kMmaM][2];
  };

 public:
  __device__ __forceinline__ SplitKv(const DecodingParams& params, unsigned char* shared_memory)
      : p(params),
        shared(shared_memory),
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32),
        b(blockIdx.x / p.row_tiles / p.heads_kv),
        head_kv(blockIdx.x / p.row_tiles % p.heads_kv),
        rows(p.group * p.seqlen_q),
        first_row(blockIdx.x % p.row_tiles * kM),
        ring(p, shared, b, head_kv),
        shared_q(shared_address(shared) + ring_bytes(kD, kWarps)),
        shared_mod_rows(
            reinterpret_cast<ModRow*>(shared + ring_bytes(kD, kWarps) + (kQInShared ? kM * kD * kBytes<T> : 0))) {}

  __device__ __forceinline__ void run() {
    const int split = blockIdx.y;
    QueryBlockList partial, full;
    if (uses_block_lists<Mod>(p)) {
      const int first_head = head_kv * p.group + first_row / p.seqlen_q;
      const int q_block = first_row % p.seqlen_q / p.q_block;
      partial = {p.partial, b, first_head, q_block};
      full = {p.full, b, first_head, q_block};
      partial.prefetch_first(p.partial, split, p.splits);
      full.prefetch_first(p.full, split, p.splits);
    }
    wait_for_previous_launch();

    const KeyTileList<kKeys> list = key_tile_list<kKeys, Mod>(p, partial, full);
    const int begin = begin_of_split(list.total, split, p.splits);
    const int end = begin_of_split(list.total, split + 1, p.splits);
    KeyTileIterator<kKeys, kWarps> next(list, begin + warp, end);
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) {
      ring.load(!next.at_end(), next.tile(), stage);
      next.advance();
    }
    allow_next_launch();  // the next kernel (combine, or the next call) still waits for this grid before it reads

    // The arrays are not members: nvcc 13 optimizes addresses less if the object contains arrays.
    QueryRows q;
    QOperands tQ;
    Accumulators acc;
    start(q, acc);
    load_q(tQ, q);
    int stage = 0;
    for (int index = begin + warp; index < end; index += kWarps) {
      ring.wait();
      const KeyTile tile = ring.key_tile(stage);
      ring.load(!next.at_end(), next.tile(), stage == 0 ? kStages - 1 : stage - 1);
      next.advance();
      add_key_tile(acc, q, tQ, tile, stage);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    finish(acc);
  }

 private:
  const DecodingParams& p;
  unsigned char* const shared;
  const int lane, warp, b, head_kv;
  const int rows;       // query rows of the KV head
  const int first_row;  // of the CTA's row tile
  Ring<kD, kWarps, T, kAligned> ring;
  const uint32 shared_q;          // (kM, kD), if kQInShared
  ModRow* const shared_mod_rows;  // (kM,), if kModRowsInShared

  __device__ __forceinline__ void start(QueryRows& q, Accumulators& acc) const {
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) {
      set_zero(acc.tO[m]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + m * 16 + half * 8 + lane / 4;
        const int inside = row < rows ? row : first_row;  // rows past the end repeat the first row; they are not stored
        q.head[m][half] = head_kv * p.group + inside / p.seqlen_q;
        q.query[m][half] = inside % p.seqlen_q;
        acc.row_max[m][half] = -FLASHBWD_INFINITY;
        acc.row_sum[m][half] = 0.f;
      }
    }
  }

  __device__ __forceinline__ const Storage* q_row(int head, int query) const {
    return static_cast<const Storage*>(p.q) + b * p.q_strides[0] + head * p.q_strides[1] + query * p.q_strides[2];
  }

  // Loads Q and constructs the per-row states. Their constructor may load from global memory, so one warp constructs
  // the states in shared memory while the other warps load Q.
  __device__ __forceinline__ void load_q(QOperands& tQ, QueryRows& q) {
    if constexpr (kQInShared) {
      constexpr int kQWarps = kModRowsInShared ? kWarps - 1 : kWarps;
      if (warp < kQWarps) {
        for (int i = threadIdx.x; i < kM * Tile::kVectors; i += kQWarps * 32) {
          const int row = i / Tile::kVectors;
          const int local = min(first_row + row, rows - 1);
          const Storage* source = q_row(head_kv * p.group + local / p.seqlen_q, local % p.seqlen_q);
          Tile::template copy_vector<kAligned>(shared_q, row, i % Tile::kVectors, source, p.head_dim, true);
        }
      } else if (lane < kM) {
        const int local = first_row + lane < rows ? first_row + lane : first_row;  // past the end: repeat the first row
        shared_mod_rows[lane] = {p, b, head_kv * p.group + local / p.seqlen_q, local % p.seqlen_q};
      }
      __syncthreads();  // all warps have written; every warp reads all of Q and all per-row states
    } else {
#pragma unroll
      for (int step = 0; step < Tile::kSteps; ++step) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const int column = step * 16 + r / 2 * 8 + lane % 4 * 2;
          tQ[0][step][r] = load_pair<kAligned>(q_row(q.head[0][r % 2], q.query[0][r % 2]), column, p.head_dim);
        }
      }
    }
    if constexpr (!kModRowsInShared) {
#pragma unroll
      for (int i = 0; i < kMmaM * 2; ++i) q.mod[i / 2][i % 2] = {p, b, q.head[i / 2][i % 2], q.query[i / 2][i % 2]};
    }
  }

  // Adds one key tile, which is in stage `stage` of the ring, to the online softmax and to O.
  __device__ __forceinline__ void add_key_tile(Accumulators& acc, QueryRows& q, QOperands& tQ, const KeyTile& tile,
                                               int stage) {
    Scores tS;
    multiply_qk(tS, tQ, ring.keys(stage));
    const bool masked = needs_mask_mod(q, tile);
    const bool hidden = masked || tile.first_key + kKeys > tile.end_key;  // true if a score may be masked out
    uint32 visible[kMmaM];  // bit i of visible[m] is set if element i of tS[m] is not masked out
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) {
      visible[m] = kAllVisible;
      if constexpr (kModRowsInShared && Mod::kHasScoreMod) load_mod_rows(q, m);
    }
    if (hidden) apply_mask(visible, q, tile, masked, stage);
    if constexpr (Mod::kHasScoreMod) modify_scores(tS, q, visible, hidden, tile);
    scale_scores(tS, Mod::kHasScoreMod ? kLog2e : p.scale * kLog2e);
    if (hidden) {
#pragma unroll
      for (int m = 0; m < kMmaM; ++m) {
#pragma unroll
        for (int i = 0; i < kMmaN * 4; ++i) {
          if (!(visible[m] >> i & 1u)) tS[m][i / 4][i % 4] = -FLASHBWD_INFINITY;
        }
      }
    }
    SplitA<T> tP[kMmaM];
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) {
      online_softmax(tS[m], acc.tO[m], acc.row_max[m], acc.row_sum[m]);
      split_a<T>(tP[m], tS[m]);
    }
    multiply_pv(acc.tO, tP, ring.values(stage));
  }

  // S = Q K^T
  __device__ __forceinline__ void multiply_qk(Scores& tS, QOperands& tQ, uint32 stage_k) {
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) set_zero(tS[m]);
    uint32 tK[4];
#pragma unroll(kQInShared ? 4 : Tile::kSteps)
    for (int step = 0; step < Tile::kSteps; ++step) {
      if constexpr (kMmaN == 2) {
        Tile::load_b(tK, stage_k, 0, step);
      } else if (step % 2 == 0) {  // one ldmatrix.x4 loads 8 keys for two steps
        load_matrices(tK, stage_k + Tile::at(lane % 8, step * 2 + lane / 8));
      }
#pragma unroll
      for (int m = 0; m < kMmaM; ++m) {
        if constexpr (kQInShared) Tile::load_a(tQ[m][0], shared_q, m * 16, step);
        const uint32(&q)[4] = tQ[m][kQInShared ? 0 : step];
        if constexpr (kMmaN == 2) {
          multiply_two<T>(tS[m], q, tK);
        } else {
          multiply<T>(tS[m][0], q, tK[step % 2 * 2], tK[step % 2 * 2 + 1]);
        }
      }
    }
  }

  // O += P V
  __device__ __forceinline__ void multiply_pv(float (&tO)[kMmaM][kD / 8][4], const SplitA<T> (&tP)[kMmaM],
                                              uint32 stage_v) {
#pragma unroll
    for (int pair = 0; pair < kD / 16; ++pair) {
      uint32 tV[4];
      Tile::load_b_rows(tV, stage_v, 0, pair);
#pragma unroll
      for (int m = 0; m < kMmaM; ++m) multiply_two<T>(&tO[m][2 * pair], tP[m], tV);
    }
  }

  __device__ __forceinline__ int key_of(const KeyTile& tile, int i) const {
    return tile.first_key + i / 4 * 8 + lane % 4 * 2 + i % 2;
  }

  __device__ __forceinline__ void load_mod_rows(QueryRows& q, int m) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) q.mod[m][half] = shared_mod_rows[m * 16 + half * 8 + lane / 4];
  }

  // True if mask_mod may hide a key of the tile from a row. Most tiles of a partial block are visible to all rows.
  __device__ __forceinline__ bool needs_mask_mod(const QueryRows& q, const KeyTile& tile) const {
    bool masked = Mod::kHasMask && (p.states != nullptr || !tile.full);
    if constexpr (Mod::kHasMask && Mod::kHasRanges) {
      if (masked && p.states == nullptr) {
        bool all = true;
#pragma unroll
        for (int i = 0; i < kMmaM * 2; ++i) {
          const ModRow row = kModRowsInShared ? shared_mod_rows[i * 8 + lane / 4] : q.mod[i / 2][i % 2];
          all &= Mod::sees_all(row, tile.first_key, tile.first_key + kKeys - 1);
        }
        masked = !__all_sync(0xffffffffu, all);
      }
    }
    return masked;
  }

  // Computes `visible` for a tile that has keys past its end or, if `masked`, that mask_mod may hide from some rows.
  __device__ __forceinline__ void apply_mask(uint32 (&visible)[kMmaM], QueryRows& q, const KeyTile& tile, bool masked,
                                             int stage) {
    uint32 seen = 0;  // one bit per key of this lane: set if the key is visible to any of the lane's rows
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) {
      if constexpr (kModRowsInShared && !Mod::kHasScoreMod) load_mod_rows(q, m);
      visible[m] = 0;
#pragma unroll
      for (int i = 0; i < kMmaN * 4; ++i) visible[m] |= static_cast<uint32>(key_of(tile, i) < tile.end_key) << i;
      if constexpr (Mod::kHasMask) {
        uint32 partial = masked ? visible[m] : 0;  // elements for which mask_mod decides
        if (masked && p.states != nullptr) apply_states(visible[m], partial, q, tile, m);
#pragma unroll
        for (int i = 0; i < kMmaN * 4; ++i) {
          const int half = i % 4 / 2;
          if ((partial >> i & 1u) &&
              !Mod::mask_mod(p, q.mod[m][half], b, q.head[m][half], q.query[m][half], key_of(tile, i)))
            visible[m] &= ~(1u << i);
        }
      }
#pragma unroll
      for (int i = 0; i < kMmaN * 4; ++i) seen |= (visible[m] >> i & 1u) << (i / 4 * 2 + i % 2);
    }
    if (masked) clear_hidden_values(seen, stage);
  }

  // Removes the elements of empty blocks from `visible`, and those of empty and full blocks from `partial`.
  __device__ __forceinline__ void apply_states(uint32& visible, uint32& partial, const QueryRows& q,
                                               const KeyTile& tile, int m) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned char* const states = p.states + b * p.state_strides[0] + q.head[m][half] * p.state_strides[1] +
                                          q.query[m][half] / p.q_block * p.state_strides[2];
#pragma unroll 1
      for (int j = 0; j < kMmaN * 2; ++j) {
        const int i = j / 2 * 4 + half * 2 + j % 2;
        if (!(visible >> i & 1u)) continue;
        const int state = states[key_of(tile, i) / p.kv_block];
        if (state != 1) partial &= ~(1u << i);
        if (state == 0) visible &= ~(1u << i);
      }
    }
  }

  // Zeroes V of the keys that are masked out for all rows of the CTA.
  __device__ __forceinline__ void clear_hidden_values(uint32 seen, int stage) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) seen |= __shfl_xor_sync(0xffffffffu, seen, step);
    if (!__any_sync(0xffffffffu, seen != (1u << kMmaN * 2) - 1)) return;
    uint32 visible_keys = 0;
#pragma unroll
    for (int key = 0; key < kKeys; ++key) {
      const uint32 bits = __shfl_sync(0xffffffffu, seen, key % 8 / 2);
      visible_keys |= (bits >> (key / 8 * 2 + key % 2) & 1u) << key;
    }
    ring.clear_hidden_values(stage, visible_keys);
  }

  __device__ __forceinline__ static void scale_scores(Scores& tS, float factor) {
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) {
#pragma unroll
      for (int i = 0; i < kMmaN * 4; ++i) tS[m][i / 4][i % 4] *= factor;
    }
  }

  // Replaces Q K^T by score_mod(scale * Q K^T).
  __device__ __forceinline__ void modify_scores(Scores& tS, const QueryRows& q, const uint32 (&visible)[kMmaM],
                                                bool hidden, const KeyTile& tile) const {
    scale_scores(tS, p.scale);
    Mod::all_scores(p, tS);
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!Mod::kTotal && first_row + m * 16 + half * 8 >= rows) continue;
        const auto modified = [&](int i, bool* near) {
          return Mod::score_mod(p, q.mod[m][half], tS[m][i / 4][i % 4], b, q.head[m][half], q.query[m][half],
                                key_of(tile, i), near);
        };
        // Evaluate all elements without branches if score_mod accepts any (row, key) or if all are visible. If not, or
        // if score_mod's fast path is invalid for an argument, evaluate only the visible elements, one by one.
        bool done = Mod::kTotal || !hidden;
        if (done) {
          float quick[kMmaN * 2];
#pragma unroll
          for (int j = 0; j < kMmaN * 2; ++j) quick[j] = modified(j / 2 * 4 + half * 2 + j % 2, &done);
          if (done) {
#pragma unroll
            for (int j = 0; j < kMmaN * 2; ++j) tS[m][j / 2][half * 2 + j % 2] = quick[j];
          }
        }
        if (!done) {
#pragma unroll
          for (int j = 0; j < kMmaN * 2; ++j) {
            const int i = j / 2 * 4 + half * 2 + j % 2;
            if (visible[m] >> i & 1u) tS[m][i / 4][i % 4] = modified(i, nullptr);
          }
        }
      }
    }
  }

  // Merges the results of the warps and, if this CTA arrives last at its row tile, those of the splits.
  __device__ __forceinline__ void finish(Accumulators& acc) {
    ring.end();
    __syncthreads();  // all warps have finished reading their rings; the merge reuses this shared memory
    SoftmaxMerge<kD, kM, kWarps> merge(shared);
    merge.store_warp(acc.tO, acc.row_max, acc.row_sum);
    merge.template finish<T>(p, b, head_kv, first_row);
    if (p.arrivals != nullptr && arrives_last(p, shared))
      reduce_slots<T, kWarps>(p, shared, b, head_kv, first_row, min(kM, rows - first_row));
  }
};

template <int kD, int kM, int kWarps, class T, bool kAligned, class Mod>
__device__ void split_kv(const DecodingParams& p, unsigned char* shared) {
  SplitKv<kD, kM, kWarps, T, kAligned, Mod>(p, shared).run();
}

}  // namespace flashbwd

#endif

// Split-KV attention for short queries. A CTA handles one KV head, one tile of the query rows that attend to it (GQA
// packing: the rows of all query heads of the group, head by head) and one split of the keys. Each warp streams key
// chunks through its own cp.async ring and keeps its own online softmax; the key loop has no CTA barrier.
//
//   warp w:  chunks  w, w + kWarps, w + 2 kWarps ...      (K and V of 16 keys, or of 8 in float32; one ring stage)
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
#include "ring.cuh"

#ifdef __CUDACC__

namespace flashbwd {

// kD: both head dimensions, padded to 64, 128 or 256. kM: query rows per tile, a multiple of 16. kAligned: every row of
// q, k and v is 16-byte aligned and a multiple of 16 bytes long.
template <int kD, int kM, int kWarps, class T, bool kAligned, class Mod>
__device__ void split_kv(const DecodingParams& p, unsigned char* shared) {
  using Storage = typename T::Storage;
  using Tile = SharedTile<T, kD>;
  constexpr int kKeys = keys_of(kBytes<T>);
  constexpr int kKeyTiles = kKeys / 8;
  constexpr int kStages = stages_of(kD);
  constexpr int kRowTiles = kM / 16;
  constexpr bool kQInShared = q_in_shared(kD, kM, kBytes<T>);
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int split = blockIdx.y;
  const int tile = blockIdx.x % p.row_tiles;
  const int unit = blockIdx.x / p.row_tiles;
  const int b = unit / p.heads_kv;
  const int head_kv = unit % p.heads_kv;
  const int rows = p.group * p.seqlen_q;
  const int first_row = tile * kM;

  const int first_head = head_kv * p.group + first_row / p.seqlen_q;
  Ring<kD, kWarps, T, kAligned> ring(p, shared, b, head_kv);
  ListOfRow partial, full;
  if (uses_block_lists<Mod>(p)) {
    const int q = first_row % p.seqlen_q / p.q_block;
    partial = {p.partial, b, first_head, q};
    full = {p.full, b, first_head, q};
    partial.prefetch_first(p.partial, split, p.splits);
    full.prefetch_first(p.full, split, p.splits);
  }
  wait_for_previous();

  const ChunkList<kKeys> list = chunk_list<kKeys, Mod>(p, partial, full);
  const int begin = begin_of_share(list.total, split, p.splits), end = begin_of_share(list.total, split + 1, p.splits);
  Cursor<kKeys, kWarps> ahead(list, begin + warp, end);
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    ring.load(ahead.chunk < end, ahead.place(), stage);
    ahead.advance();
  }

  launch_dependents();  // the next kernel (combine, or the next call) still waits for this grid before it reads

  // In each 16-row tile, this lane holds rows lane / 4 and lane / 4 + 8 (the mma accumulator layout).
  int head[kRowTiles][2], query[kRowTiles][2];
  float tO[kRowTiles][kD / 8][4];  // (kM, kD) in mma tiles of (16, 8)
  float row_max[kRowTiles][2], row_sum[kRowTiles][2];
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kD / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) tO[m][n][i] = 0.f;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + m * 16 + half * 8 + lane / 4;
      const int inside = row < rows ? row : first_row;  // rows past the end repeat the first row; they are not stored
      head[m][half] = head_kv * p.group + inside / p.seqlen_q;
      query[m][half] = inside % p.seqlen_q;
      row_max[m][half] = -FLASHBWD_INFINITY;
      row_sum[m][half] = 0.f;
    }
  }

  // ---- Q (kM, kD), as the A operand ----
  uint32 tQ[kRowTiles][kQInShared ? 1 : Tile::kSteps][4];
  const uint32 shared_q = shared_address(shared) + ring_bytes(kD, kWarps);
  const auto q_row = [&](int b, int head, int query) {
    return static_cast<const Storage*>(p.q) + b * p.q_strides[0] + head * p.q_strides[1] + query * p.q_strides[2];
  };
  // Per-row state of the modification. Its constructor may load from global memory, so it overlaps with loading Q.
  using ModRow = typename Mod::Row;
  constexpr bool kModRowsInShared = Mod::kHasRow && mod_rows_in_shared(kD, kM);
  static_assert(!kModRowsInShared || (kQInShared && sizeof(ModRow) <= kModRowBytes && kM <= 32));
  ModRow mod_rows[kRowTiles][2];
  ModRow* const shared_mod_rows =
      reinterpret_cast<ModRow*>(shared + ring_bytes(kD, kWarps) + (kQInShared ? kM * kD * kBytes<T> : 0));
  if constexpr (kQInShared) {
    constexpr int kCopying = kModRowsInShared ? kWarps - 1 : kWarps;
    if (warp < kCopying) {
      for (int i = threadIdx.x; i < kM * Tile::kVectors; i += kCopying * 32) {
        const int row = i / Tile::kVectors;
        const int local = min(first_row + row, rows - 1);
        const Storage* source = q_row(b, head_kv * p.group + local / p.seqlen_q, local % p.seqlen_q);
        Tile::template copy_piece<kAligned>(shared_q, row, i % Tile::kVectors, source, p.head_dim, true);
      }
    } else if (lane < kM) {
      const int local = first_row + lane < rows ? first_row + lane : first_row;  // past the end: repeat the first row
      shared_mod_rows[lane] = {p, b, head_kv * p.group + local / p.seqlen_q, local % p.seqlen_q};
    }
    __syncthreads();  // every warp reads all of Q and all per-row states
  } else {
#pragma unroll
    for (int step = 0; step < Tile::kSteps; ++step) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int column = step * 16 + r / 2 * 8 + lane % 4 * 2;
        tQ[0][step][r] = load_pair<kAligned>(q_row(b, head[0][r % 2], query[0][r % 2]), column, p.head_dim);
      }
    }
  }
  if constexpr (!kModRowsInShared) {
#pragma unroll
    for (int i = 0; i < kRowTiles * 2; ++i) mod_rows[i / 2][i % 2] = {p, b, head[i / 2][i % 2], query[i / 2][i % 2]};
  }

  int stage = 0;
  for (int chunk = begin + warp; chunk < end; chunk += kWarps) {
    ring.wait();
    const Place c = ring.place(stage);
    ring.load(ahead.chunk < end, ahead.place(), stage == 0 ? kStages - 1 : stage - 1);
    ahead.advance();
    const uint32 stage_k = ring.keys(stage), stage_v = ring.values(stage);

    // S (kM, kKeys), in mma tiles of 8 keys
    float tS[kRowTiles][kKeyTiles][4];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int i = 0; i < kKeyTiles * 4; ++i) tS[m][i / 4][i % 4] = 0.f;
    }
    uint32 tK[4];
#pragma unroll(kQInShared ? 4 : Tile::kSteps)
    for (int step = 0; step < Tile::kSteps; ++step) {
      if constexpr (kKeyTiles == 2) {
        Tile::load_b(tK, stage_k, 0, step);
      } else if (step % 2 == 0) {  // one ldmatrix.x4 loads 8 keys for two steps
        load_matrices(tK, stage_k + Tile::at(lane % 8, step * 2 + lane / 8));
      }
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        if constexpr (kQInShared) Tile::load_a(tQ[m][0], shared_q, m * 16, step);
        const uint32(&q)[4] = tQ[m][kQInShared ? 0 : step];
        if constexpr (kKeyTiles == 2) {
          multiply<T>(tS[m][0], q, tK[0], tK[1]);
          multiply<T>(tS[m][1], q, tK[2], tK[3]);
        } else {
          multiply<T>(tS[m][0], q, tK[step % 2 * 2], tK[step % 2 * 2 + 1]);
        }
      }
    }

    // Bit i of visible[m] is set if element i of tS[m] is not masked out.
    constexpr uint32 kAll = (1u << kKeyTiles * 4) - 1;
    bool masked = Mod::kHasMask && (p.states != nullptr || !c.full);
    if constexpr (Mod::kHasMask && Mod::kHasRanges) {
      // Most chunks of a partial block are fully visible; they skip the per-element mask below.
      if (masked && p.states == nullptr) {
        bool whole = true;
#pragma unroll
        for (int i = 0; i < kRowTiles * 2; ++i) {
          const ModRow row = kModRowsInShared ? shared_mod_rows[i * 8 + lane / 4] : mod_rows[i / 2][i % 2];
          whole &= Mod::sees_all(row, c.first_key, c.first_key + kKeys - 1);
        }
        masked = !__all_sync(0xffffffffu, whole);
      }
    }
    const bool hidden = masked || c.first_key + kKeys > c.end_key;
    uint32 visible[kRowTiles];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      visible[m] = kAll;
      if constexpr (kModRowsInShared && Mod::kHasScoreMod) {
#pragma unroll
        for (int half = 0; half < 2; ++half) mod_rows[m][half] = shared_mod_rows[m * 16 + half * 8 + lane / 4];
      }
    }
    if (hidden) {
      uint32 seen = 0;  // one bit per key of this lane: set if any of the lane's rows sees the key
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        if constexpr (kModRowsInShared && !Mod::kHasScoreMod) {
#pragma unroll
          for (int half = 0; half < 2; ++half) mod_rows[m][half] = shared_mod_rows[m * 16 + half * 8 + lane / 4];
        }
        const auto key_of = [&](int i) { return c.first_key + i / 4 * 8 + lane % 4 * 2 + i % 2; };
        visible[m] = 0;
#pragma unroll
        for (int i = 0; i < kKeyTiles * 4; ++i) visible[m] |= static_cast<uint32>(key_of(i) < c.end_key) << i;
        if constexpr (Mod::kHasMask) {
          uint32 asked = masked ? visible[m] : 0;
          if (masked && p.states != nullptr) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const unsigned char* const states = p.states + b * p.state_strides[0] +
                                                  head[m][half] * p.state_strides[1] +
                                                  query[m][half] / p.q_block * p.state_strides[2];
#pragma unroll 1
              for (int j = 0; j < kKeyTiles * 2; ++j) {
                const int i = j / 2 * 4 + half * 2 + j % 2;
                if (!(visible[m] >> i & 1u)) continue;
                const int state = states[key_of(i) / p.kv_block];
                if (state != 1) asked &= ~(1u << i);
                if (state == 0) visible[m] &= ~(1u << i);
              }
            }
          }
#pragma unroll
          for (int i = 0; i < kKeyTiles * 4; ++i) {
            const int half = i % 4 / 2;
            if ((asked >> i & 1u) && !Mod::mask_mod(p, mod_rows[m][half], b, head[m][half], query[m][half], key_of(i)))
              visible[m] &= ~(1u << i);
          }
        }
#pragma unroll
        for (int i = 0; i < kKeyTiles * 4; ++i) seen |= (visible[m] >> i & 1u) << (i / 4 * 2 + i % 2);
      }
      if (masked) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2) seen |= __shfl_xor_sync(0xffffffffu, seen, step);
        if (__any_sync(0xffffffffu, seen != (1u << kKeyTiles * 2) - 1)) {
          uint32 keys = 0;
#pragma unroll
          for (int key = 0; key < kKeys; ++key) {
            const uint32 bits = __shfl_sync(0xffffffffu, seen, key % 8 / 2);
            keys |= (bits >> (key / 8 * 2 + key % 2) & 1u) << key;
          }
          ring.clear_unseen_values(stage, keys);
        }
      }
    }

    // Scores in log2 units; -inf where masked out.
    const auto scale_scores = [&](float factor) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < kKeyTiles * 4; ++i) tS[m][i / 4][i % 4] *= factor;
      }
    };
    if constexpr (Mod::kHasScoreMod) {
      scale_scores(p.scale);
      Mod::all_scores(p, tS);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (!Mod::kTotal && first_row + m * 16 + half * 8 >= rows) continue;
          const auto modified = [&](int i, bool* near) {
            const int key = c.first_key + i / 4 * 8 + lane % 4 * 2 + i % 2;
            return Mod::score_mod(p, mod_rows[m][half], tS[m][i / 4][i % 4], b, head[m][half], query[m][half], key,
                                  near);
          };
          // Evaluate all elements without branches if score_mod accepts any (row, key) or if all are visible. If not,
          // or if score_mod's fast path is invalid for an argument, evaluate only the visible elements, one by one.
          bool done = Mod::kTotal || !hidden;
          if (done) {
            float quick[kKeyTiles * 2];
#pragma unroll
            for (int j = 0; j < kKeyTiles * 2; ++j) quick[j] = modified(j / 2 * 4 + half * 2 + j % 2, &done);
            if (done) {
#pragma unroll
              for (int j = 0; j < kKeyTiles * 2; ++j) tS[m][j / 2][half * 2 + j % 2] = quick[j];
            }
          }
          if (!done) {
#pragma unroll
            for (int j = 0; j < kKeyTiles * 2; ++j) {
              const int i = j / 2 * 4 + half * 2 + j % 2;
              if (visible[m] >> i & 1u) tS[m][i / 4][i % 4] = modified(i, nullptr);
            }
          }
        }
      }
    }
    scale_scores(Mod::kHasScoreMod ? kLog2e : p.scale * kLog2e);
    if (hidden) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < kKeyTiles * 4; ++i) {
          if (!(visible[m] >> i & 1u)) tS[m][i / 4][i % 4] = -FLASHBWD_INFINITY;
        }
      }
    }

    // Online softmax. The four lanes of a row share the row maximum; each lane keeps a partial row sum.
    SplitA<T> tP[kRowTiles];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      float base[2];
      bool grew = false;
      float shrink[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float largest = row_max[m][half];
#pragma unroll
        for (int i = 0; i < kKeyTiles * 2; ++i) largest = fmaxf(largest, tS[m][i / 2][half * 2 + i % 2]);
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
        base[half] = largest == -FLASHBWD_INFINITY ? 0.f : largest;
        shrink[half] = exp2_approx(row_max[m][half] - base[half]);
        grew |= largest != row_max[m][half];
        row_max[m][half] = largest;
      }
      if (__any_sync(0xffffffffu, grew)) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          row_sum[m][half] *= shrink[half];
#pragma unroll
          for (int n = 0; n < kD / 8; ++n) {
            tO[m][n][half * 2] *= shrink[half];
            tO[m][n][half * 2 + 1] *= shrink[half];
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kKeyTiles * 4; ++i) {
        float& s = tS[m][i / 4][i % 4];
        s = exp2_approx(s - base[i % 4 / 2]);
        row_sum[m][i % 4 / 2] += s;
      }
      split_a<T>(tP[m], tS[m]);
    }

    // O += P V
#pragma unroll
    for (int pair = 0; pair < kD / 16; ++pair) {
      uint32 tV[4];
      Tile::load_b_rows(tV, stage_v, 0, pair);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        multiply<T>(tO[m][2 * pair], tP[m], tV[0], tV[1]);
        multiply<T>(tO[m][2 * pair + 1], tP[m], tV[2], tV[3]);
      }
    }
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }

  ring.end();
  __syncthreads();  // all warps have finished reading their rings; the merge reuses this shared memory
  SoftmaxMerge<kD, kM, kWarps> merging(shared);
  merging.store_warp(tO, row_max, row_sum);
  merging.template finish<T>(p, b, head_kv, first_row);
  if (p.arrivals != nullptr && arrives_last(p, shared))
    reduce_slots<T, kWarps>(p, shared, b, head_kv, first_row, min(kM, rows - first_row));
}

}  // namespace flashbwd

#endif

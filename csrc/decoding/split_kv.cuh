// Split-KV attention for few rows. A thread block has one key head, one tile of the rows of its query heads (the heads
// of the group one after the other), and a share of the keys. Each warp streams 16 keys at a time through a ring of its
// own in shared memory and keeps a softmax of its own: no barrier between warps until the keys are done.
//
//   warp w:  keys  w, w + 4, w + 8 ...      (units of 16 keys: K and V of one stage)
//            S = Q K^T -> scale, score_mod, mask -> online softmax -> O += P V
//   then:    the four (max, sum, O) meet in shared memory -> out, or one slot of the partial results
//
// Compiled by nvcc for no modification and by NVRTC with a user's; docs/kernels/flex_decoding.md has the measurements.
#pragma once

#include "params.h"
#include "ptx.cuh"

#ifdef __CUDACC__

namespace flashbwd {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
#define FLASHBWD_INFINITY __int_as_float(0x7f800000)

struct NoMod {
  static constexpr bool kHasScoreMod = false;
  static constexpr bool kHasMask = false;
  struct Row {  // what a modification works out once for a row
    Row() = default;
    __device__ Row(const DecodingParams&, int, int, int) {}
  };
  __device__ static float score_mod(const DecodingParams&, const Row&, float score, int, int, int, int) {
    return score;
  }
  __device__ static bool mask_mod(const DecodingParams&, const Row&, int, int, int, int) { return true; }
};

// The chunks, of 16 keys each, that the rows of a tile walk: all keys, or those of their common block lists.
struct ChunkList {
  const int* partial = nullptr;
  const int* full = nullptr;
  int partial_blocks = 0;
  int chunks_per_block = 0;  // 0: all keys
  int kv_block = 0;
  int seqlen_k = 0;
  int total = 0;
};

// A place in a list that moves on by kWarps chunks; the entry of the list is read when a new block begins.
struct Cursor {
  int chunk;
  int first_key;
  int end_key;  // of the block, or of all keys
  bool full = false;
  int entry = 0, inside = 0, block_first = 0;

  __device__ Cursor(const ChunkList& list, int start, int end)
      : chunk(start), first_key(start * kKeys), end_key(list.seqlen_k) {
    if (list.chunks_per_block == 0) return;
    entry = start / list.chunks_per_block;
    inside = start - entry * list.chunks_per_block;
    if (start < end) read(list);
  }

  __device__ void advance(const ChunkList& list, int end) {
    chunk += kWarps;
    first_key += kWarps * kKeys;
    if (list.chunks_per_block == 0) return;
    inside += kWarps;
    if (inside >= list.chunks_per_block) {
      do {
        inside -= list.chunks_per_block;
        ++entry;
      } while (inside >= list.chunks_per_block);
      if (chunk < end) read(list);
    } else {
      first_key = block_first + inside * kKeys;
    }
  }

  __device__ void read(const ChunkList& list) {
    full = entry >= list.partial_blocks;
    block_first = (full ? list.full[entry - list.partial_blocks] : list.partial[entry]) * list.kv_block;
    first_key = block_first + inside * kKeys;
    end_key = min(block_first + list.kv_block, list.seqlen_k);
  }
};

__device__ inline const int* list_of(const BlockList& list, int b, int h, int q, int* count) {
  if (list.counts == nullptr) {
    *count = 0;
    return nullptr;
  }
  *count = list.counts[b * list.count_strides[0] + h * list.count_strides[1] + q * list.count_strides[2]];
  return list.indices + b * list.index_strides[0] + h * list.index_strides[1] + q * list.index_strides[2];
}

template <class Mod>
__device__ ChunkList chunk_list(const DecodingParams& p, int b, int h, int q) {
  ChunkList list;
  list.seqlen_k = p.seqlen_k;
  list.total = (p.seqlen_k + kKeys - 1) / kKeys;
  if (!Mod::kHasMask || p.states != nullptr) return list;
  int full_blocks;
  list.partial = list_of(p.partial, b, h, q / p.q_block, &list.partial_blocks);
  list.full = list_of(p.full, b, h, q / p.q_block, &full_blocks);
  list.kv_block = min(p.kv_block, p.seqlen_k);  // a larger one is block 0, and its products stay in 32 bits
  list.chunks_per_block = (list.kv_block + kKeys - 1) / kKeys;
  list.total = (list.partial_blocks + full_blocks) * list.chunks_per_block;
  return list;
}

// kD: head dimensions padded, 64, 128 or 256. kM: rows of the tile, a multiple of 16.
template <int kD, int kM, bool kBFloat16, class Mod>
__device__ void split_kv(const DecodingParams& p, unsigned char* shared) {
  constexpr int kStages = stages_of(kD);
  constexpr int kRowTiles = kM / 16;
  constexpr int kSteps = kD / 16;        // k-steps of Q K^T; pairs of 8 columns of O
  constexpr int kPieces = kD / 8;        // of 16 bytes in a row
  constexpr int kHalf = kKeys * kD * 2;  // bytes of K, or of V, in a stage
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int split = blockIdx.y;
  const int tile = blockIdx.x % p.row_tiles;
  const int unit = blockIdx.x / p.row_tiles;
  const int b = unit / p.heads_kv;
  const int head_kv = unit % p.heads_kv;
  const int rows = p.group * p.seqlen_q;
  const int first_row = tile * kM;

  // Rows of this lane: for each 16-row tile, lane / 4 and lane / 4 + 8.
  int head[kRowTiles][2], query[kRowTiles][2];
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + m * 16 + half * 8 + lane / 4;
      const int inside = row < rows ? row : first_row;  // rows past the last repeat the first and are not written
      head[m][half] = head_kv * p.group + inside / p.seqlen_q;
      query[m][half] = inside % p.seqlen_q;
    }
  }

  // What the modification works out for the rows: once, or for each chunk where registers would not hold it.
  constexpr bool kKeepModRows = kM * kD <= 2048;
  typename Mod::Row mod_rows[kRowTiles][2];
  const auto work_out_rows = [&] {
#pragma unroll
    for (int i = 0; i < kRowTiles * 2; ++i) mod_rows[i / 2][i % 2] = {p, b, head[i / 2][i % 2], query[i / 2][i % 2]};
  };
  if constexpr (kKeepModRows) work_out_rows();

  const ChunkList list = chunk_list<Mod>(p, b, head_kv * p.group + first_row / p.seqlen_q, first_row % p.seqlen_q);
  const int begin = static_cast<int>(static_cast<long long>(list.total) * split / p.splits);
  const int end = static_cast<int>(static_cast<long long>(list.total) * (split + 1) / p.splits);

  // ---- the ring of this warp ----
  const uint32 ring = shared_address(shared) + warp * kStages * stage_bytes(kD);
  using Half = unsigned short;
  const Half* k_head = static_cast<const Half*>(p.k) + b * p.k_strides[0] + head_kv * p.k_strides[1];
  const Half* v_head = static_cast<const Half*>(p.v) + b * p.v_strides[0] + head_kv * p.v_strides[1];
  // Piece `col` of row `row` lies at row * kPieces + (col ^ row % 8): no two rows of a matrix share banks.
  const auto piece_at = [](int row, int col) { return static_cast<uint32>((row * kPieces + (col ^ (row & 7))) * 16); };
  const auto load = [&](const Cursor& c, int stage) {
    const uint32 to = ring + stage * stage_bytes(kD);
#pragma unroll
    for (int i = 0; i < kKeys * kPieces / 32; ++i) {
      const int row = (i * 32 + lane) / kPieces;
      const int col = (i * 32 + lane) % kPieces;
      const bool inside = c.first_key + row < c.end_key;
      const long long key = inside ? c.first_key + row : 0;
      const bool in_k = inside && col * 8 < p.head_dim;
      const bool in_v = inside && col * 8 < p.head_dim_v;
      copy_async_16(to + piece_at(row, col), k_head + (in_k ? key * p.k_strides[2] + col * 8 : 0), in_k);
      copy_async_16(to + kHalf + piece_at(row, col), v_head + (in_v ? key * p.v_strides[2] + col * 8 : 0), in_v);
    }
  };
  Cursor ahead(list, begin + warp, end);
  Cursor c = ahead;
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (ahead.chunk < end) load(ahead, stage);
    ahead.advance(list, end);
    copy_async_commit();
  }

  launch_dependents();  // the combine kernel, which waits before it reads

  // ---- Q, as the A operand: (kM, kD) ----
  constexpr bool kQInShared = q_in_shared(kM);
  uint32 tQ[kRowTiles][kQInShared ? 1 : kSteps][4];
  const uint32 shared_q = shared_address(shared) + ring_bytes(kD);
  if constexpr (kQInShared) {
    for (int i = threadIdx.x; i < kM * kPieces; i += kWarps * 32) {
      const int local = first_row + i / kPieces < rows ? first_row + i / kPieces : first_row;
      const int col = i % kPieces;
      const long long offset = b * p.q_strides[0] + (head_kv * p.group + local / p.seqlen_q) * p.q_strides[1] +
                               local % p.seqlen_q * p.q_strides[2] + col * 8;
      uint4 piece = make_uint4(0, 0, 0, 0);
      if (col * 8 < p.head_dim) piece = *reinterpret_cast<const uint4*>(static_cast<const Half*>(p.q) + offset);
      *reinterpret_cast<uint4*>(shared + ring_bytes(kD) + piece_at(i / kPieces, col)) = piece;
    }
    __syncthreads();  // every warp reads all of Q
  } else {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const int half = r % 2;
          const int column = step * 16 + r / 2 * 8 + lane % 4 * 2;
          const long long offset =
              b * p.q_strides[0] + head[m][half] * p.q_strides[1] + query[m][half] * p.q_strides[2] + column;
          const bool inside = column < p.head_dim;
          tQ[m][step][r] = inside ? *reinterpret_cast<const uint32*>(static_cast<const Half*>(p.q) + offset) : 0u;
        }
      }
    }
  }

  float tO[kRowTiles][2 * kSteps][4];  // (kM, kD), 8 columns each
  float row_max[kRowTiles][2], row_sum[kRowTiles][2];
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < 2 * kSteps; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) tO[m][n][i] = 0.f;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row_max[m][half] = -FLASHBWD_INFINITY;
      row_sum[m][half] = 0.f;
    }
  }

  int stage = 0;
  for (; c.chunk < end; c.advance(list, end)) {
    copy_async_wait<kStages - 2>();
    __syncwarp();  // the pieces that other lanes copied are there too, and all lanes are done with the stage before
    if (ahead.chunk < end) load(ahead, stage == 0 ? kStages - 1 : stage - 1);
    ahead.advance(list, end);
    copy_async_commit();
    const uint32 stage_k = ring + stage * stage_bytes(kD);
    const uint32 stage_v = stage_k + kHalf;
    stage = stage + 1 == kStages ? 0 : stage + 1;

    // S (kM, 16 keys): two tiles of 8 keys
    float tS[kRowTiles][2][4];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 8; ++i) tS[m][i / 4][i % 4] = 0.f;
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32 tK[4];
      load_matrices(tK, stage_k + piece_at(lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        if constexpr (kQInShared)
          load_matrices(tQ[m][0], shared_q + piece_at(m * 16 + lane % 16, step * 2 + lane / 16));
        const uint32(&q)[4] = tQ[m][kQInShared ? 0 : step];
        mma_16x8x16<kBFloat16>(tS[m][0], q, tK[0], tK[1]);
        mma_16x8x16<kBFloat16>(tS[m][1], q, tK[2], tK[3]);
      }
    }

    // Scores in log2 units, -inf where not visible; `seen` has a bit for each of this lane's keys.
    const bool whole = c.first_key + kKeys <= c.end_key;
    const bool masked = Mod::kHasMask && (p.states != nullptr || !c.full);
    uint32 seen = 0;
    if constexpr (!kKeepModRows) work_out_rows();
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int half = i % 4 / 2;
        const int key = c.first_key + i / 4 * 8 + lane % 4 * 2 + i % 2;
        float& s = tS[m][i / 4][i % 4];
        bool visible = whole || key < c.end_key;
        if constexpr (Mod::kHasScoreMod) {
          s *= p.scale;
          if (visible && first_row + m * 16 + half * 8 < rows)
            s = Mod::score_mod(p, mod_rows[m][half], s, b, head[m][half], query[m][half], key);
          s *= kLog2e;
        } else {
          s *= p.scale * kLog2e;
        }
        if constexpr (Mod::kHasMask) {
          if (masked && visible) {
            int state = 1;
            if (p.states != nullptr) {
              state = p.states[b * p.state_strides[0] + head[m][half] * p.state_strides[1] +
                               query[m][half] / p.q_block * p.state_strides[2] + key / p.kv_block];
            }
            visible = state == 2 ||
                      (state == 1 && Mod::mask_mod(p, mod_rows[m][half], b, head[m][half], query[m][half], key));
          }
          seen |= static_cast<uint32>(visible) << (i / 4 * 2 + i % 2);
        }
        if (!visible) s = -FLASHBWD_INFINITY;
      }
    }
    if (masked) {
      // Values that no row sees may hold anything, and 0 * NaN is NaN: they are cleared.
#pragma unroll
      for (int step = 4; step < 32; step *= 2) seen |= __shfl_xor_sync(0xffffffffu, seen, step);
      if (__any_sync(0xffffffffu, seen != 15u)) {
#pragma unroll
        for (int key = 0; key < kKeys; ++key) {
          const uint32 bits = __shfl_sync(0xffffffffu, seen, key % 8 / 2);
          if (!(bits >> (key / 8 * 2 + key % 2) & 1u)) {
            for (int col = lane; col < kPieces; col += 32) {
              asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};\n" ::"r"(stage_v + piece_at(key, col)), "r"(0)
                           : "memory");
            }
          }
        }
        __syncwarp();
      }
    }

    // Online softmax; the four lanes of a row share its maximum, each has its own part of the sum.
    // P goes into the product as a 16-bit value and a 16-bit rest: the memory is what takes the time, and so the output
    // has one rounding to 16 bits, its last.
    uint32 tP[kRowTiles][4], tRest[kRowTiles][4];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      float base[2];
      bool grew = false;
      float shrink[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float largest = row_max[m][half];
#pragma unroll
        for (int i = 0; i < 4; ++i) largest = fmaxf(largest, tS[m][i / 2][half * 2 + i % 2]);
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
          for (int n = 0; n < 2 * kSteps; ++n) {
            tO[m][n][half * 2] *= shrink[half];
            tO[m][n][half * 2 + 1] *= shrink[half];
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& s = tS[m][i / 4][i % 4];
        s = exp2_approx(s - base[i % 4 / 2]);
        row_sum[m][i % 4 / 2] += s;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float low = tS[m][i / 2][i % 2 * 2], high = tS[m][i / 2][i % 2 * 2 + 1];
        tP[m][i] = pack_16bit<kBFloat16>(low, high);
        tRest[m][i] = pack_16bit<kBFloat16>(low - unpack_16bit<kBFloat16, 0>(tP[m][i]),
                                            high - unpack_16bit<kBFloat16, 1>(tP[m][i]));
      }
    }

    // O += P V
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32 tV[4];
      load_matrices_transposed(tV, stage_v + piece_at(lane % 16, step * 2 + lane / 16));
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        mma_16x8x16<kBFloat16>(tO[m][2 * step], tP[m], tV[0], tV[1]);
        mma_16x8x16<kBFloat16>(tO[m][2 * step + 1], tP[m], tV[2], tV[3]);
        mma_16x8x16<kBFloat16>(tO[m][2 * step], tRest[m], tV[0], tV[1]);
        mma_16x8x16<kBFloat16>(tO[m][2 * step + 1], tRest[m], tV[2], tV[3]);
      }
    }
  }

  // ---- the warps meet ----
  copy_async_wait<0>();
  __syncthreads();  // all warps are done with their rings, which become (kWarps, kM, kD) floats and their statistics
  float* const all_out = reinterpret_cast<float*>(shared);
  float* const all_stats = all_out + kWarps * kM * kD;  // (kWarps, kM, 2): max, sum
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = row_sum[m][half];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const int row = warp * kM + m * 16 + half * 8 + lane / 4;
      if (lane % 4 == 0) {
        all_stats[row * 2] = row_max[m][half];
        all_stats[row * 2 + 1] = sum;
      }
#pragma unroll
      for (int n = 0; n < 2 * kSteps; ++n) {
        *reinterpret_cast<float2*>(all_out + row * kD + n * 8 + lane % 4 * 2) =
            make_float2(tO[m][n][half * 2], tO[m][n][half * 2 + 1]);
      }
    }
  }
  __syncthreads();
  const int pairs = p.head_dim_v / 2;
  for (int row = warp; row < kM && first_row + row < rows; row += kWarps) {
    float largest = -FLASHBWD_INFINITY;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) largest = fmaxf(largest, all_stats[(w * kM + row) * 2]);
    const float base = largest == -FLASHBWD_INFINITY ? 0.f : largest;
    float weight[kWarps];
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      weight[w] = exp2_approx(all_stats[(w * kM + row) * 2] - base);
      sum += weight[w] * all_stats[(w * kM + row) * 2 + 1];
    }
    const int local = first_row + row;
    const long long global_row = static_cast<long long>(unit) * rows + local;
    const long long all_rows = static_cast<long long>(p.batch) * p.heads * p.seqlen_q;
    const bool last = p.splits == 1;
    if (lane == 0) {
      if (last) {
        p.lse[global_row] = sum > 0.f ? largest * kLn2 + logf(sum) : -FLASHBWD_INFINITY;
        p.max_scores[global_row] = largest * kLn2;
      } else {
        *reinterpret_cast<float2*>(p.partial_stats + (split * all_rows + global_row) * 2) = make_float2(largest, sum);
      }
    }
    const float norm = last ? (sum > 0.f ? 1.f / sum : 0.f) : 1.f;
    for (int pair = lane; pair < pairs; pair += 32) {
      float2 total = make_float2(0.f, 0.f);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float2 part = *reinterpret_cast<const float2*>(all_out + (w * kM + row) * kD + pair * 2);
        total.x += weight[w] * part.x;
        total.y += weight[w] * part.y;
      }
      total.x *= norm;
      total.y *= norm;
      if (last) {
        const long long offset = b * p.out_strides[0] + (head_kv * p.group + local / p.seqlen_q) * p.out_strides[1] +
                                 local % p.seqlen_q * p.out_strides[2] + pair * 2;
        *reinterpret_cast<uint32*>(static_cast<Half*>(p.out) + offset) = pack_16bit<kBFloat16>(total.x, total.y);
      } else {
        const long long offset = (split * all_rows + global_row) * p.head_dim_v + pair * 2;
        *reinterpret_cast<float2*>(p.partial_out + offset) = total;
      }
    }
  }
}

}  // namespace flashbwd

#endif

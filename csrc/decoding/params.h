// What the decoding kernels are given. Compiled by nvcc, by g++ and, at run time, by NVRTC: no header may be included.
#pragma once

namespace flashbwd {

// A tensor that a modification captured.
struct CapturedTensor {
  static constexpr int kMaxDims = 5;
  const void* data;
  long long strides[kMaxDims];  // elements
  int sizes[kMaxDims];          // for negative indices
};

// Modifications that every build has kernels for, as numbers; the order of the members is flashbwd/mods/ordinary.py's.
// slot: of a captured tensor of integers, `wide` when of 64 bits.
struct OrdinaryTerm {
  static constexpr int kBatch = 1, kHead = 2;
  int weight;  // 0: no term
  int slot, index, wide;
};

// q * q_idx + constant + terms. It wraps around as PyTorch's integers do: at 32 bits, or at 64 if `wide`.
struct OrdinarySum {
  int wide;
  int q, constant;
  OrdinaryTerm terms[2];
};

// k * kv_idx + sign * sum + q * q_idx + constant >= 0. Only `sum` wraps around.
struct OrdinaryBound {
  int k, sign, q, constant;
  OrdinarySum sum;
};

// score = softcap * tanh(score / softcap), with softcap > 0; score += slope_of(h) * (bias_k * kv_idx + origin), where
// the sum wraps around at 32 bits; the bounds.
struct OrdinaryMod {
  enum Kind { kNone, kScore, kMask, kBoth };
  int kind;
  int slope_slot;  // of a captured tensor of floats, one a head, that is a factor of the slope; -1 for none
  int bias_k;      // 1 or -1
  OrdinarySum origin;
  int bound_count;
  OrdinaryBound bounds[4];
  float softcap;
  float slope, exp2_rate, exp2_start;  // slope_of(h) = slope * captured[h] * exp2(exp2_rate * h + exp2_start)
};

// A list of key blocks for each block of queries: counts (B or 1, H or 1, nq), indices (B or 1, H or 1, nq, columns).
struct BlockList {
  const int* counts;
  const int* indices;
  long long count_strides[3];  // batch, head, query block; 0 where broadcast
  long long index_strides[3];  // the column's stride is 1
  int columns;
};

struct DecodingParams {
  static constexpr int kMaxCaptured = 16;
  const void* q;  // (B, H, Sq, D)
  const void* k;  // (B, Hkv, Sk, D)
  const void* v;  // (B, Hkv, Sk, Dv)
  void* out;      // (B, H, Sq, Dv)
  float* lse;     // (B, H, Sq), contiguous, as is max_scores; null where not needed
  float* max_scores;
  float* exact_out;  // (B, H, Sq, Dv), contiguous: out before its last rounding, which gradients need; null: not needed
  // Of each slot: sums of exp2(s - max) * v, (slots, B * H * Sq, Dv rounded up to 2), and (max, sum) pairs,
  // (slots, B * H * Sq, 2), both in log2 units. Not used with one slot.
  float* partial_out;
  float* partial_stats;
  int* arrivals;  // of each row tile, blocks that have written their slot, 0 between calls; null: a kernel adds up
  long long q_strides[3];  // batch, head, row, in elements; the last dimension is contiguous
  long long k_strides[3];  // batch stride 0 where one batch serves all
  long long v_strides[3];
  long long out_strides[3];
  int batch, heads, heads_kv, group;  // group = heads / heads_kv
  int seqlen_q, seqlen_k, head_dim, head_dim_v;
  int splits;
  int cluster;    // splits that add up their results in one cluster of thread blocks; slots = splits / cluster
  int row_tiles;  // tiles that hold the group * seqlen_q rows of a key head
  float scale;
  // The mask. `states` null: every row of a tile has the lists of its first row, and they are walked. Else
  // (B or 1, H or 1, nq, nk) bytes: 0 no block, 1 partial, 2 full; all blocks are walked.
  BlockList partial, full;  // counts null: none
  const unsigned char* states;
  long long state_strides[3];
  int q_block, kv_block;
  CapturedTensor captured[kMaxCaptured];
  OrdinaryMod ordinary;
};

// Keys of a stage: the length of one product of the tensor cores, 16, or 8 for float32.
constexpr int keys_of(int element_bytes) { return 32 / element_bytes; }

// Stages of a warp's ring. 4 warps take 96 KiB, so that two thread blocks share a multiprocessor of 228 KiB; 128 KiB at
// 256.
constexpr int stages_of(int head_dim) { return head_dim <= 64 ? 6 : head_dim <= 128 ? 3 : 2; }
constexpr int stage_bytes(int head_dim) { return 2 * 32 * head_dim; }  // K and V
// The stages, and of each the place of its keys, 12 bytes.
constexpr int ring_bytes(int head_dim, int warps) {
  const int stages = warps * stages_of(head_dim);
  return stages * stage_bytes(head_dim) + (stages * 12 + 127) / 128 * 128;
}

// Q lies in shared memory where registers would not hold it beside the output.
constexpr bool q_in_shared(int head_dim, int rows, int element_bytes) {
  return rows > 16 || head_dim > 128 || element_bytes == 4;
}

// What a modification works out for a row lies there too, at most 16 bytes, where registers would not hold it.
constexpr int kModRowBytes = 16;
constexpr bool mod_rows_in_shared(int head_dim, int rows) { return rows * head_dim > 2048; }

// The ring, Q and the modification's rows, or the meeting of the warps where that needs more.
constexpr int shared_bytes(int head_dim, int rows, int warps, int element_bytes) {
  const int q_bytes = q_in_shared(head_dim, rows, element_bytes) ? rows * head_dim * element_bytes : 0;
  const int mod_bytes = mod_rows_in_shared(head_dim, rows) ? rows * kModRowBytes : 0;
  const int streaming = ring_bytes(head_dim, warps) + q_bytes + mod_bytes;
  const int meeting = warps * rows * (head_dim + 2) * 4 + rows * 16;
  return streaming > meeting ? streaming : meeting;
}

}  // namespace flashbwd

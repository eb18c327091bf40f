// Parameters of the decoding kernels. nvcc, g++ and, at run time, NVRTC compile this file, so it includes
// only headers of csrc/.
#pragma once

#include "../mods/captured_tensor.h"

namespace flashbwd {

// Built-in modifications (those that every build has kernels for), encoded as numbers. flashbwd/mods/built_in.py fills
// these structs in the order of their members.

// The term weight * captured[slot].
struct BuiltInTerm {
  static constexpr int kBatch = 1, kHead = 2;
  int weight;  // 0: no term
  int slot;
  int index;  // kBatch or kHead: the index of the tensor; 0: the tensor is a scalar
  int wide;   // true if the tensor is int64, false if it is int32
};

// q * q_idx + constant + terms. Wraps around like PyTorch's integers: at 32 bits, or at 64 bits if `wide`.
struct BuiltInSum {
  int wide;
  int q, constant;
  BuiltInTerm terms[2];
};

// The condition k * kv_idx + sign * sum + q * q_idx + constant >= 0. Only `sum` wraps around.
struct BuiltInBound {
  int k, sign, q, constant;
  BuiltInSum sum;
};

// First score = softcap * tanh(score / softcap), if softcap > 0. Then score += slope_of(h) * (bias_k * kv_idx +
// origin), where the sum wraps around at 32 bits. Then a key that violates one of the bounds is masked out.
struct BuiltInMod {
  enum Kind { kNone, kScore, kMask, kBoth };
  int kind;
  int slope_slot;  // slot of a captured float tensor (H,) that is a factor of the slope; -1: none
  int bias_k;      // 1 or -1
  BuiltInSum origin;
  int bound_count;
  BuiltInBound bounds[4];
  float softcap;
  float slope, exp2_rate, exp2_start;  // slope_of(h) = slope * captured[h] * exp2(exp2_rate * h + exp2_start)
};

// The key blocks of each query block, as in PyTorch's BlockMask: counts (B or 1, H or 1, nq) and indices (B or 1, H or
// 1, nq, columns).
struct BlockList {
  const int* counts;
  const int* indices;
  long long count_strides[3];  // batch, head, query block; 0 where broadcast
  long long index_strides[3];  // batch, head, query block; the last dimension has stride 1
  int columns;
};

struct DecodingParams {
  const void* q;      // (B, H, Sq, D)
  const void* k;      // (B, Hkv, Sk, D)
  const void* v;      // (B, Hkv, Sk, Dv)
  void* out;          // (B, H, Sq, Dv)
  float* lse;         // (B, H, Sq), contiguous, natural log; null: not needed
  float* max_scores;  // (B, H, Sq), contiguous, natural units; null: not needed
  float* exact_out;   // (B, H, Sq, Dv), contiguous: the unrounded output, for the backward; null: not needed
  // Partial results, with s and max in log2 units. slots = splits / cluster; a cluster holds all splits, and
  // then there is one slot, and partial_out and partial_stats are unused.
  float* partial_out;    // (slots, B * H * Sq, Dv rounded up to 2): sums of exp2(s - max) * v
  float* partial_stats;  // (slots, B * H * Sq, 2): (max, sum)
  int* arrivals;  // (B * Hkv * row_tiles,): CTAs that have written their slot, 0 between calls; null: combine kernel
  long long q_strides[3];  // batch, head, row, in elements; the last dimension is contiguous
  long long k_strides[3];  // batch stride 0 if all batches share K and V
  long long v_strides[3];
  long long out_strides[3];
  int batch, heads, heads_kv, group;  // group = heads / heads_kv
  int seqlen_q, seqlen_k, head_dim, head_dim_v;
  int splits;
  int cluster;    // cluster size; the splits of a cluster merge their results over DSMEM into one slot
  int row_tiles;  // tiles for the group * seqlen_q rows of a KV head
  float scale;
  // The block mask. If `states` is null, the rows of a tile share the block lists of its first row, and the kernel
  // visits only the listed blocks. Else the kernel visits all blocks, and `states`, (B or 1, H or 1, nq, nk), says
  // which of them are empty (0), partial (1) or full (2).
  BlockList partial, full;  // counts null: no such list
  const unsigned char* states;
  long long state_strides[3];
  int q_block, kv_block;
  CapturedTensor captured[kMaxCaptured];
  BuiltInMod built_in;
};

// Keys per key tile, which is one ring stage: the inner dimension of one MMA, 16, or 8 for float32.
constexpr int keys_of(int element_bytes) { return 32 / element_bytes; }

// Stages of a warp's ring. Up to head dimension 128, the rings of 4 warps take 96 KiB, so that two CTAs fit into the
// 228 KiB of an SM. At 256, they take 128 KiB.
constexpr int stages_of(int head_dim) { return head_dim <= 64 ? 6 : head_dim <= 128 ? 3 : 2; }
constexpr int stage_bytes(int head_dim) { return 2 * 32 * head_dim; }  // K and V
// The stages, plus 12 bytes per stage for its KeyTile.
constexpr int ring_bytes(int head_dim, int warps) {
  const int stages = warps * stages_of(head_dim);
  return stages * stage_bytes(head_dim) + (stages * 12 + 127) / 128 * 128;
}

// True if Q is kept in shared memory, because Q and the output accumulators together need too many registers.
constexpr bool q_in_shared(int head_dim, int rows, int element_bytes) {
  return rows > 16 || head_dim > 128 || element_bytes == 4;
}

// True if the per-row states of a modification (Mod::Row, at most kModRowBytes each) are kept in shared memory.
constexpr int kModRowBytes = 16;
constexpr bool mod_rows_in_shared(int head_dim, int rows) { return rows * head_dim > 2048; }

// Dynamic shared memory: the rings, Q and the per-row states during the key loop; the merge of the warps reuses it.
constexpr int shared_bytes(int head_dim, int rows, int warps, int element_bytes) {
  const int q_bytes = q_in_shared(head_dim, rows, element_bytes) ? rows * head_dim * element_bytes : 0;
  const int mod_bytes = mod_rows_in_shared(head_dim, rows) ? rows * kModRowBytes : 0;
  const int streaming = ring_bytes(head_dim, warps) + q_bytes + mod_bytes;
  const int merging = warps * rows * (head_dim + 2) * 4 + rows * 16;
  return streaming > merging ? streaming : merging;
}

}  // namespace flashbwd

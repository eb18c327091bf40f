// Parameters of the decoding backward kernel. NVRTC compiles this file too, so it must include no header except
// params.h.
#pragma once

#include "params.h"

namespace flashbwd {

// `out` is the unrounded float32 output of the forward (exact_out), and `lse` is that of the forward. The block lists
// and the partial results of the base struct are unused.
struct DecodingBackwardParams : DecodingParams {
  const void* dout;   // (B, H, Sq, Dv)
  const float* dlse;  // (B, H, Sq), contiguous; null: none
  void* dq;           // (B, H, Sq, D)
  void* dk;           // (B or 1, Hkv, Sk, D)
  void* dv;           // (B or 1, Hkv, Sk, Dv)
  float* dq_slots;    // (splits, B * H * Sq, D rounded up to 2)
  long long dout_strides[3];
  long long dq_strides[3];
  long long dk_strides[3];
  long long dv_strides[3];
  int batch_kv;  // 1 if all batches share K and V, else batch
  // Gradients of the captured tensors: contiguous, float32 (float64 for a float64 tensor); null: not needed.
  void* gradients[kMaxCaptured];
};

constexpr int kBackwardRows = 16;
constexpr int kBackwardWarps = 4;

// Keys per tile. A warp accumulates dK and dV of 16 keys and 128 columns in registers. For float32 it has 64 columns,
// since the MMAs of split operands need more registers.
constexpr int backward_keys(int head_dim, int element_bytes) {
  const int columns = element_bytes == 4 ? 64 : 128;
  return head_dim <= columns ? 64 : 64 * columns / head_dim;
}

// Dynamic shared memory: K and V of two tiles, Q, dO, dS, lse, delta, one `Row` per row, and seen_key.
constexpr int backward_shared_bytes(int head_dim, int element_bytes) {
  const int keys = backward_keys(head_dim, element_bytes);
  return 2 * (2 * keys + kBackwardRows) * head_dim * element_bytes + kBackwardRows * (keys + 4) * 4 +
         kBackwardRows * (2 + 4) * 4 + keys * 4;
}

}  // namespace flashbwd

// What the backward kernel of flex decoding is given beyond the forward's. No header but params.h may be included.
#pragma once

#include "params.h"

namespace flashbwd {

// out is the forward's exact one, float32, lse the forward's; lists and partial results are not used.
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
  int batch_kv;                   // 1 where all batches share the keys, else batch
  void* gradients[kMaxCaptured];  // of captured tensors, contiguous, float32 (float64 for float64); null: none
};

constexpr int kBackwardRows = 16;
constexpr int kBackwardWarps = 4;

// Keys of a tile: a warp keeps 16 of them, and 128 columns of dK and dV, in registers; 64 of float32, whose products
// need more.
constexpr int backward_keys(int head_dim, int element_bytes) {
  const int columns = element_bytes == 4 ? 64 : 128;
  return head_dim <= columns ? 64 : 64 * columns / head_dim;
}

// K and V of two tiles, Q, dO, dS, lse, delta, the rows' places, and which keys are seen.
constexpr int backward_shared_bytes(int head_dim, int element_bytes) {
  const int keys = backward_keys(head_dim, element_bytes);
  return 2 * (2 * keys + kBackwardRows) * head_dim * element_bytes + kBackwardRows * (keys + 4) * 4 +
         kBackwardRows * (2 + 4) * 4 + keys * 4;
}

}  // namespace flashbwd

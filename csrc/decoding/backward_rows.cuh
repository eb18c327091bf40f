// The query rows of the backward kernel, and its policy for calls without a modification.
#pragma once

#include "backward_params.h"

#ifdef __CUDACC__

namespace flashbwd {

struct NoModGradient {
  static constexpr bool kHasScoreMod = false;
  static constexpr bool kHasMask = false;
  struct Row {};
  __device__ static float score_mod(const DecodingBackwardParams&, Row, float score, int, int, int, int) {
    return score;
  }
  __device__ static bool mask_mod(const DecodingBackwardParams&, Row, int, int, int, int) { return true; }
  __device__ static float score_gradient(const DecodingBackwardParams&, float, int, int, int, int, float ds, bool) {
    return ds;
  }
};

// Row number `row` of those that share a KV head, ordered by (batch, head of the group, query).
struct Row {
  int b, head, query, inside;

  __device__ Row(const DecodingBackwardParams& p, int b_kv, int head_kv, int row) {
    const int rows = p.group * p.seqlen_q;
    inside = row < rows * (p.batch / p.batch_kv);
    const int local = inside ? row % rows : 0;
    b = p.batch_kv == 1 && inside ? row / rows : b_kv;
    head = head_kv * p.group + local / p.seqlen_q;
    query = local % p.seqlen_q;
  }
  __device__ long long index(const DecodingBackwardParams& p) const {
    return (static_cast<long long>(b) * p.heads + head) * p.seqlen_q + query;
  }
  __device__ long long offset(const long long (&strides)[3]) const {
    return b * strides[0] + head * strides[1] + query * strides[2];
  }
  // State of the mask block that contains (this row, key): 0 empty, 1 partial, 2 full.
  __device__ int state(const DecodingBackwardParams& p, int key) const {
    return p.states[b * p.state_strides[0] + head * p.state_strides[1] + query / p.q_block * p.state_strides[2] +
                    key / p.kv_block];
  }
};

}  // namespace flashbwd

#endif  // __CUDACC__

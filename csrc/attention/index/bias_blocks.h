// The layout of the sums of a shared bias's gradient while kernels add to them: fp32 blocks of 8 queries and 16 keys,
// each in the order of a warp's transposed accumulators. A lane then adds 16 bytes and a warp 512 adjacent bytes, and
// the blocks of one warp's keys are adjacent along the queries.
#pragma once

#include <cstdint>

#include "arithmetic.h"

namespace flashbwd {

constexpr int32_t kBiasBlockQueries = 8, kBiasBlockKeys = 16;
constexpr int32_t kBiasBlockElements = kBiasBlockQueries * kBiasBlockKeys;

// Elements of one group of 16 keys, over all queries.
FLASHBWD_HOST_DEVICE constexpr int64_t bias_key_group_elements(int64_t seqlen_q) {
  return ceil_div(seqlen_q, int64_t{kBiasBlockQueries}) * kBiasBlockElements;
}

// Elements of a (seqlen_q, seqlen_k) plane.
FLASHBWD_HOST_DEVICE constexpr int64_t bias_plane_elements(int64_t seqlen_q, int64_t seqlen_k) {
  return ceil_div(seqlen_k, int64_t{kBiasBlockKeys}) * bias_key_group_elements(seqlen_q);
}

// Where (query, key) of a block lies in it. A lane has queries 2 t and 2 t + 1 of keys g and g + 8.
FLASHBWD_HOST_DEVICE constexpr int32_t element_of_bias_block(int32_t query, int32_t key) {
  const int32_t lane = key % 8 * 4 + query / 2, value = key / 8 * 2 + query % 2;
  return lane * 4 + value;
}

// The work tiles that add to the same tile of a shared bias's gradient, in deterministic mode in the order of these
// numbers: work tiles are handed out in this order for each key block.
struct BiasSharers {
  bool batches, heads;  // what shares the bias: batch entries, heads, or both
  int32_t num_heads;

  // `batch`: of the call, or of groups of entries that share a work tile.
  FLASHBWD_HOST_DEVICE constexpr int32_t adds_before(int32_t batch, int32_t head) const {
    return (batches ? batch * (heads ? num_heads : 1) : 0) + (heads ? head : 0);
  }
  FLASHBWD_HOST_DEVICE constexpr int32_t plane(int32_t batch, int32_t head) const {
    return (batches ? 0 : batch * (heads ? 1 : num_heads)) + (heads ? 0 : head);
  }
};

}  // namespace flashbwd

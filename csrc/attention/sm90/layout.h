// What the plan computes for the launcher: sizes and offsets in the workspace. No CUDA here.
#pragma once

#include <cstdint>

#include "../index/tile_order.h"
#include "../pre_post/bias_gradient.h"
#include "config.h"
#include "schedule.h"

namespace flashbwd::sm90 {

struct CallSizes {
  DType dtype = DType::kBFloat16;
  bool packed = false;
  int64_t batch = 0, heads = 0, heads_kv = 0;
  int64_t seqlen_q = 0, seqlen_k = 0;  // the longest when packed
  int64_t total_k = 0;
  bool deterministic = false;
  bool may_skip_queries = false;  // a block mask may list no key block for a query block
  bool bias_gradient = false;
  BiasBroadcast bias_broadcast;
};

// Packed: after a sequence's last tile come rows of another head, whose sums a store would overwrite. If a block mask
// skips a tile, no key block adds to it.
inline bool adds_into_zeros(const CallSizes& sizes) { return sizes.packed || sizes.may_skip_queries; }

inline bool has_semaphores(const CallSizes& sizes) { return sizes.deterministic || !adds_into_zeros(sizes); }

// The zeroed region of the workspace: the counter of work tiles; the count of finished dq adds of each KV head; a
// semaphore for each part of a dq tile; a bias gradient that is added into. Offsets are bytes from its start.
struct ZeroedRegion {
  int64_t semaphore_offset = 0;
  int64_t bias_gradient_offset = 0;
  int64_t bytes = 0;
};

// Floats after the row statistics for the flags of RowsReady: one byte per 128 rows or more, in whole words per head.
// The preprocess clears the flags that it sets, so they are not zeroed with the rest.
inline int64_t rows_ready_words(const CallSizes& sizes) {
  if (sizes.packed) return 0;
  return sizes.batch * sizes.heads * ceil_div(ceil_div(sizes.seqlen_q, 128), 4);
}

inline BiasGradientScratch bias_gradient_of(const CallSizes& sizes, const Tile& tile) {
  if (!sizes.bias_gradient) return {};
  if (copies_bias(tile.feature)) {
    return tiled_bias_gradient_scratch(sizes.bias_broadcast, sizes.batch, sizes.heads, sizes.seqlen_q, sizes.seqlen_k,
                                       tile.block_m, tile.block_n);
  }
  const int64_t key_groups = ceil_div(sizes.seqlen_k, tile.block_n) * (tile.block_n / 16);  // 16 keys per warp
  return bias_gradient_scratch(sizes.bias_broadcast, sizes.deterministic, sizes.batch, sizes.heads, sizes.seqlen_q,
                               sizes.seqlen_k, 1, key_groups);
}

// Bytes of it in the region of partial sums, before those of dk and dv.
inline int64_t bias_scratch_bytes(const CallSizes& sizes, const Tile& tile) {
  const BiasGradientScratch scratch = bias_gradient_of(sizes, tile);
  return scratch.zeroed ? 0 : round_up(scratch.bytes(sizes.dtype), int64_t{256});
}

inline ZeroedRegion zeroed_region(const CallSizes& sizes, const Tile& tile) {
  ZeroedRegion region;
  constexpr int64_t kWordBytes = sizeof(int32_t);
  region.bytes = region.semaphore_offset = round_up(1 + sizes.batch * sizes.heads_kv, 4) * kWordBytes;
  if (has_semaphores(sizes)) {
    region.bytes +=
        sizes.batch * sizes.heads * ceil_div(sizes.seqlen_q, tile.block_m) * semaphores_of_tile(tile) * kWordBytes;
  }
  const BiasGradientScratch scratch = bias_gradient_of(sizes, tile);
  if (scratch.zeroed) {
    region.bias_gradient_offset = round_up(region.bytes, 16);
    region.bytes = region.bias_gradient_offset + scratch.elements * static_cast<int64_t>(sizeof(float));
  }
  return region;
}

// What the plan of a call carries to the launcher.
struct KernelPlan {
  Schedule schedule;
  ZeroedRegion zeroed;
  bool has_semaphores = false;
  BiasGradientScratch bias_gradient;
  int64_t partial_sums_offset = 0;  // bytes: partial dk and dv, after the scratch of the bias gradient
};

}  // namespace flashbwd::sm90

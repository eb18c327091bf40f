// What the plan computes for the launcher: sizes and offsets in the workspace. No CUDA here.
#pragma once

#include <cstdint>

#include "../index/tile_order.h"
#include "../pre_post/bias_gradient.h"
#include "../problem.h"
#include "config.h"
#include "schedule.h"

namespace flashbwd::sm90 {

// Packed: after a sequence's last tile come rows of another head, whose sums a store would overwrite. If a block mask
// skips a tile, no key block adds to it.
inline bool adds_into_zeros(const AttentionProblem& p) {
  return p.varlen || (p.has_block_mask && !p.block_mask_covers);
}

inline bool has_semaphores(const AttentionProblem& p) { return p.deterministic || !adds_into_zeros(p); }

// The zeroed region of the workspace: the counter of work tiles; the count of finished dq adds of each KV head; the
// semaphores of each dq tile; a bias gradient that is added into. Offsets are bytes from its start.
struct ZeroedRegion {
  int64_t semaphore_offset = 0;
  int64_t bias_gradient_offset = 0;
  int64_t bytes = 0;
};

inline BiasGradientScratch bias_gradient_of(const AttentionProblem& p, const Tile& tile) {
  if (!p.need_dbias) return {};
  const BiasBroadcast broadcast = {p.bias_broadcast_batch, p.bias_broadcast_head, p.bias_broadcast_row,
                                   p.bias_broadcast_col};
  if (copies_bias(tile)) {
    return tiled_bias_gradient_scratch(broadcast, p.batch, p.heads, p.seqlen_q, p.seqlen_k, tile.block_m, tile.block_n);
  }
  const int64_t key_groups = ceil_div(p.seqlen_k, tile.block_n) * (tile.block_n / 16);  // 16 keys per warp
  return bias_gradient_scratch(broadcast, p.deterministic, p.batch, p.heads, p.seqlen_q, p.seqlen_k, 1, key_groups);
}

// Bytes of it in the region of partial sums, before those of dk and dv.
inline int64_t bias_scratch_bytes(const AttentionProblem& p, const Tile& tile) {
  const BiasGradientScratch scratch = bias_gradient_of(p, tile);
  return scratch.zeroed ? 0 : round_up(scratch.bytes(p.dtype), int64_t{256});
}

inline ZeroedRegion zeroed_region(const AttentionProblem& p, const Tile& tile) {
  ZeroedRegion region;
  constexpr int64_t kWordBytes = sizeof(int32_t);
  region.bytes = region.semaphore_offset = round_up(1 + p.batch * p.heads_kv, 4) * kWordBytes;
  if (has_semaphores(p)) {
    region.bytes += p.batch * p.heads * ceil_div(p.seqlen_q, tile.block_m) * semaphores_of_tile(tile) * kWordBytes;
  }
  const BiasGradientScratch scratch = bias_gradient_of(p, tile);
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

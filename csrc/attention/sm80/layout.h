// Sizes that the plan and the launcher must agree on. No CUDA here.
#pragma once

#include <cstdint>

#include "../bias_gradient.h"
#include "../schedule.h"
#include "config.h"

namespace flashbwd::sm80 {

// What both an AttentionProblem and AttentionBackwardParams say about a call.
struct CallSizes {
  bool packed_q = false, packed_k = false;
  int64_t batch = 0, heads = 0, heads_kv = 0;
  int64_t seqlen_q = 0, seqlen_k = 0;  // the longest when packed
  int64_t total_q = 0, total_k = 0;
  bool deterministic = false;
  bool bias_gradient = false;
  BiasBroadcast bias_broadcast;
};

// The zeroed region of the workspace: int32 jobs_taken, int32 turns[heads][turns_of_head], fp32 bias gradient. Offsets
// are bytes from its start.
struct ZeroedRegion {
  int64_t turns_of_head = 0;  // 0: not deterministic, no turns
  int64_t turns_offset = 0;
  int64_t bias_gradient_offset = 0;
  int64_t bytes = 0;
};

inline BiasGradientScratch bias_gradient_of(const CallSizes& sizes, const Tile& tile) {
  if (!sizes.bias_gradient) return {};
  const int64_t key_groups = ceil_div(sizes.seqlen_k, tile.block_n) * tile.warps_n;
  return bias_gradient_scratch(sizes.bias_broadcast, sizes.deterministic, sizes.batch, sizes.heads, sizes.seqlen_q,
                               sizes.seqlen_k, tile.warps_s, key_groups);
}

inline ZeroedRegion zeroed_region(const CallSizes& sizes, const Tile& tile) {
  ZeroedRegion region;
  if (sizes.deterministic) {
    region.turns_of_head = sizes.packed_q ? first_block(sizes.total_q, sizes.batch, tile.block_m)
                                          : sizes.batch * ceil_div(sizes.seqlen_q, tile.block_m);
    region.turns_offset = 16;
    region.bytes = round_up(region.turns_offset + sizes.heads * region.turns_of_head * 4, 16);
  }
  const BiasGradientScratch scratch = bias_gradient_of(sizes, tile);
  if (scratch.zeroed) {
    region.bias_gradient_offset = region.bytes;
    region.bytes += scratch.elements * 4;
  }
  return region;
}

// Whether jobs follow cu_seqlens_k. A bias gradient is as wide as the longest sequence, so that every sequence needs
// CTAs for all of it.
inline bool packed_jobs(const CallSizes& sizes) { return sizes.packed_k && !sizes.bias_gradient; }

inline int64_t job_count(const CallSizes& sizes, const Tile& tile) {
  if (packed_jobs(sizes)) return varlen_jobs(sizes.total_k, sizes.batch, sizes.heads_kv, tile.block_n);
  return sizes.batch * sizes.heads_kv * ceil_div(sizes.seqlen_k, tile.block_n);
}

}  // namespace flashbwd::sm80

// What the plan computes for the launcher: the schedule, and sizes and offsets in the workspace. No CUDA here.
#pragma once

#include <cstdint>

#include "../index/arithmetic.h"
#include "../index/tile_order.h"
#include "../pre_post/bias_gradient.h"
#include "../problem.h"
#include "config.h"
#include "schedule.h"

namespace flashbwd::sm80 {

// The region of the workspace that is zeroed: the int32 counter of work tiles; int32 dq semaphores
// [heads][semaphores_per_head] or stored bits [batch][heads][stored_words]; the fp32 bias gradient or the semaphores of
// its tiles. Offsets are in bytes from its start.
struct ZeroedRegion {
  int64_t semaphores_per_head = 0;  // 0: dq is not added in order
  int64_t dq_semaphores_offset = 0;
  int64_t stored_words = 0;  // see KernelParams
  int64_t stored_offset = 0;
  int64_t bias_gradient_offset = 0;
  int64_t bias_semaphores_offset = 0;
  int64_t bytes = 0;
};

// The partial region of the workspace: fp32 bias gradient that needs no zeros; dk and dv of large head dimensions; dq
// of whole heads; dk and dv of split work tiles, (CTAs of split tiles, block_n, row stride) each; ordered sums of a
// shared bias gradient, (tiles, block_m * block_n). Offsets are in bytes from its start.
struct PartialRegion {
  int64_t gradients_offset = 0;
  int64_t dq_tiles_offset = 0;
  int64_t partial_dk_offset = 0, partial_dv_offset = 0;
  int64_t bias_sums_offset = 0;
  int64_t bytes = 0;
};

struct KernelPlan {
  Schedule schedule;
  BiasGradientScratch bias_gradient;
  // Replaces bias_gradient if the schedule orders the bias gradient but its rows have no 16-byte alignment. It then
  // occupies the ordered sums.
  BiasGradientScratch unordered_bias_gradient;
  int32_t bias_sharers = 1;  // number of (batch, head) that share a bias
  ZeroedRegion zeroed;
  PartialRegion partial;
};

// No key mask, ALiBi, softcap or dropout.
inline bool has_only_bias(const AttentionProblem& p) {
  return !p.has_key_mask && !p.has_alibi && p.softcap <= 0.0 && p.dropout_p <= 0.0;
}

// The number of (batch, head) that share a bias.
inline int64_t bias_sharers(const AttentionProblem& p) {
  return (p.bias_broadcast_batch ? p.batch : 1) * (p.bias_broadcast_head ? p.heads : 1);
}

// Tiles of the bias gradient: one per (batch, head) with its own bias, key block and query block.
inline int64_t bias_tiles(const AttentionProblem& p, const Tile& tile) {
  return p.batch * p.heads / bias_sharers(p) * ceil_div(p.seqlen_k, tile.block_n) * ceil_div(p.seqlen_q, tile.block_m);
}

inline BiasGradientScratch bias_gradient_of(const AttentionProblem& p, const Tile& tile, bool ordered) {
  if (!p.need_dbias) return {};
  if (ordered) return {BiasGradientMode::kStore};  // the last head stores it
  const BiasBroadcast broadcast = {p.bias_broadcast_batch, p.bias_broadcast_head, p.bias_broadcast_row,
                                   p.bias_broadcast_col};
  const int64_t key_groups = ceil_div(p.seqlen_k, tile.block_n) * tile.warps_n;
  return bias_gradient_scratch(broadcast, p.deterministic, p.batch, p.heads, p.seqlen_q, p.seqlen_k, tile.warps_s,
                               key_groups);
}

inline ZeroedRegion zeroed_region(const AttentionProblem& p, const Tile& tile, const Schedule& schedule,
                                  const BiasGradientScratch& bias_gradient) {
  ZeroedRegion region;
  region.bytes = 16;
  if (schedule.ordered_dq) {
    region.semaphores_per_head =
        p.varlen ? first_block(p.total_q, p.batch, tile.block_m) : p.batch * ceil_div(p.seqlen_q, tile.block_m);
    region.dq_semaphores_offset = region.bytes;
    region.bytes = round_up(region.dq_semaphores_offset + p.heads * region.semaphores_per_head * 4, 16);
  }
  if (schedule.first_stores) {
    region.stored_words = ceil_div(ceil_div(p.seqlen_q, tile.block_m), 32);
    region.stored_offset = region.bytes;
    region.bytes = round_up(region.bytes + p.batch * p.heads * region.stored_words * 4, 16);
  }
  if (bias_gradient.zeroed) {
    region.bias_gradient_offset = region.bytes;
    region.bytes += bias_gradient.elements * 4;
  }
  if (schedule.ordered_bias_gradient) {
    region.bias_semaphores_offset = region.bytes;
    region.bytes = round_up(region.bytes + bias_tiles(p, tile) * 4, 16);
  }
  return region;
}

// Large head dimensions: fp32 elements of dk and dv for one CTA's keys, in the order of its threads' registers.
inline int64_t gradient_floats(const AttentionProblem& p, const Tile& tile) {
  const int64_t columns = tile.gradient_columns();
  return tile.large ? tile.block_n * (round_up(p.head_dim, columns) + round_up(p.head_dim_v, columns)) : 0;
}

// fp32 elements of dq that one CTA accumulates with whole heads.
inline int64_t dq_tiles_floats(const AttentionProblem& p, const Tile& tile) {
  return p.heads / p.heads_kv * round_up(p.seqlen_q, tile.block_m) * tile.head_dim;
}

// Floats from row to row of dk or dv in the partial sums of a split work tile.
inline int64_t partial_row_stride(int64_t columns) { return round_up(columns, 4); }

inline PartialRegion partial_region(const AttentionProblem& p, const Tile& tile, const Schedule& schedule,
                                    const BiasGradientScratch& bias_gradient) {
  PartialRegion region;
  if (!bias_gradient.zeroed) region.bytes = bias_gradient.elements * 4;
  const auto take = [&region](int64_t floats) {
    const int64_t offset = round_up(region.bytes, 256);
    if (floats > 0) region.bytes = offset + floats * 4;
    return offset;
  };
  region.gradients_offset = take(schedule.num_ctas * gradient_floats(p, tile));
  region.dq_tiles_offset = take(schedule.whole_heads ? schedule.num_ctas * dq_tiles_floats(p, tile) : 0);
  const int64_t partial_rows = schedule.split_tiles.ctas() * tile.block_n;
  region.partial_dk_offset = take(partial_rows * partial_row_stride(p.head_dim));
  region.partial_dv_offset = take(partial_rows * partial_row_stride(p.head_dim_v));
  region.bias_sums_offset =
      take(schedule.ordered_bias_gradient ? bias_tiles(p, tile) * tile.block_m * tile.block_n : 0);
  return region;
}

}  // namespace flashbwd::sm80

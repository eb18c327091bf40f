// Sizes that the plan and the launcher must agree on. No CUDA here.
#pragma once

#include <cstdint>

#include "../bias_gradient.h"
#include "../schedule.h"
#include "config.h"

namespace flashbwd::sm80 {

// The last jobs of a call, each the work of `splits` CTAs.
struct SharedJobs {
  int64_t count = 0;
  int32_t splits = 1;
  int64_t parts() const { return count * splits; }
};

// What both an AttentionProblem and AttentionBackwardParams say about a call.
struct CallSizes {
  bool packed_q = false, packed_k = false;
  int64_t batch = 0, heads = 0, heads_kv = 0;
  int64_t seqlen_q = 0, seqlen_k = 0;  // the longest when packed
  int64_t total_q = 0, total_k = 0;
  int64_t head_dim = 0, head_dim_v = 0;
  int64_t window_left = -1, window_right = -1;
  CausalAlignment causal = CausalAlignment::kNone;
  bool deterministic = false;
  bool seqused = false;  // these two for whole_heads and first_stores, which the plan asks
  bool extras = false;   // bias, ALiBi, softcap or dropout
  bool bias_gradient = false;
  BiasBroadcast bias_broadcast;
  bool bias_alone = false;    // no ALiBi, softcap or dropout
  bool bias_in_turn = false;  // see bias_in_turn
  bool whole_heads = false;   // see whole_heads
  bool first_stores = false;  // see first_stores
  SharedJobs shared;          // see shared_jobs
};

// The zeroed region of the workspace: int32 jobs_taken, int32 turns[heads][turns_of_head] or
// stored[batch][heads][stored_words], fp32 bias gradient. Offsets are bytes from its start.
struct ZeroedRegion {
  int64_t turns_of_head = 0;  // 0: not deterministic, no turns
  int64_t turns_offset = 0;
  int64_t stored_words = 0;  // see KernelParams
  int64_t stored_offset = 0;
  int64_t bias_gradient_offset = 0;
  int64_t bias_turns_offset = 0;
  int64_t bytes = 0;
};

// Heads of all batches that share a bias.
inline int64_t bias_sharers(const CallSizes& sizes) {
  const BiasBroadcast& b = sizes.bias_broadcast;
  return (b.batch ? sizes.batch : 1) * (b.head ? sizes.heads : 1);
}

// Tiles of the gradient of a bias: of each head that does not share it, key block and query block.
inline int64_t bias_tiles(const CallSizes& sizes, const Tile& tile) {
  return sizes.batch * sizes.heads / bias_sharers(sizes) * ceil_div(sizes.seqlen_k, tile.block_n) *
         ceil_div(sizes.seqlen_q, tile.block_m);
}

// Whether the heads that share a bias add to its gradient in turn: nothing is zeroed, and summed only once. All of them
// have to see the same tiles. Each is a part of a step behind the one before it, which short walks would wait for. The
// launch may find that rows are no 16-byte pieces, and adds in any order then, so that it takes no deterministic call.
inline bool bias_in_turn(const CallSizes& sizes, const Tile& tile) {
  const BiasBroadcast& b = sizes.bias_broadcast;
  if (!sizes.bias_gradient || !has_shared_bias_kernel(tile) || !(b.batch || b.head) || b.row || b.col) return false;
  if (sizes.packed_q || sizes.packed_k || sizes.seqused || sizes.deterministic || !sizes.bias_alone) return false;
  return 2 * bias_sharers(sizes) <= ceil_div(sizes.seqlen_q, tile.block_m);
}

inline BiasGradientScratch bias_gradient_of(const CallSizes& sizes, const Tile& tile) {
  if (!sizes.bias_gradient) return {};
  if (sizes.bias_in_turn) return {BiasGradientMode::kStore};  // by the last one
  const int64_t key_groups = ceil_div(sizes.seqlen_k, tile.block_n) * tile.warps_n;
  return bias_gradient_scratch(sizes.bias_broadcast, sizes.deterministic, sizes.batch, sizes.heads, sizes.seqlen_q,
                               sizes.seqlen_k, tile.warps_s, key_groups);
}

inline ZeroedRegion zeroed_region(const CallSizes& sizes, const Tile& tile) {
  ZeroedRegion region;
  region.bytes = 16;
  if (sizes.deterministic && !sizes.whole_heads) {
    region.turns_of_head = sizes.packed_q ? first_block(sizes.total_q, sizes.batch, tile.block_m)
                                          : sizes.batch * ceil_div(sizes.seqlen_q, tile.block_m);
    region.turns_offset = region.bytes;
    region.bytes = round_up(region.turns_offset + sizes.heads * region.turns_of_head * 4, 16);
  }
  if (sizes.first_stores) {
    region.stored_words = ceil_div(ceil_div(sizes.seqlen_q, tile.block_m), 32);
    region.stored_offset = region.bytes;
    region.bytes = round_up(region.bytes + sizes.batch * sizes.heads * region.stored_words * 4, 16);
  }
  const BiasGradientScratch scratch = bias_gradient_of(sizes, tile);
  if (scratch.zeroed) {
    region.bias_gradient_offset = region.bytes;
    region.bytes += scratch.elements * 4;
  }
  if (sizes.bias_in_turn) {
    region.bias_turns_offset = region.bytes;
    region.bytes = round_up(region.bytes + bias_tiles(sizes, tile) * 4, 16);
  }
  return region;
}

// Wide tiles: fp32 dk and dv of the keys that a CTA works on, in the order of its registers.
inline int64_t gradient_floats(int64_t head_dim, int64_t head_dim_v, const Tile& tile) {
  const int64_t columns = tile.gradient_columns();
  return tile.wide ? tile.block_n * (round_up(head_dim, columns) + round_up(head_dim_v, columns)) : 0;
}

// Whether jobs follow cu_seqlens_k. A bias gradient is as wide as the longest sequence, so that every sequence needs
// CTAs for all of it.
inline bool packed_jobs(const CallSizes& sizes) { return sizes.packed_k && !sizes.bias_gradient; }

// Key blocks.
inline int64_t job_count(const CallSizes& sizes, const Tile& tile) {
  if (packed_jobs(sizes)) return varlen_jobs(sizes.total_k, sizes.batch, sizes.heads_kv, tile.block_n);
  return sizes.batch * sizes.heads_kv * ceil_div(sizes.seqlen_k, tile.block_n);
}

// Where walks are equally long, CTAs that stay have as many of them each, and the few that are left are shared. Of
// unequal ones, longest first, the short ones fill the last round: all are shared, if there are few. Packed lengths may
// be far from the longest, which is all that is known; and a bias gradient has places for one CTA a key block.
inline SharedJobs shared_jobs(const CallSizes& sizes, const Tile& tile, int64_t multiprocessors) {
  if (sizes.packed_k || sizes.bias_gradient || sizes.seqlen_k == 0) return {};
  const Visibility visibility =
      make_visibility(static_cast<int32_t>(sizes.seqlen_q), static_cast<int32_t>(sizes.seqlen_k), sizes.window_left,
                      sizes.window_right, sizes.causal);
  const auto steps = [&](int64_t key_block) {
    return query_blocks(visibility, static_cast<int32_t>(key_block), tile.block_m, tile.block_n).size() *
           (sizes.heads / sizes.heads_kv);
  };
  const int64_t jobs = job_count(sizes, tile), workers = at_least(multiprocessors, 1);
  const int64_t count = visibility.full() ? jobs % workers : jobs;
  if (count == 0) return {};
  // The queries that see a key block grow, stay the same or shrink along the keys.
  const int64_t last = ceil_div(sizes.seqlen_k, tile.block_n) - 1, middle = steps(last / 2);
  const int64_t longest = at_least(at_least(steps(0), steps(last)), middle);
  const int32_t splits = split_count(count, middle, longest, workers);
  if (splits == 1) return {};
  return {count, splits};
}

// Floats of dq of one CTA that takes whole heads.
inline int64_t dq_tiles_floats(const CallSizes& sizes, const Tile& tile) {
  return sizes.heads / sizes.heads_kv * round_up(sizes.seqlen_q, tile.block_m) * tile.head_dim;
}

// Whether the first key block of a query tile stores its dq, so that nobody has to zero it. Zeros cost as much whatever
// the length, the others' asking whether they may add a twentieth of every step: it pays where a query tile is passed
// few times, and without a mask, under which the first key blocks reach a tile at the same time.
inline bool first_stores(const CallSizes& sizes, const Tile& tile) {
  if (!has_first_stores(tile) || sizes.packed_q || sizes.packed_k || sizes.seqused || sizes.extras) return false;
  const Visibility visibility =
      make_visibility(static_cast<int32_t>(sizes.seqlen_q), static_cast<int32_t>(sizes.seqlen_k), sizes.window_left,
                      sizes.window_right, sizes.causal);
  return visibility.full() && !sizes.deterministic && ceil_div(sizes.seqlen_k, tile.block_n) <= 10;
}

// Whether each CTA takes whole heads, all key blocks of one after the other: dq is then summed by its own CTA, in the
// order of the key blocks, without an accumulator that is zeroed, added into and converted. It pays where heads are
// short: what a CTA keeps stays in L2, all but, and passes through it few times. All query tiles have to be visited, by
// jobs that make nearly whole rounds.
inline bool whole_heads(const CallSizes& sizes, const Tile& tile, int64_t multiprocessors, int64_t l2_bytes) {
  if (!has_whole_heads(tile) || sizes.packed_q || sizes.packed_k || sizes.seqused || sizes.extras) return false;
  const int64_t heads = sizes.batch * sizes.heads_kv, workers = at_least(multiprocessors, 1);
  if (ceil_div(heads, workers) * workers * 10 > heads * 11) return false;
  const int64_t rows = sizes.heads / sizes.heads_kv * sizes.seqlen_q;
  const int64_t bytes = dq_tiles_floats(sizes, tile) * 4 + rows * (sizes.head_dim + sizes.head_dim_v) * 2;
  if (workers * bytes * 2 > l2_bytes * 3) return false;
  const Visibility visibility =
      make_visibility(static_cast<int32_t>(sizes.seqlen_q), static_cast<int32_t>(sizes.seqlen_k), sizes.window_left,
                      sizes.window_right, sizes.causal);
  const int64_t tiles = ceil_div(sizes.seqlen_q, tile.block_m);
  int64_t visits = 0;
  for (int32_t m = 0; m < tiles; ++m) {
    const int64_t seen = key_blocks(visibility, m, tile.block_m, tile.block_n).size();
    if (seen == 0) return false;
    visits += seen;
  }
  return tiles > 0 && visits <= 5 * tiles;
}

// CTAs: one a multiprocessor, as their shared memory and registers want it.
inline int64_t worker_count(const CallSizes& sizes, const Tile& tile, int64_t multiprocessors) {
  if (sizes.whole_heads) return at_most(sizes.batch * sizes.heads_kv, at_least(multiprocessors, 1));
  return at_most(job_count(sizes, tile) - sizes.shared.count + sizes.shared.parts(), at_least(multiprocessors, 1));
}

// Floats of a row of dk or dv in a part of a shared job.
inline int64_t part_row_stride(int64_t columns) { return round_up(columns, 4); }

// The partial region of the workspace: fp32 bias gradient that needs no zeros, then dk and dv in work of wide tiles,
// then dk and dv of each part of shared jobs: (parts, block_n, row stride) each, then the sums of a shared bias's
// gradient: (tiles, block_m * block_n).
struct PartialRegion {
  int64_t gradients_offset = 0;
  int64_t dq_tiles_offset = 0;
  int64_t parts_dk_offset = 0, parts_dv_offset = 0;
  int64_t bias_sums_offset = 0;
  int64_t bytes = 0;
};

inline PartialRegion partial_region(const CallSizes& sizes, const Tile& tile, int64_t multiprocessors) {
  PartialRegion region;
  const BiasGradientScratch scratch = bias_gradient_of(sizes, tile);
  if (!scratch.zeroed) region.bytes = scratch.elements * 4;
  const auto take = [&region](int64_t floats) {
    const int64_t offset = round_up(region.bytes, 256);
    if (floats > 0) region.bytes = offset + floats * 4;
    return offset;
  };
  region.gradients_offset =
      take(worker_count(sizes, tile, multiprocessors) * gradient_floats(sizes.head_dim, sizes.head_dim_v, tile));
  region.dq_tiles_offset =
      take(sizes.whole_heads ? worker_count(sizes, tile, multiprocessors) * dq_tiles_floats(sizes, tile) : 0);
  const int64_t part_rows = sizes.shared.parts() * tile.block_n;
  region.parts_dk_offset = take(part_rows * part_row_stride(sizes.head_dim));
  region.parts_dv_offset = take(part_rows * part_row_stride(sizes.head_dim_v));
  region.bias_sums_offset = take(sizes.bias_in_turn ? bias_tiles(sizes, tile) * tile.block_m * tile.block_n : 0);
  return region;
}

}  // namespace flashbwd::sm80

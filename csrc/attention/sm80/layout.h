// Scheduling decisions and scratch sizes that the plan and the launcher must agree on. No CUDA here.
#pragma once

#include <cstdint>

#include "../index/query_loop.h"
#include "../index/tile_order.h"
#include "../pre_post/bias_gradient.h"
#include "config.h"

namespace flashbwd::sm80 {

// Split of the last work tiles of a call: `count` work tiles are split over `splits` CTAs each.
struct SplitTiles {
  int64_t count = 0;
  int32_t splits = 1;
  int64_t ctas() const { return count * splits; }
};

// The sizes and options of a call that decide its schedule and its scratch memory.
struct CallSizes {
  bool packed_q = false, packed_k = false;
  int64_t batch = 0, heads = 0, heads_kv = 0;
  int64_t seqlen_q = 0, seqlen_k = 0;  // the longest if packed
  int64_t total_q = 0, total_k = 0;
  int64_t head_dim = 0, head_dim_v = 0;
  int64_t window_left = -1, window_right = -1;
  CausalAlignment causal = CausalAlignment::kNone;
  bool deterministic = false;
  bool seqused = false;
  bool has_features = false;  // bias, ALiBi, softcap or dropout; only the plan sets it
  bool bias_gradient = false;
  BiasBroadcast bias_broadcast;
  bool bias_alone = false;             // no ALiBi, softcap or dropout
  bool ordered_bias_gradient = false;  // see ordered_bias_gradient
  bool whole_heads = false;            // see whole_heads
  bool first_stores = false;           // see first_stores
  SplitTiles split_tiles;              // see choose_split_tiles
};

// The region of the workspace that is zeroed: the int32 counter of work tiles; int32 dq semaphores
// [heads][semaphores_per_head] or stored bits [batch][heads][stored_words]; the fp32 bias gradient or the semaphores of
// its tiles. Offsets are in bytes from its start.
struct ZeroedRegion {
  int64_t semaphores_per_head = 0;  // 0: not deterministic, no semaphores
  int64_t dq_semaphores_offset = 0;
  int64_t stored_words = 0;  // see KernelParams
  int64_t stored_offset = 0;
  int64_t bias_gradient_offset = 0;
  int64_t bias_semaphores_offset = 0;
  int64_t bytes = 0;
};

// The number of (batch, head) that share a bias.
inline int64_t bias_sharers(const CallSizes& sizes) {
  const BiasBroadcast& b = sizes.bias_broadcast;
  return (b.batch ? sizes.batch : 1) * (b.head ? sizes.heads : 1);
}

// Tiles of the bias gradient: one per (batch, head) with its own bias, key block and query block.
inline int64_t bias_tiles(const CallSizes& sizes, const Tile& tile) {
  return sizes.batch * sizes.heads / bias_sharers(sizes) * ceil_div(sizes.seqlen_k, tile.block_n) *
         ceil_div(sizes.seqlen_q, tile.block_m);
}

// Whether heads that share a bias add to its gradient in a fixed order: no zeros and no second kernel are needed. Each
// head starts a fraction of an iteration after the previous one, so sequences must be long, and all heads must see the
// same tiles.
// False for deterministic calls: if the launch finds rows without 16-byte alignment, it adds in any order instead.
inline bool ordered_bias_gradient(const CallSizes& sizes, const Tile& tile) {
  const BiasBroadcast& b = sizes.bias_broadcast;
  if (!sizes.bias_gradient || !has_shared_bias_kernel(tile) || !(b.batch || b.head) || b.row || b.col) return false;
  if (sizes.packed_q || sizes.packed_k || sizes.seqused || sizes.deterministic || !sizes.bias_alone) return false;
  return 2 * bias_sharers(sizes) <= ceil_div(sizes.seqlen_q, tile.block_m);
}

inline BiasGradientScratch bias_gradient_of(const CallSizes& sizes, const Tile& tile) {
  if (!sizes.bias_gradient) return {};
  if (sizes.ordered_bias_gradient) return {BiasGradientMode::kStore};  // the last head stores it
  const int64_t key_groups = ceil_div(sizes.seqlen_k, tile.block_n) * tile.warps_n;
  return bias_gradient_scratch(sizes.bias_broadcast, sizes.deterministic, sizes.batch, sizes.heads, sizes.seqlen_q,
                               sizes.seqlen_k, tile.warps_s, key_groups);
}

inline ZeroedRegion zeroed_region(const CallSizes& sizes, const Tile& tile) {
  ZeroedRegion region;
  region.bytes = 16;
  if (sizes.deterministic && !sizes.whole_heads) {
    region.semaphores_per_head = sizes.packed_q ? first_block(sizes.total_q, sizes.batch, tile.block_m)
                                                : sizes.batch * ceil_div(sizes.seqlen_q, tile.block_m);
    region.dq_semaphores_offset = region.bytes;
    region.bytes = round_up(region.dq_semaphores_offset + sizes.heads * region.semaphores_per_head * 4, 16);
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
  if (sizes.ordered_bias_gradient) {
    region.bias_semaphores_offset = region.bytes;
    region.bytes = round_up(region.bytes + bias_tiles(sizes, tile) * 4, 16);
  }
  return region;
}

// Large head dimensions: fp32 elements of dk and dv for one CTA's keys, in the order of its threads' registers.
inline int64_t gradient_floats(int64_t head_dim, int64_t head_dim_v, const Tile& tile) {
  const int64_t columns = tile.gradient_columns();
  return tile.large ? tile.block_n * (round_up(head_dim, columns) + round_up(head_dim_v, columns)) : 0;
}

// Whether work tiles follow cu_seqlens_k. A bias gradient is as wide as the longest sequence, so with one, every
// sequence gets work tiles for the longest length.
inline bool packed_work_tiles(const CallSizes& sizes) { return sizes.packed_k && !sizes.bias_gradient; }

// Number of key blocks over all KV heads.
inline int64_t count_work_tiles(const CallSizes& sizes, const Tile& tile) {
  if (packed_work_tiles(sizes)) return varlen_work_tiles(sizes.total_k, sizes.batch, sizes.heads_kv, tile.block_n);
  return sizes.batch * sizes.heads_kv * ceil_div(sizes.seqlen_k, tile.block_n);
}

// Chooses the work tiles to split. Without a mask all take equally long, and only the last wave is split. With a mask
// they run longest first (LPT), and all are split if there are few. Packed sequences are not split (the host does not
// know their lengths), nor are bias gradients (their layout allows one CTA per key block).
inline SplitTiles choose_split_tiles(const CallSizes& sizes, const Tile& tile, int64_t sm_count) {
  if (sizes.packed_k || sizes.bias_gradient || sizes.seqlen_k == 0) return {};
  const Visibility visibility =
      make_visibility(static_cast<int32_t>(sizes.seqlen_q), static_cast<int32_t>(sizes.seqlen_k), sizes.window_left,
                      sizes.window_right, sizes.causal);
  const auto iterations = [&](int64_t key_block) {
    return query_blocks(visibility, static_cast<int32_t>(key_block), tile.block_m, tile.block_n).size() *
           (sizes.heads / sizes.heads_kv);
  };
  const int64_t num_work_tiles = count_work_tiles(sizes, tile), num_ctas = at_least(sm_count, 1);
  const int64_t count = visibility.full() ? num_work_tiles % num_ctas : num_work_tiles;
  if (count == 0) return {};
  // Over the key blocks, the number of iterations first rises, then stays constant, then falls. Any of the three phases
  // may be missing.
  const int64_t last = ceil_div(sizes.seqlen_k, tile.block_n) - 1, middle = iterations(last / 2);
  const int64_t longest = at_least(at_least(iterations(0), iterations(last)), middle);
  const int32_t splits = split_count(count, middle, longest, num_ctas);
  if (splits == 1) return {};
  return {count, splits};
}

// fp32 elements of dq that one CTA accumulates with whole heads.
inline int64_t dq_tiles_floats(const CallSizes& sizes, const Tile& tile) {
  return sizes.heads / sizes.heads_kv * round_up(sizes.seqlen_q, tile.block_m) * tile.head_dim;
}

// Whether the first key block of a query tile stores dq, so that dq need not be zeroed. The other key blocks check for
// it, which costs up to 5 % of each iteration, so it pays only for few key blocks. With a mask, all the first key
// blocks of a head would reach a tile at the same time.
inline bool first_stores(const CallSizes& sizes, const Tile& tile) {
  if (!has_first_stores(tile) || sizes.packed_q || sizes.packed_k || sizes.seqused || sizes.has_features) return false;
  const Visibility visibility =
      make_visibility(static_cast<int32_t>(sizes.seqlen_q), static_cast<int32_t>(sizes.seqlen_k), sizes.window_left,
                      sizes.window_right, sizes.causal);
  return visibility.full() && !sizes.deterministic && ceil_div(sizes.seqlen_k, tile.block_n) <= 10;
}

// Whether each CTA processes all key blocks of a KV head in order. It then accumulates dq itself: no zeros, no atomics,
// no postprocess. This pays if dq, q and dout of the active heads nearly fit in L2 and few key blocks read them, and if
// the heads fill whole waves. Every query tile must see a key, because its last key block writes dq.
inline bool whole_heads(const CallSizes& sizes, const Tile& tile, int64_t sm_count, int64_t l2_bytes) {
  if (!has_whole_heads(tile) || sizes.packed_q || sizes.packed_k || sizes.seqused || sizes.has_features) return false;
  const int64_t heads = sizes.batch * sizes.heads_kv, num_ctas = at_least(sm_count, 1);
  if (ceil_div(heads, num_ctas) * num_ctas * 10 > heads * 11) return false;
  const int64_t rows = sizes.heads / sizes.heads_kv * sizes.seqlen_q;
  const int64_t bytes = dq_tiles_floats(sizes, tile) * 4 + rows * (sizes.head_dim + sizes.head_dim_v) * 2;
  if (num_ctas * bytes * 2 > l2_bytes * 3) return false;
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

// The grid: one CTA per SM, because of its shared memory and registers.
inline int64_t grid_size(const CallSizes& sizes, const Tile& tile, int64_t sm_count) {
  if (sizes.whole_heads) return at_most(sizes.batch * sizes.heads_kv, at_least(sm_count, 1));
  return at_most(count_work_tiles(sizes, tile) - sizes.split_tiles.count + sizes.split_tiles.ctas(),
                 at_least(sm_count, 1));
}

// Floats from row to row of dk or dv in the partial sums of a split work tile.
inline int64_t partial_row_stride(int64_t columns) { return round_up(columns, 4); }

// The partial region of the workspace: fp32 bias gradient that needs no zeros; dk and dv of large head dimensions; dq
// of whole heads; dk and dv of split work tiles, (CTAs of split tiles, block_n, row stride) each; ordered sums of a
// shared bias gradient, (tiles, block_m * block_n).
struct PartialRegion {
  int64_t gradients_offset = 0;
  int64_t dq_tiles_offset = 0;
  int64_t partial_dk_offset = 0, partial_dv_offset = 0;
  int64_t bias_sums_offset = 0;
  int64_t bytes = 0;
};

inline PartialRegion partial_region(const CallSizes& sizes, const Tile& tile, int64_t sm_count) {
  PartialRegion region;
  const BiasGradientScratch scratch = bias_gradient_of(sizes, tile);
  if (!scratch.zeroed) region.bytes = scratch.elements * 4;
  const auto take = [&region](int64_t floats) {
    const int64_t offset = round_up(region.bytes, 256);
    if (floats > 0) region.bytes = offset + floats * 4;
    return offset;
  };
  region.gradients_offset =
      take(grid_size(sizes, tile, sm_count) * gradient_floats(sizes.head_dim, sizes.head_dim_v, tile));
  region.dq_tiles_offset =
      take(sizes.whole_heads ? grid_size(sizes, tile, sm_count) * dq_tiles_floats(sizes, tile) : 0);
  const int64_t partial_rows = sizes.split_tiles.ctas() * tile.block_n;
  region.partial_dk_offset = take(partial_rows * partial_row_stride(sizes.head_dim));
  region.partial_dv_offset = take(partial_rows * partial_row_stride(sizes.head_dim_v));
  region.bias_sums_offset =
      take(sizes.ordered_bias_gradient ? bias_tiles(sizes, tile) * tile.block_m * tile.block_n : 0);
  return region;
}

}  // namespace flashbwd::sm80

// The order of work: the linear index of a work tile gives its batch, head and key block.
//
// Heads are processed in groups whose queries fit in L2 together (a head swizzle). Within a group, key block 0 of all
// heads comes first, then key block 1 of all heads, and so on. Under a causal mask key block 0 has the most queries, so
// this is longest processing time first (LPT). The key blocks of one head are far apart, so that neighbours rarely wait
// for one another. A schedule may count key blocks from the last one (Schedule::reversed in sm90/schedule.h).
#pragma once

#include <cstdint>

#include "arithmetic.h"

namespace flashbwd {

struct WorkTileIndex {
  int32_t batch = 0;  // -1: there is no such work tile
  int32_t head = 0;
  int32_t key_block = 0;
};

// How many heads, at least one, have their q, dout and dq accumulator in `l2_bytes` of L2. A head here is what one work
// tile loops over: `heads_per_tile` query heads.
FLASHBWD_HOST_DEVICE constexpr int64_t heads_in_l2(int64_t l2_bytes, int64_t seqlen_q, int64_t head_dim,
                                                   int64_t head_dim_v, int64_t element_bytes, int64_t heads_per_tile) {
  const int64_t row = (head_dim + head_dim_v) * element_bytes + round_up(head_dim, 4) * 4;
  return at_least(l2_bytes / at_least(seqlen_q * row * heads_per_tile, 1), 1);
}

// Heads of a group, such that all their key blocks run at the same time on `workers` workers: they read q and dout, and
// add to dq, while these are in L2. A larger group would leave every head half done. The result divides all_heads,
// because a shorter last group would finish late.
FLASHBWD_HOST_DEVICE constexpr int64_t heads_at_once(int64_t workers, int64_t all_heads, int64_t num_key_blocks) {
  int64_t heads = at_least(at_most(workers / at_least(num_key_blocks, 1), all_heads), 1);
  while (all_heads % heads != 0) --heads;
  return heads;
}

// The work tile with number `index` in a group of `size` heads that begins with head `first` of all batches.
template <typename Index>
FLASHBWD_HOST_DEVICE constexpr WorkTileIndex tile_in_group(Index index, Index first, Index size, int32_t heads,
                                                           int32_t num_key_blocks) {
  const Index within = index - first * num_key_blocks;
  const Index head = first + within % size;
  return {static_cast<int32_t>(head / heads), static_cast<int32_t>(head % heads), static_cast<int32_t>(within / size)};
}

// Dense inputs: 0 <= index < batch * heads * num_key_blocks, heads of all batches in one sequence. Index is an integer
// type that holds every index; 32 bits save a GPU the divisions of 64. The last group has the heads that are left.
template <typename Index>
FLASHBWD_HOST_DEVICE constexpr WorkTileIndex dense_work_tile(Index index, int32_t batch, int32_t heads,
                                                             int32_t num_key_blocks, int64_t head_group) {
  const Index all_heads = Index{batch} * heads;
  const Index width = static_cast<Index>(at_most(head_group, all_heads));  // so that products are valid indices
  const Index first = index / (width * num_key_blocks) * width;
  const Index left = all_heads - first;
  return tile_in_group(index, first, left < width ? left : width, heads, num_key_blocks);
}

// The same, but work tiles from `last_group` on, where a group begins, form one group.
template <typename Index>
FLASHBWD_HOST_DEVICE constexpr WorkTileIndex dense_work_tile(Index index, int32_t batch, int32_t heads,
                                                             int32_t num_key_blocks, int64_t head_group,
                                                             Index last_group) {
  if (index < last_group) return dense_work_tile(index, batch, heads, num_key_blocks, head_group);
  const Index first = last_group / num_key_blocks;
  return tile_in_group(index, first, Index{batch} * heads - first, heads, num_key_blocks);
}

// The batch entry and head of a dense work tile if all entries of a head follow one another, instead of all heads of an
// entry (Schedule::batches_innermost in sm90/schedule.h).
FLASHBWD_HOST_DEVICE constexpr WorkTileIndex with_batches_innermost(const WorkTileIndex& tile, int32_t batches,
                                                                    int32_t heads) {
  const int32_t number = tile.batch * heads + tile.head;
  return {number % batches, number / batches, tile.key_block};
}

// Packed inputs need no table of block counts: sequence b owns the block numbers [first_block(b), first_block(b + 1)).
// floor(x + y) >= floor(x) + floor(y), so these are at least ceil(length / block_n) numbers, and at most one more,
// which has nothing to do.
FLASHBWD_HOST_DEVICE constexpr int64_t first_block(int64_t cu_seqlens_b, int64_t b, int64_t block_n) {
  return cu_seqlens_b / block_n + b;
}

// Number of work tiles: exact with cu_seqlens_k[batch] for total_k, an upper bound with the rows of k.
FLASHBWD_HOST_DEVICE constexpr int64_t varlen_work_tiles(int64_t total_k, int64_t batch, int64_t heads,
                                                         int64_t block_n) {
  return heads * first_block(total_k, batch, block_n);
}

// Work tiles of one head of sequence b.
FLASHBWD_HOST_DEVICE constexpr int32_t work_tiles_of_sequence(const int32_t* cu_seqlens_k, int32_t b, int32_t block_n) {
  return static_cast<int32_t>(first_block(cu_seqlens_k[b + 1], b + 1, block_n) -
                              first_block(cu_seqlens_k[b], b, block_n));
}

// Packed inputs: 0 <= index < varlen_work_tiles(cu_seqlens_k[batch], ...); beyond that, batch is -1. A key block at or
// past the end of its sequence has no work. cu_seqlens_k is (batch + 1,) and starts with 0. The search is a bisection,
// log2(batch) loads. head_group(key blocks of a head) is the number of heads of a group.
template <typename Index, typename HeadGroup>
FLASHBWD_HOST_DEVICE constexpr WorkTileIndex varlen_work_tile(Index index, const int32_t* cu_seqlens_k, int32_t batch,
                                                              int32_t heads, int32_t block_n,
                                                              const HeadGroup& head_group) {
  const Index block = index / heads;
  if (batch == 0 || block >= first_block(cu_seqlens_k[batch], batch, block_n)) return {-1, 0, 0};
  int32_t low = 0, high = batch;  // first_block(low) <= block < first_block(high)
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    if (first_block(cu_seqlens_k[middle], middle, block_n) <= block) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const int64_t first = first_block(cu_seqlens_k[low], low, block_n);
  const int32_t blocks = work_tiles_of_sequence(cu_seqlens_k, low, block_n);
  const WorkTileIndex tile =
      dense_work_tile(static_cast<Index>(index - first * heads), 1, heads, blocks, head_group(blocks));
  return {low, tile.head, tile.key_block};
}

}  // namespace flashbwd

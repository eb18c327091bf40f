// The query loop of a work tile of sm90: all query blocks of its query range, for all query heads of its KV head.
//
// Heads are innermost: the loop visits a query block for all heads, then the next block. In windows heads are outermost
// (Tile::kByHeads): CTAs side by side are then in the same head, and L2 holds what all of them need of it. Blocks
// ascend or descend from Tile::first_block; a staggered loop (Tile::kStaggers) goes on at the first block after the
// last one.
//
// `Tile` has first_index, iterations, first_head, end_head, first_block, past_block, query_range and descending; in the
// kernel it is WorkTile (../sm90/tile_scheduler.cuh). The tests compare both iterators with plain enumeration.
#pragma once

#include <cstdint>

#include "visibility.h"

namespace flashbwd {

// Keeps its position in registers.
struct QueryIterator {
  int32_t index;  // counts on from work tile to work tile, as the pipelines do
  int32_t end;    // index after the last iteration of this work tile

  template <typename Tile>
  FLASHBWD_HOST_DEVICE explicit QueryIterator(const Tile& tile)
      : index(tile.first_index),
        end(tile.first_index + tile.iterations),
        head_(tile.first_head),
        query_block_(tile.first_block),
        first_head_(tile.first_head),
        end_head_(tile.end_head),
        stride_(tile.descending ? -1 : 1) {}

  FLASHBWD_HOST_DEVICE int32_t head() const { return head_; }
  FLASHBWD_HOST_DEVICE int32_t query_block() const { return query_block_; }

  template <typename Tile>
  FLASHBWD_HOST_DEVICE void advance(const Tile& tile) {
    advance(tile, stride_, first_head_, end_head_);
  }

  // For a thread with few registers: reads from shared memory what does not change.
  template <typename Tile>
  FLASHBWD_HOST_DEVICE void advance_rereading(const Tile& tile) {
    advance(tile, tile.descending ? -1 : 1, tile.first_head, tile.end_head);
  }

 private:
  // References, so that only what is needed is read.
  template <typename Tile>
  FLASHBWD_HOST_DEVICE void advance(const Tile& tile, int32_t stride, const int32_t& first_head,
                                    const int32_t& end_head) {
    ++index;
    if constexpr (Tile::kByHeads) {
      query_block_ += stride;
      if (query_block_ == tile.past_block) {
        query_block_ = tile.first_block;
        ++head_;
      }
    } else if (++head_ == end_head) {
      head_ = first_head;
      query_block_ += stride;
      if (Tile::kStaggers && query_block_ == tile.past_block) query_block_ = tile.query_range.begin;
    }
  }

  int32_t head_, query_block_, first_head_, end_head_, stride_;
};

// Keeps only its index and computes the rest from shared memory on demand: for warpgroups with few registers.
template <typename Tile>
struct SmallQueryIterator {
  const Tile& tile;
  int32_t index = tile.first_index;

  FLASHBWD_HOST_DEVICE explicit SmallQueryIterator(const Tile& tile) : tile(tile) {}

  FLASHBWD_HOST_DEVICE void advance(const Tile&) { ++index; }
  FLASHBWD_HOST_DEVICE int32_t head() const {
    const int32_t heads = tile.end_head - tile.first_head, steps = index - tile.first_index;
    if constexpr (Tile::kByHeads) return tile.first_head + steps / tile.query_range.size();
    return tile.first_head + (heads == 1 ? 0 : steps % heads);
  }
  FLASHBWD_HOST_DEVICE int32_t query_block() const {
    const int32_t heads = tile.end_head - tile.first_head;
    int32_t blocks_before = index - tile.first_index;
    if constexpr (Tile::kByHeads) {
      blocks_before %= tile.query_range.size();
    } else if (heads != 1) {
      blocks_before /= heads;
    }
    const int32_t block = tile.descending ? tile.first_block - blocks_before : tile.first_block + blocks_before;
    return Tile::kStaggers && block >= tile.query_range.end ? block - tile.query_range.size() : block;
  }
};

}  // namespace flashbwd

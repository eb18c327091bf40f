// The query loop of a key block: over the query tiles of all query heads of its KV head. Several CTAs may share one
// loop (key block splits). The tests compare every function with brute force.
#pragma once

#include <cstdint>

#include "arithmetic.h"
#include "visibility.h"

namespace flashbwd {

// Iterations [begin, end) of one of `num_splits` CTAs that share a loop. Each pair of a query tile and a key block
// still belongs to one CTA, so key_blocks(m).size() CTAs add to dq tile m whatever num_splits is. The splits' sums of
// dk and dv are added up afterwards, in order.
FLASHBWD_HOST_DEVICE constexpr BlockRange split_query_loop(int32_t iterations, int32_t split, int32_t num_splits) {
  return {static_cast<int32_t>(int64_t{iterations} * split / num_splits),
          static_cast<int32_t>(int64_t{iterations} * (split + 1) / num_splits)};
}

// Query heads that the loop visits for one query tile before it goes to the next tile. Without splits these are all
// heads of the group; with splits about as many as one CTA has, so that every CTA visits the tiles of its own heads.
// The result divides `heads`.
FLASHBWD_HOST_DEVICE constexpr int32_t heads_per_pass(int32_t heads, int32_t num_splits) {
  int32_t per_pass = static_cast<int32_t>(at_least(heads / num_splits, 1));
  while (heads % per_pass != 0) --per_pass;
  return per_pass;
}

// A position in the loop over `tiles` query tiles of the heads of a group, `heads_per_pass` of them per pass.
struct QueryLoopPosition {
  int32_t head = 0;          // within the group
  int32_t tile = 0;          // in the order of the loop
  int32_t head_of_pass = 0;  // the head within its pass

  QueryLoopPosition() = default;
  FLASHBWD_HOST_DEVICE constexpr QueryLoopPosition(int32_t iteration, int32_t tiles, int32_t heads_per_pass) {
    if (iteration == 0) return;
    const int32_t within = iteration % (tiles * heads_per_pass);
    head_of_pass = within % heads_per_pass;
    tile = within / heads_per_pass;
    head = iteration / (tiles * heads_per_pass) * heads_per_pass + head_of_pass;
  }
  FLASHBWD_HOST_DEVICE constexpr void advance(int32_t tiles, int32_t heads_per_pass) {
    ++head;
    if (++head_of_pass < heads_per_pass) return;
    head_of_pass = 0;
    if (++tile < tiles) {
      head -= heads_per_pass;
    } else {
      tile = 0;
    }
  }
};

// Staggered start: the loops of the key blocks of a head begin at one of these query blocks, 0, blocks_apart, 2 *
// blocks_apart and so on, if all key blocks see all query blocks.
FLASHBWD_HOST_DEVICE constexpr int32_t staggered_starts(int32_t blocks_apart, int32_t num_query_blocks) {
  return static_cast<int32_t>(at_least(num_query_blocks / blocks_apart, 1));
}

// Where the loop of key block n begins. Key blocks that run side by side are consecutive, so most of them add to
// different dq tiles, and the query blocks that they read at one time are a window of the head.
FLASHBWD_HOST_DEVICE constexpr int32_t staggered_start(int32_t n, int32_t blocks_apart, int32_t num_query_blocks) {
  return n % staggered_starts(blocks_apart, num_query_blocks) * blocks_apart;
}

// How many CTAs should share the loop of a key block. There are `work_tiles` key blocks with `mean` iterations on
// average and `longest` at most, and `resident` CTAs run at the same time.
//
// The cost of s splits, in iterations: the longer of one split of the longest loop and ceil(work_tiles * s / resident)
// waves of mean splits, one iteration to start each CTA, two for the sums of dk and dv and one per wave to read them.
// More than one split must save a tenth, and the CTAs must not exceed three times `resident`, which bounds the memory
// of the sums.
FLASHBWD_HOST_DEVICE constexpr int32_t split_count(int64_t work_tiles, int64_t mean, int64_t longest,
                                                   int64_t resident) {
  int64_t best = 1, least = at_least(longest + 1, ceil_div(work_tiles, resident) * (mean + 1)) * 9 / 10;
  for (int64_t s = 2; s <= longest && work_tiles * s <= 3 * resident; ++s) {
    const int64_t waves = ceil_div(work_tiles * s, resident);
    const int64_t cost = at_least(ceil_div(longest, s) + 1, waves * (ceil_div(mean, s) + 1)) + 2 + waves;
    if (cost < least) {
      best = s;
      least = cost;
    }
  }
  return static_cast<int32_t>(best);
}

}  // namespace flashbwd

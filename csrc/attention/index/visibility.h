// Which query rows see which keys, and therefore which tiles of the scores hold any work.
//
// A mask is a band of the (seqlen_q, seqlen_k) scores: causal masks, windows and their absence differ in two numbers
// only. i is a query row and j a key row, both counted within their sequence; m counts blocks of block_m query rows, n
// counts blocks of block_n key rows. Ranges are half-open. The tests compare every function with brute force.
#pragma once

#include <cstdint>

#include "../params.h"
#include "arithmetic.h"

namespace flashbwd {

// [begin, end). {0, 0} if empty.
struct BlockRange {
  int32_t begin = 0;
  int32_t end = 0;
  FLASHBWD_HOST_DEVICE constexpr int32_t size() const { return end - begin; }
  FLASHBWD_HOST_DEVICE constexpr bool empty() const { return end <= begin; }
  FLASHBWD_HOST_DEVICE constexpr bool contains(int32_t block) const { return begin <= block && block < end; }
};

// Pair (i, j) is visible iff 0 <= i < seqlen_q, 0 <= j < seqlen_k and lo <= j - i < hi. A side without a bound has a
// bound that no pair reaches.
struct Visibility {
  int32_t seqlen_q = 0;  // logical lengths of this sequence
  int32_t seqlen_k = 0;
  int32_t lo = 0;  // lo and hi lie in [-seqlen_q, seqlen_k], so that no sum below overflows
  int32_t hi = 0;

  FLASHBWD_HOST_DEVICE constexpr bool visible(int32_t i, int32_t j) const {
    return 0 <= i && i < seqlen_q && 0 <= j && j < seqlen_k && lo <= j - i && j - i < hi;
  }
  // True if every query sees every key. Meaningless if there are no queries or no keys.
  FLASHBWD_HOST_DEVICE constexpr bool full() const { return lo <= 1 - seqlen_q && hi >= seqlen_k; }
};

// The window of query i reaches from `window_left` keys before the diagonal j = i + off to `window_right` keys after
// it. off is 0 for kTopLeft, else seqlen_k - seqlen_q. Negative windows are unbounded; a causal mask has window_right
// 0. j - i always lies in [1 - seqlen_q, seqlen_k - 1], so clamping lo and hi to [-seqlen_q, seqlen_k] changes no pair.
FLASHBWD_HOST_DEVICE constexpr Visibility make_visibility(int32_t seqlen_q, int32_t seqlen_k, int64_t window_left,
                                                          int64_t window_right, CausalAlignment causal) {
  const int64_t off = causal == CausalAlignment::kTopLeft ? 0 : int64_t{seqlen_k} - seqlen_q;
  // Lengths are below 2^31, so a longer window means the same as this one.
  const int64_t left = at_most(window_left, INT32_MAX);
  const int64_t right = at_most(window_right, INT32_MAX);
  const int64_t lo = left < 0 ? -int64_t{seqlen_q} : at_most(at_least(off - left, -int64_t{seqlen_q}), seqlen_k);
  const int64_t hi = right < 0 ? int64_t{seqlen_k} : at_most(at_least(off + right + 1, -int64_t{seqlen_q}), seqlen_k);
  return {seqlen_q, seqlen_k, static_cast<int32_t>(lo), static_cast<int32_t>(hi)};
}

// Blocks that hold at least one of the rows first, ..., last. Rows below 0 and from `limit` on do not exist.
FLASHBWD_HOST_DEVICE constexpr BlockRange blocks_of_rows(int64_t first, int64_t last, int32_t limit, int32_t block) {
  first = at_least(first, 0);
  last = at_most(last, int64_t{limit} - 1);
  if (last < first) return {};
  return {static_cast<int32_t>(first / block), static_cast<int32_t>(last / block + 1)};
}

// Key blocks n such that tile (m, n) has a visible pair. The keys of a row are an interval that moves by one from row
// to row, so the keys of a block of rows are an interval too, and the answer is exact.
FLASHBWD_HOST_DEVICE constexpr BlockRange key_blocks(const Visibility& v, int32_t m, int32_t block_m, int32_t block_n) {
  const int64_t first_row = int64_t{m} * block_m;
  const int64_t last_row = at_most(first_row + block_m, v.seqlen_q) - 1;
  if (last_row < first_row) return {};
  return blocks_of_rows(first_row + v.lo, last_row + v.hi - 1, v.seqlen_k, block_n);
}

// Query blocks m such that tile (m, n) has a visible pair: lo <= j - i < hi solved for i is j - hi < i <= j - lo.
FLASHBWD_HOST_DEVICE constexpr BlockRange query_blocks(const Visibility& v, int32_t n, int32_t block_m,
                                                       int32_t block_n) {
  const int64_t first_key = int64_t{n} * block_n;
  const int64_t last_key = at_most(first_key + block_n, v.seqlen_k) - 1;
  if (last_key < first_key) return {};
  return blocks_of_rows(first_key - v.hi + 1, last_key - v.lo, v.seqlen_q, block_m);
}

// Query blocks m such that every pair of the whole tile (m, n) is visible, so that the tile needs no mask. An empty
// range may lie anywhere.
FLASHBWD_HOST_DEVICE constexpr BlockRange interior_query_blocks(const Visibility& v, int32_t n, int32_t block_m,
                                                                int32_t block_n) {
  const int64_t first_key = int64_t{n} * block_n;
  const int64_t last_key = first_key + block_n - 1;
  if (last_key >= v.seqlen_k) return {};
  const int64_t end = at_least(at_most(first_key - v.lo + 1, v.seqlen_q), 0) / block_m;
  const int64_t begin = ceil_div(at_least(last_key - v.hi + 1, 0), block_m);
  return {static_cast<int32_t>(begin), static_cast<int32_t>(end)};
}

// True if row i sees a key. i is not negative; the sums fit in 32 bits because lo and hi are clamped.
FLASHBWD_HOST_DEVICE constexpr bool sees_a_key(const Visibility& v, int32_t i) {
  const int32_t first = i + v.lo > 0 ? i + v.lo : 0;
  const int32_t end = i < v.seqlen_k - v.hi ? i + v.hi : v.seqlen_k;
  return i < v.seqlen_q && first < end;
}

}  // namespace flashbwd

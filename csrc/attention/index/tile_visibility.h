// The mask of one tile of scores in terms of its own rows and columns, as bits for the columns that a thread holds of
// an accumulator (../../common/wgmma_fragments.cuh). The tests compare it with brute force.
#pragma once

#include <cstdint>

#include "visibility.h"

namespace flashbwd {

// Clamped if it is far away: key first_key + r sees columns c with diagonal_begin + r <= c < diagonal_end + r, if r <
// keys and c < queries.
struct TileVisibility {
  int32_t diagonal_begin, diagonal_end, keys, queries;

  FLASHBWD_HOST_DEVICE constexpr TileVisibility(const Visibility& v, int32_t first_key, int32_t first_query)
      : diagonal_begin(near(int64_t{first_key} - first_query - v.hi + 1)),
        diagonal_end(near(int64_t{first_key} - first_query - v.lo + 1)),
        keys(near(int64_t{v.seqlen_k} - first_key)),
        queries(near(int64_t{v.seqlen_q} - first_query)) {}

  static FLASHBWD_HOST_DEVICE constexpr int32_t near(int64_t distance) {
    return static_cast<int32_t>(at_least(at_most(distance, 1024), -1024));
  }
};

FLASHBWD_HOST_DEVICE constexpr int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }
FLASHBWD_HOST_DEVICE constexpr int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }

// Bit n is set if the thread's n-th column, 8 (n / 2) + n % 2, is below `bound`, which is at most 128.
FLASHBWD_HOST_DEVICE constexpr uint32_t columns_below(int32_t bound) {
  const int32_t columns = bound / 8 * 2 + smaller(bound % 8, 2);
  return columns == 32 ? ~0u : (1u << columns) - 1;
}

// One bit for each of the thread's columns in kBlockM, from `column` on: set if it sees key `row`.
template <int kBlockM>
FLASHBWD_HOST_DEVICE constexpr uint32_t columns_that_see(const TileVisibility& tile, int32_t row, int32_t column) {
  static_assert(kBlockM <= 128, "a bit for each column of a thread");
  const int32_t begin = row < tile.keys ? larger(tile.diagonal_begin + row - column, 0) : kBlockM;
  const int32_t end = larger(smaller(tile.diagonal_end + row, tile.queries) - column, 0);
  return columns_below(smaller(end, kBlockM)) & ~columns_below(smaller(begin, kBlockM));
}

}  // namespace flashbwd

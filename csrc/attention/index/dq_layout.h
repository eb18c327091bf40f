// Where a row of the fp32 dq accumulator lies: batches back to back, each (heads, seqlen_q, row_stride), with the
// physical seqlen_q of the sequence.
#pragma once

#include <cstdint>

#include "arithmetic.h"

namespace flashbwd {

// Floats from one row to the next: head_dim padded to whole 16-byte vectors.
FLASHBWD_HOST_DEVICE constexpr int64_t dq_row_stride(int64_t head_dim) { return round_up(head_dim, 4); }

// The element of query row i and column 0 of `head`, counted from the start of the sequence.
FLASHBWD_HOST_DEVICE constexpr int64_t dq_row_offset(int64_t head, int64_t i, int64_t seqlen_q, int64_t row_stride) {
  return (head * seqlen_q + i) * row_stride;
}

// Accumulators in blocks (WorkspaceLayout::dq_blocks). From the first row of a slot on, every eight rows lie in blocks
// of eight columns, and within a block the even columns of all rows come before the odd columns. So two MMA
// accumulators of a warp (row lane / 4, columns lane % 4 * 2 and one more) are 128 consecutive bytes each. Rows at the
// end that make no eight lie as plain rows.
constexpr int32_t kDqBlock = 8;
constexpr int32_t kDqBlockElements = kDqBlock * kDqBlock;

// Counted from the first of the eight rows.
FLASHBWD_HOST_DEVICE constexpr int64_t dq_block_offset(int64_t row, int64_t column) {
  return column / kDqBlock * kDqBlockElements + column % 2 * (kDqBlockElements / 2) + row % kDqBlock * (kDqBlock / 2) +
         column % kDqBlock / 2;
}

// Permuted rows of the accumulator (WorkspaceLayout::dq_permuted). In each whole block of 32 columns, the even vectors
// of four columns come before the odd vectors. A warp that stores MMA accumulators to such rows in shared memory,
// swizzled by row, then uses all banks equally.
constexpr int32_t kPermutedBlock = 32;

// True if the block that holds this column is whole.
FLASHBWD_HOST_DEVICE constexpr bool is_permuted(int32_t column, int32_t columns) {
  return column / kPermutedBlock * kPermutedBlock + kPermutedBlock <= columns;
}

// The offset of columns `column` to `column` + 3 in a row of `columns`. `column` is a multiple of four.
FLASHBWD_HOST_DEVICE constexpr int32_t permuted_offset(int32_t column, int32_t columns) {
  const int32_t vector = column % kPermutedBlock / 4;
  return is_permuted(column, columns) ? column / kPermutedBlock * kPermutedBlock + (vector % 2 * 4 + vector / 2) * 4
                                      : column;
}

// The inverse: the first of the four columns at `offset`.
FLASHBWD_HOST_DEVICE constexpr int32_t permuted_column(int32_t offset, int32_t columns) {
  const int32_t vector = offset % kPermutedBlock / 4;
  return is_permuted(offset, columns) ? offset / kPermutedBlock * kPermutedBlock + (vector % 4 * 2 + vector / 4) * 4
                                      : offset;
}

}  // namespace flashbwd

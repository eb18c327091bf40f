// The dq postprocess for an accumulator in MMA fragment order (dq_block_offset in index/dq_layout.h).
#pragma once

#include <cstdint>

#include "dq_postprocess.cuh"

namespace flashbwd {

// Loads eight columns of a row of the accumulator. `rows` points at the eight rows that contain it. `whole`: these
// rows are stored in 8 x 8 blocks; otherwise, at the end of a sequence, as plain rows.
__device__ __forceinline__ void load_row_of_blocks(const float* rows, int32_t row, int32_t column, int64_t row_stride,
                                                   bool whole, float (&sums)[kPostprocessColumns]) {
  const float* const first = rows + (whole ? dq_block_offset(row, column) : row * row_stride + column);
  const float* const second = rows + (whole ? dq_block_offset(row, column + 1) : row * row_stride + column + 4);
  const float4 a = __ldcg(reinterpret_cast<const float4*>(first)), b = __ldcg(reinterpret_cast<const float4*>(second));
  const float as_rows[kPostprocessColumns] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  const float as_blocks[kPostprocessColumns] = {a.x, b.x, a.y, b.y, a.z, b.z, a.w, b.w};
#pragma unroll
  for (int i = 0; i < kPostprocessColumns; ++i) sums[i] = whole ? as_blocks[i] : as_rows[i];
}

// A thread converts eight columns of one row at a time. Eight neighbouring threads convert the eight rows of a block.
template <typename T>
__global__ void __launch_bounds__(kDqPostprocessThreads)
    dq_postprocess_blocks_kernel(const __grid_constant__ DqPostprocessArguments a) {
  const AttentionBackwardParams& p = a.params;
  const WorkspaceLayout& w = a.workspace;
  const uint8_t* const workspace = static_cast<const uint8_t*>(p.workspace);

  const uint32_t batch_head = blockIdx.x / a.row_blocks;
  const uint32_t row_block = blockIdx.x - batch_head * a.row_blocks;
  const int32_t batch = static_cast<int32_t>(batch_head / p.heads);
  const int32_t head = static_cast<int32_t>(batch_head) - batch * p.heads;
  const Sequence sequence = load_sequence(p, batch);
  const int32_t lanes = a.threads.lanes();
  const int32_t first_row = row_block * a.threads.rows_at_once() + threadIdx.x / (kDqBlock * lanes) * kDqBlock;
  const int32_t row = first_row + threadIdx.x % kDqBlock;
  if (row >= sequence.rows_q) return;

  const float* const rows = reinterpret_cast<const float*>(workspace + w.accumulator_offset) +
                            accumulator_begin(p, sequence, batch, w.row_stride) +
                            dq_row_offset(head, first_row, sequence.rows_q, w.row_stride);
  const bool whole = first_row + kDqBlock <= sequence.rows_q;
  // No key block writes the accumulator rows of a query that sees no key, so they may hold anything.
  const bool live = sees_a_key(visibility_of(p, sequence), row);
  T* const dq = static_cast<T*>(p.dq.data) + batch * p.dq.batch_stride + head * p.dq.head_stride +
                (sequence.begin_q + row) * p.dq.seq_stride;

  const int32_t step = lanes * kPostprocessColumns;
  for (int32_t column = threadIdx.x / kDqBlock % lanes * kPostprocessColumns; column < p.head_dim; column += step) {
    float sums[kPostprocessColumns] = {};
    if (live) load_row_of_blocks(rows, row - first_row, column, w.row_stride, whole, sums);
#pragma unroll
    for (int i = 0; i < kPostprocessColumns; ++i) sums[i] *= p.softmax_scale;
    store_columns(dq + column, sums, column, p.head_dim, a.threads.vectors);
  }
}

}  // namespace flashbwd

// The dq postprocess: dq = softmax_scale * the accumulator, converted to dq's dtype.
// It runs after the main kernel, or overlaps it and waits for each head (HeadsFinished).
#pragma once

#include <cstdint>

#include "../../common/launch_overlap.cuh"
#include "../../common/numeric.cuh"
#include "../../common/ordered.cuh"
#include "../index/dq_layout.h"
#include "../params.h"
#include "../sequence.cuh"
#include "../workspace.h"
#include "launch.h"
#include "store_columns.cuh"

namespace flashbwd {

constexpr int kDqPostprocessThreads = 256;
constexpr int kPostprocessRows = 2;     // per thread, loaded at the same time
constexpr int kPostprocessColumns = 8;  // per thread: 32 bytes of the accumulator, 16 bytes of a 16-bit dq

// How the threads of a CTA are distributed over rows and columns.
struct RowThreads {
  int32_t lanes_log2 = 0;  // log2 of the threads per row
  bool vectors = false;    // kPostprocessColumns columns of the result can be stored at once

  __device__ int32_t lanes() const { return 1 << lanes_log2; }
  __device__ int32_t lane() const { return threadIdx.x & (lanes() - 1); }
  __device__ int32_t rows_at_once() const { return kDqPostprocessThreads >> lanes_log2; }  // from row to row
  __device__ int32_t first_row(uint32_t row_block) const {
    return row_block * rows_at_once() * kPostprocessRows + (threadIdx.x >> lanes_log2);
  }
};

struct SlotRows {
  const float* first;  // this thread's first row in slot 0
  int64_t slot_stride;
  int64_t row_stride;  // a multiple of 4
  int32_t slots;
  bool permuted = false;  // rows are permuted, see permuted_offset in index/dq_layout.h
};

// Writes this thread's rows of the result: scale * the sum over the slots, or 0 for rows that are not `live`. `rows`:
// the number of rows from the thread's first one to the end of the tensor.
template <typename T>
__device__ __forceinline__ void sum_slots(const RowThreads& threads, const SlotRows& in, float scale,
                                          const bool (&live)[kPostprocessRows], T* out, int64_t out_row_stride,
                                          int32_t rows, int32_t columns) {
  const int32_t rows_at_once = threads.rows_at_once();
  const int32_t step = threads.lanes() * kPostprocessColumns;
  for (int32_t column = threads.lane() * kPostprocessColumns; column < columns; column += step) {
    float sums[kPostprocessRows][kPostprocessColumns] = {};
    const bool upper = column + 4 < columns;
    const int32_t lower_offset = in.permuted ? permuted_offset(column, columns) : column;
    const int32_t upper_offset = in.permuted ? permuted_offset(column + 4, columns) : column + 4;
    for (int32_t slot = 0; slot < in.slots; ++slot) {
      float4 loaded[kPostprocessRows][2] = {};
#pragma unroll
      for (int r = 0; r < kPostprocessRows; ++r) {
        const float* row = in.first + slot * in.slot_stride + r * rows_at_once * in.row_stride;
        if (live[r]) loaded[r][0] = __ldcg(reinterpret_cast<const float4*>(row + lower_offset));
        if (live[r] && upper) loaded[r][1] = __ldcg(reinterpret_cast<const float4*>(row + upper_offset));
      }
#pragma unroll
      for (int r = 0; r < kPostprocessRows; ++r) {
        const float* values = reinterpret_cast<const float*>(loaded[r]);
#pragma unroll
        for (int i = 0; i < kPostprocessColumns; ++i) sums[r][i] += values[i];
      }
    }
#pragma unroll
    for (int r = 0; r < kPostprocessRows; ++r) {
      if (r * rows_at_once >= rows) continue;
      T* destination = out + r * rows_at_once * out_row_stride + column;
#pragma unroll
      for (int i = 0; i < kPostprocessColumns; ++i) sums[r][i] *= scale;
      store_columns(destination, sums[r], column, columns, threads.vectors);
    }
  }
}

// The first element of sequence `batch` in the accumulator.
__device__ __forceinline__ int64_t accumulator_begin(const AttentionBackwardParams& p, const Sequence& sequence,
                                                     int32_t batch, int64_t row_stride) {
  const int64_t first_row = p.cu_seqlens_q != nullptr ? sequence.begin_q : int64_t{batch} * p.seqlen_q;
  return first_row * p.heads * row_stride;
}

struct DqPostprocessArguments {
  AttentionBackwardParams params;
  WorkspaceLayout workspace;
  HeadsFinished finished;
  uint32_t row_blocks = 0;  // CTAs per (batch, head)
  RowThreads threads;
};

// Called by one thread: waits until all key blocks of this head have been added.
inline __device__ void wait_for_head(const DqPostprocessArguments& a, const Sequence& sequence, int32_t batch,
                                     int32_t head) {
  const AttentionBackwardParams& p = a.params;
  const int32_t* count = a.finished.counts + int64_t{batch} * p.heads_kv + head / (p.heads / p.heads_kv);
  const auto all =
      static_cast<int32_t>(ceil_div(sequence.rows_k, a.finished.block_n)) * a.finished.counts_per_key_block;
  while (load_acquire(count) < all) __nanosleep(200);
}

template <typename T>
__global__ void __launch_bounds__(kDqPostprocessThreads)
    dq_postprocess_kernel(const __grid_constant__ DqPostprocessArguments a) {
  const AttentionBackwardParams& p = a.params;
  const WorkspaceLayout& w = a.workspace;
  const uint8_t* const workspace = static_cast<const uint8_t*>(p.workspace);

  const uint32_t batch_head = blockIdx.x / a.row_blocks;
  const uint32_t row_block = blockIdx.x - batch_head * a.row_blocks;
  const int32_t batch = static_cast<int32_t>(batch_head / p.heads);
  const int32_t head = static_cast<int32_t>(batch_head) - batch * p.heads;
  const Sequence sequence = load_sequence(p, batch);
  if (a.finished.counts != nullptr) {
    if (threadIdx.x == 0) wait_for_head(a, sequence, batch, head);
    __syncthreads();  // thread 0 has waited for the head
  }
  const Visibility visibility = visibility_of(p, sequence);
  const int32_t first_row = a.threads.first_row(row_block);

  const float* const accumulator = reinterpret_cast<const float*>(workspace + w.accumulator_offset) +
                                   accumulator_begin(p, sequence, batch, w.row_stride) +
                                   dq_row_offset(head, first_row, sequence.rows_q, w.row_stride);
  T* dq = static_cast<T*>(p.dq.data) + batch * p.dq.batch_stride + head * p.dq.head_stride +
          (sequence.begin_q + first_row) * p.dq.seq_stride;
  // No key block writes the accumulator rows of a query that sees no key, so they may hold anything.
  bool live[kPostprocessRows];
#pragma unroll
  for (int r = 0; r < kPostprocessRows; ++r) {
    live[r] = sees_a_key(visibility, first_row + r * a.threads.rows_at_once());
  }

  sum_slots(a.threads, SlotRows{accumulator, 0, w.row_stride, 1, w.dq_permuted}, p.softmax_scale, live, dq,
            p.dq.seq_stride, sequence.rows_q - first_row, p.head_dim);
  // A later launch waits only for this kernel, so this kernel must not end before the main kernel.
  if (a.finished.counts != nullptr && blockIdx.x == gridDim.x - 1) wait_for_previous_launch();
}

struct PartialSumsArguments {
  HeadsView sums, gradient;  // `sums` has heads * slots heads
  int32_t heads = 0, slots = 0, rows = 0, columns = 0;
  uint32_t row_blocks = 0;  // CTAs per (batch, head)
  RowThreads threads;
};

// Sums the slots of a gradient in index order.
template <typename T>
__global__ void __launch_bounds__(kDqPostprocessThreads)
    add_partial_sums_kernel(const __grid_constant__ PartialSumsArguments a) {
  const uint32_t batch_head = blockIdx.x / a.row_blocks;
  const int32_t batch = static_cast<int32_t>(batch_head / a.heads);
  const int32_t head = static_cast<int32_t>(batch_head) - batch * a.heads;
  const int32_t first_row = a.threads.first_row(blockIdx.x - batch_head * a.row_blocks);
  bool live[kPostprocessRows];
#pragma unroll
  for (int r = 0; r < kPostprocessRows; ++r) live[r] = first_row + r * a.threads.rows_at_once() < a.rows;
  const SlotRows sums = {static_cast<const float*>(a.sums.data) + batch * a.sums.batch_stride +
                             int64_t{head} * a.slots * a.sums.head_stride + first_row * a.sums.seq_stride,
                         a.sums.head_stride, a.sums.seq_stride, a.slots};
  T* gradient = static_cast<T*>(a.gradient.data) + batch * a.gradient.batch_stride + head * a.gradient.head_stride +
                first_row * a.gradient.seq_stride;
  sum_slots(a.threads, sums, 1.f, live, gradient, a.gradient.seq_stride, a.rows - first_row, a.columns);
}

}  // namespace flashbwd

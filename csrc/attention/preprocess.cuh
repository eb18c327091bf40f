// Before the main kernel: row statistics (see row_statistics.h), the tables and zeros of the workspace, zeros in the
// gradients of rows that belong to no sequence.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../common/launch_overlap.cuh"
#include "../common/numeric.cuh"
#include "params.h"
#include "row_statistics.h"
#include "schedule.h"
#include "sequence.cuh"
#include "workspace_tables.cuh"

namespace flashbwd {

constexpr int kPreprocessThreads = 256;
constexpr int kPreprocessRows = 2;  // of a thread, read at the same time; 1 and 4 are slower on an H100

struct PreprocessArguments {
  AttentionBackwardParams params;
  WorkspaceInit workspace;
  RowStatistics statistics;
  uint32_t row_blocks = 0;  // CTAs a (batch, head)
  int32_t lanes_log2 = 0;   // threads a row
  bool vectors = false;     // rows of out and dout can be read 16 bytes at a time
};

// Rows [first, last) of packed gradients belong to no sequence: zeros. By all threads of the grid.
inline __device__ void zero_rows(const HeadsView& view, DType dtype, int32_t heads, int32_t columns, int64_t first,
                                 int64_t last) {
  const int64_t elements = (last - first) * heads * columns;
  const int64_t threads = int64_t{gridDim.x} * kPreprocessThreads;
  for (int64_t i = int64_t{blockIdx.x} * kPreprocessThreads + threadIdx.x; i < elements; i += threads) {
    const int64_t row = first + i / columns / heads;
    const int64_t place = row * view.seq_stride + i / columns % heads * view.head_stride + i % columns;
    if (dtype == DType::kFloat32) {
      static_cast<uint32_t*>(view.data)[place] = 0;
    } else {
      static_cast<uint16_t*>(view.data)[place] = 0;
    }
  }
}

// Parts of rowsum(a * b) for `rows` of kPreprocessRows rows, `row_stride_*` elements apart, by the lanes of a row.
template <typename T>
__device__ __forceinline__ void dot_rows(float (&sums)[kPreprocessRows], const T* a, int64_t row_stride_a, const T* b,
                                         int64_t row_stride_b, const bool (&live)[kPreprocessRows], int32_t columns,
                                         int32_t lane, int32_t lanes, bool vectors) {
  constexpr int kVector = 16 / sizeof(T);
  int32_t column = lane;
  if (vectors) {
    for (column = lane * kVector; column + kVector <= columns; column += lanes * kVector) {
      uint4 va[kPreprocessRows], vb[kPreprocessRows];
#pragma unroll
      for (int r = 0; r < kPreprocessRows; ++r) {
        va[r] = live[r] ? *reinterpret_cast<const uint4*>(a + r * row_stride_a + column) : uint4{};
        vb[r] = live[r] ? *reinterpret_cast<const uint4*>(b + r * row_stride_b + column) : uint4{};
      }
#pragma unroll
      for (int r = 0; r < kPreprocessRows; ++r) {
        const T* ea = reinterpret_cast<const T*>(&va[r]);
        const T* eb = reinterpret_cast<const T*>(&vb[r]);
#pragma unroll
        for (int i = 0; i < kVector; ++i) sums[r] += to_float(ea[i]) * to_float(eb[i]);
      }
    }
    column = columns / kVector * kVector + lane;
  }
  for (; column < columns; column += lanes) {
#pragma unroll
    for (int r = 0; r < kPreprocessRows; ++r) {
      if (live[r]) sums[r] += to_float(a[r * row_stride_a + column]) * to_float(b[r * row_stride_b + column]);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kPreprocessThreads) preprocess_kernel(const __grid_constant__ PreprocessArguments a) {
  const AttentionBackwardParams& p = a.params;
  let_launch_behind_begin();

  // Heads first: in (batch, seq, head, dim) memory those of a row are neighbours, and DRAM likes to be read so.
  const uint32_t batch_rows = blockIdx.x / p.heads;
  const int32_t head = static_cast<int32_t>(blockIdx.x - batch_rows * p.heads);
  const int32_t batch = static_cast<int32_t>(batch_rows / a.row_blocks);
  const uint32_t row_block = batch_rows - batch * a.row_blocks;
  const Sequence sequence = load_sequence(p, batch);
  const Visibility visibility = visibility_of(p, sequence);
  const int32_t lanes = 1 << a.lanes_log2;
  const int32_t lane = threadIdx.x & (lanes - 1);
  const int32_t rows_abreast = kPreprocessThreads >> a.lanes_log2;  // from one row of a thread to its next
  const int32_t first_row = row_block * rows_abreast * kPreprocessRows + (threadIdx.x >> a.lanes_log2);

  bool live[kPreprocessRows];
  float lse[kPreprocessRows], delta[kPreprocessRows];
#pragma unroll
  for (int r = 0; r < kPreprocessRows; ++r) {
    const int32_t row = first_row + r * rows_abreast;
    live[r] = sees_a_key(visibility, row);
    delta[r] = 0.f;
    const int64_t lse_row = p.lse.packed_rows ? sequence.begin_q + row : row;
    lse[r] = live[r]
                 ? static_cast<const float*>(
                       p.lse.data)[batch * p.lse.batch_stride + head * p.lse.head_stride + lse_row * p.lse.seq_stride]
                 : INFINITY;
  }
  const int64_t physical = sequence.begin_q + first_row;
  dot_rows(delta,
           static_cast<const T*>(p.out.data) + batch * p.out.batch_stride + head * p.out.head_stride +
               physical * p.out.seq_stride,
           rows_abreast * p.out.seq_stride,
           static_cast<const T*>(p.dout.data) + batch * p.dout.batch_stride + head * p.dout.head_stride +
               physical * p.dout.seq_stride,
           rows_abreast * p.dout.seq_stride, live, p.head_dim_v, lane, lanes, a.vectors);
#pragma unroll
  for (int r = 0; r < kPreprocessRows; ++r) {
    for (int offset = lanes / 2; offset > 0; offset /= 2) delta[r] += __shfl_xor_sync(0xffffffffu, delta[r], offset);
    const int32_t row = first_row + r * rows_abreast;
    if (lane != 0 || row >= RowStatistics::padded(sequence.rows_q)) continue;
    const bool counts = live[r] && !isinf(lse[r]);
    if (counts && p.dlse.data != nullptr) {
      const int64_t dlse_row = p.dlse.packed_rows ? sequence.begin_q + row : row;
      delta[r] -= static_cast<const float*>(
          p.dlse.data)[batch * p.dlse.batch_stride + head * p.dlse.head_stride + dlse_row * p.dlse.seq_stride];
    }
    const int64_t index = a.statistics.index(batch, head, sequence.begin_q) + row;
    constexpr float kLog2E = 1.44269504088896340736f;
    a.statistics.lse_log2[index] = counts ? lse[r] * kLog2E : INFINITY;
    a.statistics.delta[index] = counts ? delta[r] : 0.f;
  }

  if (p.cu_seqlens_q != nullptr) zero_rows(p.dq, p.dq_dtype, p.heads, p.head_dim, p.cu_seqlens_q[p.batch], p.total_q);
  if (p.cu_seqlens_k != nullptr) {
    zero_rows(p.dk, p.dk_dtype, p.heads_kv, p.head_dim, p.cu_seqlens_k[p.batch], p.total_k);
    zero_rows(p.dv, p.dv_dtype, p.heads_kv, p.head_dim_v, p.cu_seqlens_k[p.batch], p.total_k);
  }
  __shared__ int64_t warp_sums[kPreprocessThreads / 32];
  init_workspace<kPreprocessThreads>(a.workspace, blockIdx.x, gridDim.x, warp_sums);
}

}  // namespace flashbwd

// Before the main kernel: row statistics (see row_statistics.h), the tables and zeros of the workspace, zeros in the
// gradients of rows that belong to no sequence.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../common/numeric.cuh"
#include "params.h"
#include "row_statistics.h"
#include "schedule.h"
#include "sequence.cuh"
#include "workspace_tables.cuh"

namespace flashbwd {

constexpr int kPreprocessThreads = 256;
constexpr int kPreprocessLanes = 8;  // threads a row: 8 x 16 bytes is one 128-byte line
constexpr int kPreprocessRows = kPreprocessThreads / kPreprocessLanes;

struct PreprocessArguments {
  AttentionBackwardParams params;
  WorkspaceInit workspace;
  RowStatistics statistics;
  int32_t row_blocks = 0;  // CTAs a (batch, head)
  bool vectors = false;    // rows of out and dout can be read 16 bytes at a time
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

template <typename T>
__device__ float dot_rows(const T* a, const T* b, int32_t columns, int32_t lane, bool vectors) {
  constexpr int kVector = 16 / sizeof(T);
  float sum = 0.f;
  int32_t column = 0;
  if (vectors) {
    for (column = lane * kVector; column + kVector <= columns; column += kPreprocessLanes * kVector) {
      const uint4 va = *reinterpret_cast<const uint4*>(a + column);
      const uint4 vb = *reinterpret_cast<const uint4*>(b + column);
      const T* ea = reinterpret_cast<const T*>(&va);
      const T* eb = reinterpret_cast<const T*>(&vb);
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum += to_float(ea[i]) * to_float(eb[i]);
    }
    column = columns / kVector * kVector;
  }
  for (column += lane; column < columns; column += kPreprocessLanes) sum += to_float(a[column]) * to_float(b[column]);
  return sum;
}

template <typename T>
__global__ void __launch_bounds__(kPreprocessThreads) preprocess_kernel(const __grid_constant__ PreprocessArguments a) {
  const AttentionBackwardParams& p = a.params;

  const int64_t row_block = blockIdx.x % a.row_blocks;
  const int64_t batch_head = blockIdx.x / a.row_blocks;
  const int32_t head = static_cast<int32_t>(batch_head % p.heads);
  const int32_t batch = static_cast<int32_t>(batch_head / p.heads);
  const Sequence sequence = load_sequence(p, batch);
  const int32_t row = static_cast<int32_t>(row_block * kPreprocessRows + threadIdx.x / kPreprocessLanes);
  const int32_t lane = threadIdx.x % kPreprocessLanes;

  if (row < RowStatistics::padded(sequence.rows_q)) {
    bool live = row < sequence.seqlen_q && !key_blocks(visibility_of(p, sequence), row, 1, 1).empty();
    float lse = INFINITY;
    if (live) {
      const int64_t lse_row = p.lse.packed_rows ? sequence.begin_q + row : row;
      lse = static_cast<const float*>(
          p.lse.data)[batch * p.lse.batch_stride + head * p.lse.head_stride + lse_row * p.lse.seq_stride];
      live = !isinf(lse);
    }
    float delta = 0.f;
    if (live) {
      const int64_t physical = sequence.begin_q + row;
      const T* out = static_cast<const T*>(p.out.data) + batch * p.out.batch_stride + head * p.out.head_stride +
                     physical * p.out.seq_stride;
      const T* dout = static_cast<const T*>(p.dout.data) + batch * p.dout.batch_stride + head * p.dout.head_stride +
                      physical * p.dout.seq_stride;
      delta = dot_rows(out, dout, p.head_dim_v, lane, a.vectors);
    }
#pragma unroll
    for (int offset = kPreprocessLanes / 2; offset > 0; offset /= 2) {
      delta += __shfl_xor_sync(0xffffffffu, delta, offset);  // kPreprocessLanes divides a warp, rows pad to whole warps
    }
    if (lane == 0) {
      if (live && p.dlse.data != nullptr) {
        const int64_t dlse_row = p.dlse.packed_rows ? sequence.begin_q + row : row;
        delta -= static_cast<const float*>(
            p.dlse.data)[batch * p.dlse.batch_stride + head * p.dlse.head_stride + dlse_row * p.dlse.seq_stride];
      }
      const int64_t index = a.statistics.index(batch, head, sequence.begin_q) + row;
      constexpr float kLog2E = 1.44269504088896340736f;
      a.statistics.lse_log2[index] = live ? lse * kLog2E : INFINITY;
      a.statistics.delta[index] = delta;
    }
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

// The preprocess, which runs before the main kernel: computes delta and the scaled LSE (lse_delta.h), zeroes the
// accumulator and semaphores (init_workspace.cuh), and zeroes the gradients of rows that belong to no sequence.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../../common/hopper.cuh"
#include "../../common/launch_overlap.cuh"
#include "../../common/numeric.cuh"
#include "../../common/ordered.cuh"
#include "../index/arithmetic.h"
#include "../params.h"
#include "../sequence.cuh"
#include "init_workspace.cuh"
#include "launch.h"
#include "lse_delta.h"

namespace flashbwd {

constexpr int kPreprocessThreads = 256;
constexpr int kPreprocessRows = 2;       // per thread, loaded at the same time; 1 and 4 are slower on an H100
constexpr int kOverlappedThreads = 512;  // per CTA of overlapped_preprocess_kernel
constexpr int kOverlappedRows = 8;       // per thread of overlapped_preprocess_kernel

struct PreprocessArguments {
  AttentionBackwardParams params;
  WorkspaceInit workspace;
  LseDelta lse_delta;
  RowsReadyWriter ready;
  uint32_t row_blocks = 0;  // CTAs per (batch, head)
  int32_t lanes_log2 = 0;   // log2 of the threads per row
  bool vectors = false;     // rows of out and dout can be loaded 16 bytes at a time
};

// Zeroes rows [first, last) of a packed gradient, which belong to no sequence. Called by all threads of the grid.
inline __device__ void zero_rows(const HeadsView& view, DType dtype, int32_t heads, int32_t columns, int64_t first,
                                 int64_t last) {
  const int64_t elements = (last - first) * heads * columns;
  const int64_t threads = int64_t{gridDim.x} * kPreprocessThreads;
  for (int64_t i = int64_t{blockIdx.x} * kPreprocessThreads + threadIdx.x; i < elements; i += threads) {
    const int64_t row = first + i / columns / heads;
    const int64_t index = row * view.seq_stride + i / columns % heads * view.head_stride + i % columns;
    if (dtype == DType::kFloat32) {
      static_cast<uint32_t*>(view.data)[index] = 0;
    } else {
      static_cast<uint16_t*>(view.data)[index] = 0;
    }
  }
}

// Adds this lane's columns of rowsum(a * b) for kPreprocessRows rows that are `row_stride_*` elements apart.
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
  allow_next_launch();

  // Consecutive CTAs process consecutive heads of the same rows. These are adjacent in (batch, seq, head, dim) memory,
  // which makes the DRAM accesses more sequential.
  const uint32_t batch_rows = blockIdx.x / p.heads;
  const int32_t head = static_cast<int32_t>(blockIdx.x - batch_rows * p.heads);
  const int32_t batch = static_cast<int32_t>(batch_rows / a.row_blocks);
  const uint32_t row_block = batch_rows - batch * a.row_blocks;
  const Sequence sequence = load_sequence(p, batch);
  const Visibility visibility = visibility_of(p, sequence);
  const int32_t lanes = 1 << a.lanes_log2;
  const int32_t lane = threadIdx.x & (lanes - 1);
  const int32_t rows_at_once = kPreprocessThreads >> a.lanes_log2;  // the distance between rows of one thread
  const int32_t first_row = row_block * rows_at_once * kPreprocessRows + (threadIdx.x >> a.lanes_log2);

  bool live[kPreprocessRows];
  float lse[kPreprocessRows], delta[kPreprocessRows];
#pragma unroll
  for (int r = 0; r < kPreprocessRows; ++r) {
    const int32_t row = first_row + r * rows_at_once;
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
           rows_at_once * p.out.seq_stride,
           static_cast<const T*>(p.dout.data) + batch * p.dout.batch_stride + head * p.dout.head_stride +
               physical * p.dout.seq_stride,
           rows_at_once * p.dout.seq_stride, live, p.head_dim_v, lane, lanes, a.vectors);
#pragma unroll
  for (int r = 0; r < kPreprocessRows; ++r) {
    for (int offset = lanes / 2; offset > 0; offset /= 2) delta[r] += __shfl_xor_sync(0xffffffffu, delta[r], offset);
    const int32_t row = first_row + r * rows_at_once;
    if (lane != 0 || row >= LseDelta::padded(sequence.rows_q)) continue;
    const bool counts = live[r] && !sees_nothing(lse[r]);
    if (counts && p.dlse.data != nullptr) {
      const int64_t dlse_row = p.dlse.packed_rows ? sequence.begin_q + row : row;
      delta[r] -= static_cast<const float*>(
          p.dlse.data)[batch * p.dlse.batch_stride + head * p.dlse.head_stride + dlse_row * p.dlse.seq_stride];
    }
    const int64_t index = a.lse_delta.index(batch, head, sequence.begin_q) + row;
    a.lse_delta.lse_log2[index] = counts ? lse[r] * kLog2E : INFINITY;
    a.lse_delta.delta[index] = counts ? delta[r] : 0.f;
  }

  if (p.cu_seqlens_q != nullptr) zero_rows(p.dq, p.dq_dtype, p.heads, p.head_dim, p.cu_seqlens_q[p.batch], p.total_q);
  if (p.cu_seqlens_k != nullptr) {
    zero_rows(p.dk, p.dk_dtype, p.heads_kv, p.head_dim, p.cu_seqlens_k[p.batch], p.total_k);
    zero_rows(p.dv, p.dv_dtype, p.heads_kv, p.head_dim_v, p.cu_seqlens_k[p.batch], p.total_k);
  }
  init_workspace<kPreprocessThreads>(a.workspace, blockIdx.x, gridDim.x);
}

// A block of rows of one head in overlapped_preprocess_kernel. The kernel visits blocks in the order in which the main
// kernel needs them: heads_per_group heads at a time, and in such a group, each block of rows of all heads in turn.
struct RowBlock {
  int32_t batch, head, first_row;  // first_row: this thread's first row
  int64_t flag;                    // index of its flag

  __device__ __forceinline__ RowBlock(const PreprocessArguments& a, uint32_t block) {
    const uint32_t all_heads = a.params.batch * a.params.heads, of_group = a.ready.heads_per_group * a.row_blocks;
    const uint32_t group = block / of_group, first_head = group * a.ready.heads_per_group,
                   within = block - group * of_group;
    const uint32_t heads = min(static_cast<uint32_t>(a.ready.heads_per_group), all_heads - first_head);
    const uint32_t row_block = within / heads, batch_head = first_head + (within - row_block * heads);
    batch = static_cast<int32_t>(batch_head / a.params.heads);
    head = static_cast<int32_t>(batch_head) - batch * a.params.heads;
    first_row = row_block * ((kOverlappedThreads >> a.lanes_log2) * kOverlappedRows) + (threadIdx.x >> a.lanes_log2);
    flag = int64_t{batch_head} * a.ready.flags_per_head + row_block;
  }
};

// Loads 16 bytes if `live`, otherwise returns zeros. Uses a predicate instead of a branch.
__device__ __forceinline__ uint4 load_vector_if(bool live, const void* source) {
  uint4 v;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@p ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(source), "r"(static_cast<int32_t>(live)));
  return v;
}

// The loads of one thread: one 16-byte vector of each of its rows of a block, and the LSE of the row that it finishes.
// Lane i < kOverlappedRows finishes the thread's row i.
template <typename T>
struct OverlappedRows {
  const PreprocessArguments& a;
  const AttentionBackwardParams& p = a.params;
  const int32_t lane = threadIdx.x & ((1 << a.lanes_log2) - 1);
  const int32_t rows_at_once = kOverlappedThreads >> a.lanes_log2;
  uint4 out[kOverlappedRows], dout[kOverlappedRows];
  float lse = INFINITY;
  // Source of the block that is being prefetched.
  const T *out_row, *dout_row;
  int32_t row, live_begin, live_end;

  __device__ explicit OverlappedRows(const PreprocessArguments& arguments) : a(arguments) {}

  // Prepares the loads of a block. load(0), load(1), ... then issue them in this order.
  __device__ __forceinline__ void begin(const RowBlock& block) {
    const Visibility v = visibility_of(p, load_sequence(p, block.batch));
    const bool any = v.lo < v.hi && v.seqlen_k > 0;  // as in sees_a_key
    const int32_t column = lane * static_cast<int32_t>(16 / sizeof(T));
    live_begin = max(0, 1 - v.hi);
    live_end = any ? min(v.seqlen_q, v.seqlen_k - v.lo) : 0;
    const int32_t finished_row = block.first_row + lane * rows_at_once;
    lse = lane < kOverlappedRows && live_begin <= finished_row && finished_row < live_end
              ? static_cast<const float*>(p.lse.data)[block.batch * p.lse.batch_stride +
                                                      block.head * p.lse.head_stride + finished_row * p.lse.seq_stride]
              : INFINITY;
    if (column >= p.head_dim_v) live_end = 0;
    row = block.first_row;
    out_row = static_cast<const T*>(p.out.data) + block.batch * p.out.batch_stride + block.head * p.out.head_stride +
              row * p.out.seq_stride + column;
    dout_row = static_cast<const T*>(p.dout.data) + block.batch * p.dout.batch_stride +
               block.head * p.dout.head_stride + row * p.dout.seq_stride + column;
  }

  __device__ __forceinline__ void load(int r) {
    const bool live = live_begin <= row && row < live_end;
    out[r] = load_vector_if(live, out_row);
    dout[r] = load_vector_if(live, dout_row);
    row += rows_at_once;
    out_row += rows_at_once * p.out.seq_stride;
    dout_row += rows_at_once * p.dout.seq_stride;
  }

  // This thread's columns of delta of its row r.
  __device__ __forceinline__ float product(int r) const {
    const T* const ea = reinterpret_cast<const T*>(&out[r]);
    const T* const eb = reinterpret_cast<const T*>(&dout[r]);
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 16 / static_cast<int>(sizeof(T)); ++i) sum += to_float(ea[i]) * to_float(eb[i]);
    return sum;
  }

  // Sums over the lanes of a row. The lane gets the sum of row lane % kOverlappedRows: in each exchange it keeps half
  // of its rows and sends the other half.
  __device__ __forceinline__ float sum_lanes(float (&sums)[kOverlappedRows]) const {
#pragma unroll
    for (int half = kOverlappedRows / 2; half > 0; half /= 2) {
      const bool upper = lane & half;
#pragma unroll
      for (int r = 0; r < half; ++r) {
        const float mine = upper ? sums[r + half] : sums[r], other = upper ? sums[r] : sums[r + half];
        sums[r] = mine + __shfl_xor_sync(0xffffffffu, other, half);
      }
    }
    for (int offset = kOverlappedRows; offset < 1 << a.lanes_log2; offset *= 2) {
      sums[0] += __shfl_xor_sync(0xffffffffu, sums[0], offset);
    }
    return sums[0];
  }

  __device__ __forceinline__ void store(const RowBlock& block, float delta, float lse_of_row) const {
    const int32_t finished_row = block.first_row + lane * rows_at_once;
    if (lane >= kOverlappedRows || finished_row >= LseDelta::padded(p.seqlen_q)) return;
    const bool counts = !sees_nothing(lse_of_row);
    if (counts && p.dlse.data != nullptr) {
      delta -=
          static_cast<const float*>(p.dlse.data)[block.batch * p.dlse.batch_stride + block.head * p.dlse.head_stride +
                                                 finished_row * p.dlse.seq_stride];
    }
    const int64_t index = a.lse_delta.index(block.batch, block.head, 0) + finished_row;
    a.lse_delta.lse_log2[index] = counts ? lse_of_row * kLog2E : INFINITY;
    a.lse_delta.delta[index] = counts ? delta : 0.f;
  }
};

// Requires dense inputs, rows of whole 16-byte vectors, and at least kOverlappedRows threads per row. Few CTAs run,
// one per SM, while the main kernel starts on the other SMs. To keep these CTAs busy, the loads of the next block are
// in flight while the current block is summed.
template <typename T>
__global__ void __launch_bounds__(kOverlappedThreads, 1)
    overlapped_preprocess_kernel(const __grid_constant__ PreprocessArguments a) {
  // CTA i writes row blocks i, i + gridDim.x, ... It clears the flags that it will set.
  const uint32_t blocks = a.params.batch * a.params.heads * a.row_blocks;
  for (uint32_t block = blockIdx.x + threadIdx.x * gridDim.x; block < blocks; block += gridDim.x * kOverlappedThreads) {
    a.ready.flags[RowBlock(a, block).flag] = 0;
  }
  init_workspace<kOverlappedThreads>(a.workspace, blockIdx.x, gridDim.x);
  __threadfence();
  __syncthreads();  // all writes so far are visible to the next launch
  allow_next_launch();
  if (blockIdx.x >= blocks) return;
  OverlappedRows<T> rows(a);
  rows.begin(RowBlock(a, blockIdx.x));
#pragma unroll
  for (int r = 0; r < kOverlappedRows; ++r) rows.load(r);
#pragma unroll 1
  for (uint32_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const float lse = rows.lse;
    // after the last block the prefetched rows are not used
    rows.begin(RowBlock(a, min(block + gridDim.x, blocks - 1)));
    float sums[kOverlappedRows];
#pragma unroll
    for (int r = 0; r < kOverlappedRows; ++r) {
      sums[r] = rows.product(r);
      rows.load(r);
    }
    const RowBlock here(a, block);
    rows.store(here, rows.sum_lanes(sums), lse);
    __syncthreads();  // all threads have written lse and delta of their rows
    if (threadIdx.x == 0) {
      __threadfence();
      store_release(a.ready.flags + here.flag, kRowsReady);
    }
  }
}

}  // namespace flashbwd

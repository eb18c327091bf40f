// dq from its fp32 sums beside the kernel, on multiprocessors that it leaves or has left. Sums are finished head by
// head, or in narrow windows row by row. A warp takes the next block of rows, brings it to shared memory as one copy,
// and asks for the next one meanwhile: warps wait for memory on their own, 192 KB a multiprocessor on their way.
#pragma once

#include "../../common/hopper.cuh"
#include "../../common/launch_overlap.cuh"
#include "../../common/ordered.cuh"
#include "../convert_dq.cuh"
#include "../params.h"
#include "../schedule.h"
#include "../sequence.cuh"

namespace flashbwd::sm90 {

constexpr int kConversionWarps = 12;
constexpr int kConversionBytes = 16 << 10;  // of sums, in the buffer of a warp

struct Conversion {
  AttentionBackwardParams attention;
  HeadsFinished finished;
  int32_t counts_a_head = 1;    // or, of narrow windows, one for each key block
  int32_t heads_abreast = 1;    // query heads whose rows are finished at the same time
  const float* sums = nullptr;  // (batch * heads, seqlen_q, stride)
  int32_t stride = 0;           // floats from one row to the next
  int32_t rows = 0;             // of a block
  int32_t blocks_of_head = 0;
  int32_t blocks = 0;
  int32_t* taken = nullptr;  // blocks that a warp has taken, 0 at the start
  bool vectors = false;      // kConvertColumns columns of dq can be written at once
};

// Lists of heads, as the kernel takes them, in each the same rows of all heads.
inline __device__ Job conversion_block(const Conversion& c, int32_t number) {
  return dense_job(number, c.attention.batch, c.attention.heads, c.blocks_of_head, c.heads_abreast);
}

// By one thread: the key blocks that these rows see have been added to them, or all to their head.
inline __device__ bool is_finished(const Conversion& c, const Job& block, const Visibility& v) {
  const AttentionBackwardParams& p = c.attention;
  const int64_t head_kv = int64_t{block.batch} * p.heads_kv + block.head / (p.heads / p.heads_kv);
  const int32_t* const counts = c.finished.counts + head_kv * c.counts_a_head;
  if (c.counts_a_head == 1) {
    const auto all = static_cast<int32_t>(ceil_div(p.seqlen_k, c.finished.block_n));
    return load_acquire(counts) >= all * c.finished.counts_per_key_block;
  }
  const BlockRange seen = key_blocks(v, block.key_block, c.rows, c.finished.block_n);
  for (int32_t n = seen.begin; n < seen.end; ++n) {
    if (load_acquire(counts + n) < c.finished.counts_per_key_block) return false;
  }
  return true;
}

// By a warp: rows of sums in shared memory to dq.
template <typename T>
__device__ __forceinline__ void convert_rows(const Conversion& c, const Job& block, const Visibility& v,
                                             const float* sums, int32_t lane) {
  const AttentionBackwardParams& p = c.attention;
  const int32_t lanes_log2 = 32 - __clz((p.head_dim - 1) / kConvertColumns);  // of a row
  const int32_t column = (lane & ((1 << lanes_log2) - 1)) * kConvertColumns, abreast = 32 >> lanes_log2;
  if (column >= p.head_dim) return;
  const int32_t first_row = block.key_block * c.rows, rows = min(c.rows, p.seqlen_q - first_row);
  const int32_t lower_place = parted_place(column, p.head_dim), upper_place = parted_place(column + 4, p.head_dim);
  T* const dq = static_cast<T*>(p.dq.data) + block.batch * p.dq.batch_stride + block.head * p.dq.head_stride + column;
#pragma unroll 4
  for (int32_t row = lane >> lanes_log2; row < rows; row += abreast) {
    const float* const source = sums + row * c.stride;
    T* const place = dq + (first_row + row) * p.dq.seq_stride;
    // What no key block sees, nobody may have written.
    const bool live = sees_a_key(v, first_row + row), upper = column + 4 < p.head_dim;
    const float4 a = live ? *reinterpret_cast<const float4*>(source + lower_place) : float4{};
    const float4 b = live && upper ? *reinterpret_cast<const float4*>(source + upper_place) : float4{};
    const float scale = p.softmax_scale;
    const float values[kConvertColumns] = {a.x * scale, a.y * scale, a.z * scale, a.w * scale,
                                           b.x * scale, b.y * scale, b.z * scale, b.w * scale};
    if (c.vectors && column + kConvertColumns <= p.head_dim) {
      store_columns(place, values);
    } else {
#pragma unroll
      for (int i = 0; i < kConvertColumns; ++i) {
        if (column + i < p.head_dim) place[i] = from_float<T>(values[i]);
      }
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kConversionWarps * 32, 1) conversion_kernel(const __grid_constant__ Conversion c) {
  extern __shared__ __align__(128) float conversion_buffers[];
  __shared__ uint64_t full[kConversionWarps];
  const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* const sums = conversion_buffers + warp * (kConversionBytes / 4);
  if (lane == 0) {
    mbarrier_init(&full[warp], 1);
    fence_mbarrier_init();
  }
  __syncwarp();
  const auto visibility = [&](const Job& block) {
    return visibility_of(c.attention, load_sequence(c.attention, block.batch));
  };

  int32_t next = 0;  // of the first lane
  bool ready = false;
  if (lane == 0) next = atomicAdd(c.taken, 1);
  for (uint32_t phase = 0;; phase ^= 1) {
    const int32_t number = __shfl_sync(0xffffffffu, next, 0);
    if (number >= c.blocks) break;
    const Job block = conversion_block(c, number);
    const Visibility v = visibility(block);
    if (lane == 0) {
      while (!ready && !is_finished(c, block, v)) __nanosleep(200);
      fence_async_global();  // sums that are seen to be complete are so to the copy engine
      const int32_t first_row = block.key_block * c.rows;
      const int64_t sums_row = (int64_t{block.batch} * c.attention.heads + block.head) * c.attention.seqlen_q;
      const uint32_t bytes = min(c.rows, c.attention.seqlen_q - first_row) * c.stride * 4;
      mbarrier_arrive_expect(&full[warp], bytes);
      bulk_load(sums, c.sums + (sums_row + first_row) * c.stride, bytes, &full[warp]);
      next = atomicAdd(c.taken, 1);
      if (next < c.blocks) {
        const Job behind = conversion_block(c, next);
        ready = is_finished(c, behind, visibility(behind));
      }
    }
    mbarrier_wait(&full[warp], phase);
    convert_rows<T>(c, block, v, sums, lane);
    __syncwarp();  // the sums are read
  }
  wait_for_launch_before();  // launches behind this one wait for it alone
}

}  // namespace flashbwd::sm90

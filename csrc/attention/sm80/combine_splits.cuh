// Runs after the main kernel if work tiles were split: sums dk and dv over the CTAs of each work tile, in order.
#pragma once

#include <cstdint>

#include "../pre_post/store_columns.cuh"
#include "scheduler.cuh"

namespace flashbwd::sm80 {

constexpr int kCombineThreads = 256;
constexpr int kCombineRows = 16;  // per CTA

struct CombineSplitsArguments {
  KernelParams params;
  int32_t block_n = 0;
  bool dk_vectors = false, dv_vectors = false;  // four columns of the gradient can be stored at once
};

// Sums kCombineRows rows of a key block, from first_row on. A thread sums four columns of one row at a time.
__device__ __forceinline__ void sum_rows(const CombineSplitsArguments& a, const GradientTarget& target, bool vectors,
                                         const WorkTileIndex& found, int32_t split_tile, int32_t first_row) {
  const int32_t row_vectors = static_cast<int32_t>(target.partial_row_stride / 4);
  const int32_t first_key = found.key_block * a.block_n;
  const int32_t rows = min(a.params.attention.seqlen_k - first_key - first_row, kCombineRows);
  const int64_t cta_vectors = int64_t{a.block_n} * row_vectors;
  const float4* const source = reinterpret_cast<const float4*>(target.partial_sums) +
                               split_tile * int64_t{a.params.schedule.split_tiles.splits} * cta_vectors +
                               int64_t{first_row} * row_vectors;
  const int64_t first = found.batch * target.view.batch_stride + found.head * target.view.head_stride +
                        int64_t{first_key + first_row} * target.view.seq_stride;
  for (int32_t i = threadIdx.x; i < rows * row_vectors; i += kCombineThreads) {
    float4 sum = source[i];
    for (int32_t split = 1; split < a.params.schedule.split_tiles.splits; ++split) {
      const float4 partial = source[i + split * cta_vectors];
      sum.x += partial.x;
      sum.y += partial.y;
      sum.z += partial.z;
      sum.w += partial.w;
    }
    const int32_t row = i / row_vectors, column = i % row_vectors * 4;
    const int64_t offset = first + row * target.view.seq_stride + column;
    const float values[4] = {sum.x, sum.y, sum.z, sum.w};
    if (target.dtype == DType::kFloat32) {
      store_columns(static_cast<float*>(target.view.data) + offset, values, column, target.columns, vectors);
    } else if (target.dtype == DType::kBFloat16) {
      store_columns(static_cast<__nv_bfloat16*>(target.view.data) + offset, values, column, target.columns, vectors);
    } else {
      store_columns(static_cast<__half*>(target.view.data) + offset, values, column, target.columns, vectors);
    }
  }
}

// blockIdx.x: split work tile; blockIdx.y: group of rows of its key block; blockIdx.z: dk (0) or dv (1).
__global__ void __launch_bounds__(kCombineThreads)
    combine_splits_kernel(const __grid_constant__ CombineSplitsArguments a) {
  const auto split_tile = static_cast<int32_t>(blockIdx.x);
  const auto first_row = static_cast<int32_t>(blockIdx.y) * kCombineRows;
  const WorkTileIndex found =
      work_tile_at(a.params, static_cast<int32_t>(a.params.schedule.unsplit_work_tiles) + split_tile, a.block_n);
  const bool is_dv = blockIdx.z != 0;
  sum_rows(a, is_dv ? a.params.dv : a.params.dk, is_dv ? a.dv_vectors : a.dk_vectors, found, split_tile, first_row);
}

}  // namespace flashbwd::sm80

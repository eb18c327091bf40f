// After the main kernel, where CTAs shared key blocks: dk and dv as sums over the splits, in their order.
#pragma once

#include <cstdint>

#include "../../common/numeric.cuh"
#include "kernel_params.h"

namespace flashbwd::sm80 {

constexpr int kSumSplitsThreads = 256;

struct SplitGradient {
  GradientTarget source;  // fp32, (splits, rows, heads, row stride)
  HeadsView view;         // what is written
  DType dtype = DType::kFloat32;
  bool vectors = false;  // four columns can be written at once
};

struct SumSplitsArguments {
  SplitGradient gradients[2];
  int32_t heads = 0;
  int32_t seqlen_k = 0;
  int32_t splits = 0;
  int64_t rows = 0;  // of all batches
};

template <typename T>
__device__ __forceinline__ void store_columns(T* place, float4 value, int32_t left, bool vectors) {
  if (vectors && left >= 4) {
    if constexpr (sizeof(T) == 4) {
      *reinterpret_cast<float4*>(place) = value;
    } else {
      *reinterpret_cast<uint2*>(place) = make_uint2(pack2<T>(value.x, value.y), pack2<T>(value.z, value.w));
    }
    return;
  }
  const float values[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < left) place[i] = from_float<T>(values[i]);
  }
}

// A thread sums four columns of one row of one head at a time.
__global__ void __launch_bounds__(kSumSplitsThreads) sum_splits_kernel(const __grid_constant__ SumSplitsArguments a) {
  const int64_t threads = int64_t{gridDim.x} * kSumSplitsThreads;
  for (const SplitGradient& g : a.gradients) {
    const int64_t row_vectors = g.source.view.head_stride / 4;
    const int64_t vectors = a.rows * a.heads * row_vectors, split_vectors = g.source.split_stride / 4;
    const float4* const source = static_cast<const float4*>(g.source.view.data);
    for (int64_t i = int64_t{blockIdx.x} * kSumSplitsThreads + threadIdx.x; i < vectors; i += threads) {
      float4 sum = source[i];
      for (int32_t split = 1; split < a.splits; ++split) {
        const float4 part = source[i + split * split_vectors];
        sum.x += part.x;
        sum.y += part.y;
        sum.z += part.z;
        sum.w += part.w;
      }
      const int32_t column = static_cast<int32_t>(i % row_vectors) * 4;
      const int64_t head = i / row_vectors % a.heads, row = i / row_vectors / a.heads;
      const int64_t batch = row / a.seqlen_k;
      const int64_t place = batch * g.view.batch_stride + (row - batch * a.seqlen_k) * g.view.seq_stride +
                            head * g.view.head_stride + column;
      const int32_t left = g.source.columns - column;
      if (g.dtype == DType::kFloat32) {
        store_columns(static_cast<float*>(g.view.data) + place, sum, left, g.vectors);
      } else if (g.dtype == DType::kBFloat16) {
        store_columns(static_cast<__nv_bfloat16*>(g.view.data) + place, sum, left, g.vectors);
      } else {
        store_columns(static_cast<__half*>(g.view.data) + place, sum, left, g.vectors);
      }
    }
  }
}

}  // namespace flashbwd::sm80

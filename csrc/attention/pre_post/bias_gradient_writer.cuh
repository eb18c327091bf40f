// Writes the gradient of attn_bias from tiles of dS to dbias or its scratch, as BiasGradientMode says. A warp has dS of
// 16 keys as transposed accumulators. Tiles that no work tile visits hold zeros before the kernel starts.
#pragma once

#include "../../common/numeric.cuh"
#include "bias_gradient.h"

namespace flashbwd {

// T: of q. `work` has the batch and the visibility of the sequence.
template <typename T, int kBlockM, typename WorkTile>
struct BiasGradientWriter {
  static constexpr int kValues = kBlockM / 2;

  const BiasGradient& g;
  const AttentionBackwardParams& attention;
  const WorkTile& work;
  int32_t lane;
  int32_t group;  // index of these 16 keys within the longest sequence: the slot of row sums
  int32_t j0;     // this thread's first key; its other key is j0 + 8
  float key_sums[2] = {};

  // Adds dS of a tile before the derivative of the softcap. i0: this thread's first query.
  __device__ __forceinline__ void add(const float (&ds)[kValues], int32_t head, int32_t i0) {
    const int64_t plane = work.batch * g.batch_stride + head * g.head_stride;
    switch (g.mode) {
      case BiasGradientMode::kNone:
        return;
      case BiasGradientMode::kStore:
        if (g.dtype == DType::kFloat32) {
          store<float>(ds, plane, i0);
        } else {
          store<T>(ds, plane, i0);
        }
        return;
      case BiasGradientMode::kAdd:
#pragma unroll
        for (int v = 0; v < kValues; ++v) {
          if (ds[v] != 0.f) {
            atomicAdd(static_cast<float*>(g.data) + plane + query(i0, v) * g.row_stride + key(v) * g.col_stride, ds[v]);
          }
        }
        return;
      case BiasGradientMode::kKeySums:
#pragma unroll
        for (int v = 0; v < kValues; ++v) key_sums[v % 4 / 2] += ds[v];
        return;
      case BiasGradientMode::kRowSums:
        return store_row_sums(ds, plane, i0);
    }
  }

  // Called after the last tile of a head.
  __device__ __forceinline__ void add_key_sums(int32_t head) {
    if (g.mode != BiasGradientMode::kKeySums) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = key_sums[half];
      key_sums[half] = 0.f;
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const int32_t j = j0 + 8 * half;
      if (lane % 4 == 0 && j < attention.seqlen_k) {
        static_cast<float*>(g.data)[work.batch * g.batch_stride + head * g.head_stride + j * g.col_stride] += sum;
      }
    }
  }

 private:
  static __device__ __forceinline__ int32_t query(int32_t i0, int v) { return i0 + v / 4 * 8 + v % 2; }
  __device__ __forceinline__ int32_t key(int v) const { return j0 + v % 4 / 2 * 8; }

  template <typename Element>
  __device__ __forceinline__ void store(const float (&ds)[kValues], int64_t plane, int32_t i0) const {
    Element* row = static_cast<Element*>(g.data) + plane + i0 * g.row_stride + j0 * g.col_stride;
    const int32_t queries = attention.seqlen_q - i0, keys = attention.seqlen_k - j0;
    const int64_t second_key = 8 * g.col_stride;
#pragma unroll
    for (int v = 0; v < kValues; v += 4) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (v / 4 * 8 + e % 2 < queries && e / 2 * 8 < keys) {
          row[(e % 2 != 0 ? g.row_stride : 0) + (e / 2 != 0 ? second_key : 0)] = from_float<Element>(ds[v + e]);
        }
      }
      row += 8 * g.row_stride;
    }
  }

  __device__ __forceinline__ void store_row_sums(const float (&ds)[kValues], int64_t plane, int32_t i0) const {
#pragma unroll
    for (int c = 0; c < kValues / 4; ++c) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        float sum = ds[4 * c + odd] + ds[4 * c + 2 + odd];
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        const int32_t i = i0 + 8 * c + odd;
        if (lane < 4 && i < work.visibility.seqlen_q) {
          static_cast<float*>(g.data)[plane + group * g.slot_stride + i * g.row_stride] = sum;
        }
      }
    }
  }
};

}  // namespace flashbwd

// Stores a tile of a gradient from a warp's MMA accumulators to rows in global memory.
#pragma once

#include <cstdint>

#include "../../common/mma.cuh"
#include "kernel_params.h"

namespace flashbwd::sm80 {

// Row tiles have 16 rows. Column tiles have 8 columns and come in pairs, which are kPairColumns apart.
template <typename T, int kRowTiles, int kColumnTiles, int kPairColumns = 16>
struct StoreTile {
  using Tile = float[kRowTiles][kColumnTiles][4];

  // `offset`: element at column 0 of the lane's first row, which is row lane / 4 of the warp. `rows`: how many rows
  // exist from this row on.
  static __device__ __forceinline__ void store(const GradientTarget& target, int64_t offset, int32_t rows,
                                               int32_t first_column, const Tile& tile) {
    if constexpr (sizeof(T) == 2) {
      if (target.vectors) {
        store_vectors(target, offset, rows, first_column, tile);
        return;
      }
    }
    const int32_t lane = threadIdx.x % 32;
    const int64_t row_stride = target.view.seq_stride;
    const int32_t column = first_column + lane % 4 * 2;
    offset += column;
#pragma unroll
    for (int mt = 0; mt < kRowTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t row = mt * 16 + half * 8;
        if (row >= rows) continue;
#pragma unroll
        for (int nt = 0; nt < kColumnTiles; ++nt) {
          const int32_t tile_column = nt / 2 * kPairColumns + nt % 2 * 8;
          const int64_t index = offset + row * row_stride + tile_column;
          const float low = tile[mt][nt][half * 2], high = tile[mt][nt][half * 2 + 1];
          const int32_t left = target.columns - column - tile_column;
          if (target.dtype == DType::kFloat32) {
            store_pair(static_cast<float*>(target.view.data) + index, low, high, left, target.aligned);
          } else if constexpr (sizeof(T) == 2) {
            store_pair(static_cast<T*>(target.view.data) + index, low, high, left, target.aligned);
          }
        }
      }
    }
  }

 private:
  // Stores eight columns of a row per lane. The four lanes of a row transpose four column tiles, so that each lane has
  // all columns of one tile. If only two tiles are left, only the first two of the lanes store.
  static __device__ __forceinline__ void store_vectors(const GradientTarget& target, int64_t offset, int32_t rows,
                                                       int32_t first_column, const Tile& tile) {
    const int32_t lane = threadIdx.x % 32;
    const int64_t row_stride = target.view.seq_stride;
    const int32_t column = first_column + lane % 4 / 2 * kPairColumns + lane % 2 * 8;
    T* destination = static_cast<T*>(target.view.data) + offset + column;
#pragma unroll
    for (int row = 0; row < kRowTiles * 16; row += 8, destination += 8 * row_stride) {
#pragma unroll
      for (int nt = 0; nt < kColumnTiles; nt += 4) {
        uint32_t words[4] = {};
#pragma unroll
        for (int i = 0; i < 4 && nt + i < kColumnTiles; ++i) {
          const float* const pair = tile[row / 16][nt + i] + row % 16 / 4;
          words[i] = pack2<T>(pair[0], pair[1]);
        }
        transpose_in_fours(words);
        const int32_t tile_column = nt / 2 * kPairColumns;
        const bool exists = nt + 4 <= kColumnTiles || lane % 4 < 2;
        if (row < rows && exists && column + tile_column < target.columns) {
          // The compiler often splits an assignment of a uint4 into four stores.
          __stcg(reinterpret_cast<uint4*>(destination + tile_column),
                 make_uint4(words[0], words[1], words[2], words[3]));
        }
      }
    }
  }

  // Transposes 4 x 4 words among each four lanes: word i of lane j goes to word j of lane i.
  static __device__ __forceinline__ void transpose_in_fours(uint32_t (&words)[4]) {
    const bool upper = threadIdx.x & 2, odd = threadIdx.x & 1;
    const uint32_t a = __shfl_xor_sync(0xffffffffu, upper ? words[0] : words[2], 2);
    const uint32_t b = __shfl_xor_sync(0xffffffffu, upper ? words[1] : words[3], 2);
    (upper ? words[0] : words[2]) = a;
    (upper ? words[1] : words[3]) = b;
    const uint32_t c = __shfl_xor_sync(0xffffffffu, odd ? words[0] : words[1], 1);
    const uint32_t d = __shfl_xor_sync(0xffffffffu, odd ? words[2] : words[3], 1);
    (odd ? words[0] : words[1]) = c;
    (odd ? words[2] : words[3]) = d;
  }

  template <typename Out>
  static __device__ __forceinline__ void store_pair(Out* destination, float low, float high, int32_t left,
                                                    bool aligned) {
    if (aligned && left >= 2) {
      if constexpr (sizeof(Out) == 4) {
        *reinterpret_cast<float2*>(destination) = make_float2(low, high);
      } else {
        *reinterpret_cast<uint32_t*>(destination) = pack2<Out>(low, high);
      }
      return;
    }
    if (left >= 1) destination[0] = from_float<Out>(low);
    if (left >= 2) destination[1] = from_float<Out>(high);
  }
};

}  // namespace flashbwd::sm80

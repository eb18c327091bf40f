// Probabilities and masks of S^T, (64 keys, kBlockM queries), in the registers of a warpgroup
// (../../common/wgmma_fragments.cuh).
#pragma once

#include "../../common/wgmma_fragments.cuh"
#include "../index/tile_visibility.h"
#include "block_mask.cuh"

namespace flashbwd::sm90 {

// S becomes P = exp(scale * S - lse).
template <int kValues, int kEarly>
__device__ __forceinline__ void exponentiate(float (&s)[kValues], const RowPairs<kEarly>& lse_log2, float scale_log2) {
  for_each_row<0, kValues>(lse_log2, [&](int i, float lse) { s[i] = exp2_approximate(s[i] * scale_log2 - lse); });
}

// Zeroes values for which key `row` of a tile (or row + 8) is invisible. `column` is the thread's first column.
template <int kValues>
__device__ __forceinline__ void mask(float (&p)[kValues], const TileVisibility& tile, int32_t row, int32_t column) {
  constexpr int kBlockM = 2 * kValues;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t visible = columns_that_see<kBlockM>(tile, row + 8 * half, column);
#pragma unroll
    for (int i = 0; i < kBlockM / 8; ++i) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        float& value = p[4 * i + 2 * half + odd];
        value = visible >> (2 * i + odd) & 1 ? value : 0.f;
      }
    }
  }
}

// The same for pairs of 16-bit values.
template <int kPairs>
__device__ __forceinline__ void mask_pairs(uint32_t (&p)[kPairs], const TileVisibility& tile, int32_t row,
                                           int32_t column) {
  constexpr int kBlockM = 4 * kPairs;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t visible = columns_that_see<kBlockM>(tile, row + 8 * half, column);
#pragma unroll
    for (int i = 0; i < kBlockM / 8; ++i) {
      if ((visible >> (2 * i) & 1) == 0) p[2 * i + half] &= 0xffff0000u;
      if ((visible >> (2 * i + 1) & 1) == 0) p[2 * i + half] &= 0x0000ffffu;
    }
  }
}

}  // namespace flashbwd::sm90

// How the sm90 kernel writes dq (layout: ../index/dq_layout.h): it stores a tile to shared memory in boxes of 64
// queries and 32 columns, which TMA adds to the fp32 accumulator. dq_postprocess.cuh reads the accumulator.
#pragma once

#include "../../common/wgmma_fragments.cuh"
#include "../index/dq_layout.h"

namespace flashbwd {

// Offsets of dq of one warp (16 of 64 queries) in a box of 32 columns, swizzled as TMA expects. A thread has columns
// 8 j + lane % 4 * 2 and the next one, j from 0 to 3, of rows lane / 4 and lane / 4 + 8. With permuted columns
// (permuted_offset), the four rows of a store use four different sets of banks.
struct DqOffsets {
  bool permuted;
  uint32_t first;
  static constexpr int kRowsFurther = 8 * kAtomRowBytes / sizeof(float2);

  __device__ __forceinline__ DqOffsets(bool permuted, int32_t warp, int32_t lane) : permuted(permuted) {
    const int32_t row = warp * 16 + lane / 4, odd_vector = lane / 2 % 2;
    first = row * kAtomRowBytes + ((odd_vector * (permuted ? 4 : 1)) ^ row % 8) * 16 + lane % 2 * 8;
  }
  // Row + 8 is kRowsFurther elements further.
  __device__ __forceinline__ float2* at(float* box, int32_t j) const {
    return reinterpret_cast<float2*>(reinterpret_cast<uint8_t*>(box) + (first ^ (j * (permuted ? 16 : 32))));
  }
};

// Stores dq of one warp, 2 * kValues columns, to boxes. `columns`: the columns from its first one to the head
// dimension.
template <int kValues>
__device__ __forceinline__ void store_dq_boxes(float (*boxes)[64 * 32], const float (&dq)[kValues], int32_t columns,
                                               int32_t warp, int32_t lane) {
#pragma unroll
  for (int j = 0; j < kValues / 4; ++j) {
    float2* const pair = DqOffsets(is_permuted(j * 8, columns), warp, lane).at(boxes[j / 4], j % 4);
    pair[0] = make_float2(dq[4 * j], dq[4 * j + 1]);
    pair[DqOffsets::kRowsFurther] = make_float2(dq[4 * j + 2], dq[4 * j + 3]);
  }
}

// Adds the boxes, which store_dq_boxes or TMA has written, to dq.
template <int kValues>
__device__ __forceinline__ void add_dq_boxes(float (&dq)[kValues], float (*boxes)[64 * 32], int32_t columns,
                                             int32_t warp, int32_t lane) {
#pragma unroll
  for (int j = 0; j < kValues / 4; ++j) {
    const float2* const pair = DqOffsets(is_permuted(j * 8, columns), warp, lane).at(boxes[j / 4], j % 4);
    const float2 upper = pair[0], lower = pair[DqOffsets::kRowsFurther];
    dq[4 * j] += upper.x;
    dq[4 * j + 1] += upper.y;
    dq[4 * j + 2] += lower.x;
    dq[4 * j + 3] += lower.y;
  }
}

}  // namespace flashbwd

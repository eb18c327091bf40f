// Tiles of rows from global to shared memory.
#pragma once

#include <cstdint>

#include "../../common/mma.cuh"
#include "kernel_params.h"

namespace flashbwd::sm80 {

// Where the next query tile comes from.
template <typename T>
struct Source {
  const T* q;
  const T* dout;
  const float* lse;
  const float* delta;
  int32_t rows;  // that exist, from the first of the tile
};

// Rows of one head, from the first row of a sequence.
template <typename T>
__device__ __forceinline__ T* head_rows(const HeadsView& view, int32_t batch, int32_t head, int64_t first_row) {
  return static_cast<T*>(view.data) + batch * view.batch_stride + head * view.head_stride + first_row * view.seq_stride;
}

// kRows rows of which `rows` exist, each of `columns` elements; zeros elsewhere. Not `aligned`: element by element.
template <typename Traits, int kRows, typename T>
__device__ __forceinline__ void load_tile(uint8_t* tile, const T* source, int64_t stride, int32_t rows, int32_t columns,
                                          bool aligned) {
  using Swizzle = PieceSwizzle<Traits::kRowBytes, sizeof(T) == 4>;
  constexpr int kPieces = Traits::kRowBytes / 16;        // a row
  constexpr int kElements = 16 / sizeof(T);              // a piece
  constexpr int kPassRows = Traits::kThreads / kPieces;  // rows that all threads copy at once
  static_assert(Traits::kThreads % kPieces == 0 && kRows % kPassRows == 0, "a thread has one piece of some rows");
  const int32_t piece = threadIdx.x % kPieces, first_row = threadIdx.x / kPieces;
  const int32_t left = columns - piece * kElements;
  if (aligned && rows >= kRows && columns >= kPieces * kElements) {
    const uint32_t place = smem_address(tile) + Swizzle::offset(first_row, piece);
    const T* pointer = source + first_row * stride + piece * kElements;
    const int64_t pass_stride = kPassRows * stride;
#pragma unroll
    for (int row = 0; row < kRows; row += kPassRows) {
      // Rows eight apart have their pieces in the same order.
      copy_async_16(kPassRows % 8 == 0 ? place + row * Traits::kRowBytes
                                       : smem_address(tile) + Swizzle::offset(first_row + row, piece),
                    pointer, 16);
      pointer += pass_stride;
    }
    return;
  }
  if (aligned) {
    const int32_t bytes = max(min(left, kElements), 0) * static_cast<int32_t>(sizeof(T));
    const uint32_t place = smem_address(tile) + Swizzle::offset(first_row, piece);
    const T* pointer = source + first_row * stride + (left > 0 ? piece * kElements : 0);
    const int64_t pass_stride = kPassRows * stride;
#pragma unroll
    for (int row = 0; row < kRows; row += kPassRows) {
      const bool exists = first_row + row < rows;
      // Rows eight apart have their pieces in the same order.
      const uint32_t to = kPassRows % 8 == 0 ? place + row * Traits::kRowBytes
                                             : smem_address(tile) + Swizzle::offset(first_row + row, piece);
      copy_async_16(to, exists ? pointer : source, exists ? bytes : 0);
      pointer += pass_stride;
    }
    return;
  }
#pragma unroll 1
  for (int32_t row = first_row; row < kRows; row += kPassRows) {
    alignas(16) T values[kElements];
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      values[e] = row < rows && e < left ? source[row * stride + piece * kElements + e] : from_float<T>(0.f);
    }
    *reinterpret_cast<uint4*>(tile + Swizzle::offset(row, piece)) = *reinterpret_cast<const uint4*>(values);
  }
}

}  // namespace flashbwd::sm80

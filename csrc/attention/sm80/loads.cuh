// Copies tiles of rows from global to shared memory.
#pragma once

#include <cstdint>

#include "../../common/mma.cuh"
#include "kernel_params.h"

namespace flashbwd::sm80 {

// The source of the next query tile.
template <typename T>
struct Source {
  const T* q;
  const T* dout;
  const float* lse;
  const float* delta;
  int32_t rows;  // from the first row of the tile to the end of the sequence
  bool exists;
};

// A pointer to rows of one head, from `first_row` on.
template <typename T>
__device__ __forceinline__ T* head_rows(const HeadsView& view, int32_t batch, int32_t head, int64_t first_row) {
  return static_cast<T*>(view.data) + batch * view.batch_stride + head * view.head_stride + first_row * view.seq_stride;
}

// For load_tile: all rows are wanted.
struct AllRows {
  static constexpr __device__ bool all() { return true; }
  constexpr __device__ bool operator()(int32_t) const { return true; }
};

// Copies kRows rows, of which the first `rows` exist and have `columns` elements. Zeros fill the rest, and the rows for
// which `wanted(row)` is false. If not `aligned`, the copy is element by element.
template <typename Traits, int kRows, typename T, typename Wanted = AllRows>
__device__ __forceinline__ void load_tile(uint8_t* tile, const T* source, int64_t stride, int32_t rows, int32_t columns,
                                          bool aligned, const Wanted& wanted = {}) {
  using Swizzle = VectorSwizzle<Traits::kRowBytes, sizeof(T) == 4>;
  constexpr int kVectors = Traits::kRowBytes / 16;  // per row
  constexpr int kElements = 16 / sizeof(T);         // per vector
  // Vectors of a row that threads copy at once: all, or as many as the swizzle permutes among themselves.
  constexpr int kGroup = Traits::kThreads % kVectors == 0 ? kVectors : kVectors % 8 == 0 ? 8 : 4;
  constexpr int kGroupBytes = kGroup * 16, kGroupElements = kGroup * kElements;
  constexpr int kPassRows = Traits::kThreads / kGroup;  // rows that all threads copy at once
  static_assert(kVectors % kGroup == 0 && kRows % kPassRows == 0,
                "the threads copy whole groups of vectors and whole passes of rows");
  const int32_t vector = threadIdx.x % kGroup, first_row = threadIdx.x / kGroup;
  // The swizzle repeats every eight rows.
  const auto address = [&](int row) {
    return kPassRows % 8 == 0 ? smem_address(tile) + Swizzle::offset(first_row, vector) + row * Traits::kRowBytes
                              : smem_address(tile) + Swizzle::offset(first_row + row, vector);
  };
  const int64_t pass_stride = kPassRows * stride;
  const T* pointer = source + first_row * stride + vector * kElements;
  if (aligned && wanted.all() && rows >= kRows && columns >= kVectors * kElements) {
#pragma unroll
    for (int row = 0; row < kRows; row += kPassRows, pointer += pass_stride) {
#pragma unroll
      for (int group = 0; group < kVectors / kGroup; ++group) {
        copy_async_16(address(row) + group * kGroupBytes, pointer + group * kGroupElements, 16);
      }
    }
    return;
  }
  const int32_t left = columns - vector * kElements;
  if (aligned) {
#pragma unroll
    for (int row = 0; row < kRows; row += kPassRows, pointer += pass_stride) {
#pragma unroll
      for (int group = 0; group < kVectors / kGroup; ++group) {
        const int32_t elements = max(min(left - group * kGroupElements, kElements), 0);
        const bool exists = first_row + row < rows && elements > 0 && wanted(first_row + row);
        copy_async_16(address(row) + group * kGroupBytes, exists ? pointer + group * kGroupElements : source,
                      exists ? elements * static_cast<int32_t>(sizeof(T)) : 0);
      }
    }
    return;
  }
#pragma unroll 1
  for (int32_t row = 0; row < kRows; row += kPassRows, pointer += pass_stride) {
#pragma unroll 1
    for (int32_t group = 0; group < kVectors / kGroup; ++group) {
      alignas(16) T values[kElements];
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        const bool exists = first_row + row < rows && e < left - group * kGroupElements && wanted(first_row + row);
        values[e] = exists ? pointer[group * kGroupElements + e] : from_float<T>(0.f);
      }
      *reinterpret_cast<uint4*>(tile + Swizzle::offset(first_row + row, vector + group * kGroup)) =
          *reinterpret_cast<const uint4*>(values);
    }
  }
}

}  // namespace flashbwd::sm80

// Stores an accumulator of a warpgroup, 64 rows, to rows in global memory.
#pragma once

#include "wgmma_fragments.cuh"

namespace flashbwd {

// `rows` of the 64 exist; the number may be negative. The accumulator may have more than `columns`. Strides, columns
// and flags come by reference, so that the compiler reads parameters of the kernel where it needs them.

// Stores element by element, from the registers of each thread.
template <typename Element, int kValues>
__device__ void store_elements(Element* destination, const int64_t& stride, const int32_t& columns, int32_t rows,
                               const float (&values)[kValues]) {
  const int32_t thread = threadIdx.x % kWarpgroupThreads;
  const int32_t row = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const int32_t r = row + i % 4 / 2 * 8;
    const int32_t column = i / 4 * 8 + thread % 4 * 2 + i % 2;
    if (r < rows && column < columns) destination[r * stride + column] = from_float<Element>(values[i]);
  }
}

// Stores 16-bit rows through a staging buffer in shared memory, kStagingAtoms atoms of 64 columns, kAtomBytes apart,
// which only this warpgroup may write. `barrier`: a named barrier of the warpgroup. `vectors`: rows can be written 16
// bytes at a time.
template <typename T, int kAtomBytes, int kStagingAtoms, int kFirst = 0, int kValues>
__device__ void store_16bit(T* destination, const int64_t& stride, const int32_t& columns, const bool& vectors,
                            int32_t rows, uint8_t* staging, uint32_t barrier, const float (&values)[kValues]) {
  constexpr int kFirstColumn = kFirst * kAtomColumns;
  constexpr bool kIsLast = 2 * kValues - kFirstColumn <= kStagingAtoms * kAtomColumns;
  constexpr int kColumns = kIsLast ? 2 * kValues - kFirstColumn : kStagingAtoms * kAtomColumns;
  const int32_t thread = threadIdx.x % kWarpgroupThreads;
  named_barrier_sync(barrier, kWarpgroupThreads);  // the atoms staged before have been read
  stage_16bit<T, kAtomBytes, kFirst, kStagingAtoms>(staging, values);
  named_barrier_sync(barrier, kWarpgroupThreads);  // staged
#pragma unroll 1
  for (int32_t i = thread; i < 64 * kColumns / 8; i += kWarpgroupThreads) {
    const int32_t r = i / (kColumns / 8);
    const int32_t staged_column = i % (kColumns / 8) * 8, column = kFirstColumn + staged_column;
    if (r >= rows || column >= columns) continue;
    const int32_t swizzled = staged_column % kAtomColumns / 8 ^ r % 8;
    const uint4 vector = *reinterpret_cast<const uint4*>(staging + staged_column / kAtomColumns * kAtomBytes +
                                                         r * kAtomRowBytes + swizzled * 16);
    T* target = destination + r * stride + column;
    if (vectors && column + 8 <= columns) {
      *reinterpret_cast<uint4*>(target) = vector;
    } else {
      const T* elements = reinterpret_cast<const T*>(&vector);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (column + e < columns) target[e] = elements[e];
      }
    }
  }
  if constexpr (!kIsLast) {
    store_16bit<T, kAtomBytes, kStagingAtoms, kFirst + kStagingAtoms>(destination, stride, columns, vectors, rows,
                                                                      staging, barrier, values);
  }
}

}  // namespace flashbwd

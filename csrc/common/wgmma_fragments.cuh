// What a warpgroup does with its accumulators between matrix products: it subtracts lse or delta, packs to 16 bits, and
// moves operands and results through shared memory. Of the 64 rows of an accumulator, thread `lane` of warp w holds row
// r = 16 w + lane / 4 and row r + 8. Of columns 8 j to 8 j + 7, it holds c = 8 j + lane % 4 * 2 and c + 1: values 4 j
// and 4 j + 1 belong to row r, 4 j + 2 and 4 j + 3 to row r + 8.
#pragma once

#include <cstdint>

#include "hopper.cuh"
#include "numeric.cuh"
#include "warpgroup.h"
#include "wgmma.cuh"

namespace flashbwd {

// lse or delta of a thread's columns, in shared memory. Each four values of an accumulator need one pair. `first`
// points at the number of the thread's first column. load_early() reads the first kEarly pairs into registers; without
// it, kEarly is 0.
template <int kEarly>
struct QueryValues {
  const float* first;
  float2 early[kEarly + 1];  // one more, because kEarly may be 0

  __device__ __forceinline__ explicit QueryValues(const float* first) : first(first) {}
  __device__ __forceinline__ void load_early() {
#pragma unroll
    for (int j = 0; j < kEarly; ++j) early[j] = *reinterpret_cast<const float2*>(&first[8 * j]);
  }
  __device__ __forceinline__ float2 operator[](int j) const {
    return j < kEarly ? early[j] : *reinterpret_cast<const float2*>(&first[8 * j]);
  }
};

// Calls visit(i, number of its column) for values kBegin to kEnd of an accumulator.
template <int kBegin, int kEnd, int kEarly, typename Visit>
__device__ __forceinline__ void for_each_query(const QueryValues<kEarly>& rows, Visit visit) {
#pragma unroll
  for (int j = kBegin / 4; j < kEnd / 4; ++j) {
    const float2 pair = rows[j];
#pragma unroll
    for (int i = 0; i < 4; ++i) visit(4 * j + i, i % 2 == 0 ? pair.x : pair.y);
  }
}

// Masks values of an accumulator: value i becomes hidden(i) where it is invisible. Bit n of visible(half) belongs to
// the thread's n-th column, of its first row if half is 0 and of its second row if half is 1.
template <int kValues, typename Visible, typename Hidden>
__device__ __forceinline__ void keep_visible(float (&values)[kValues], Visible visible, Hidden hidden) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t bits = visible(half);
#pragma unroll
    for (int n = 0; n < kValues / 2; ++n) {
      const int i = n / 2 * 4 + 2 * half + n % 2;
      values[i] = bits >> n & 1 ? values[i] : hidden(i);
    }
  }
}

// Zeroes invisible values.
template <int kValues, typename Visible>
__device__ __forceinline__ void keep_visible(float (&values)[kValues], Visible visible) {
  keep_visible(values, visible, [](int) { return 0.f; });
}

// Zeroes invisible values in packed pairs of 16 bits.
template <int kPairs, typename Visible>
__device__ __forceinline__ void keep_visible(uint32_t (&pairs)[kPairs], Visible visible) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t bits = visible(half);
#pragma unroll
    for (int n = 0; n < kPairs; n += 2) {
      if ((bits >> n & 1) == 0) pairs[n + half] &= 0xffff0000u;
      if ((bits >> (n + 1) & 1) == 0) pairs[n + half] &= 0x0000ffffu;
    }
  }
}

// kPositive: negative values become 0.
template <typename T, bool kPositive = false, int kValues>
__device__ __forceinline__ void pack(uint32_t (&packed)[kValues / 2], const float (&values)[kValues]) {
#pragma unroll
  for (int i = 0; i < kValues / 2; ++i) {
    const float low = values[2 * i], high = values[2 * i + 1];
    packed[i] = kPositive ? pack2_positive<T>(low, high) : pack2<T>(low, high);
  }
}

// Loads the first kSteps groups of 16 columns of a first operand from atoms with rows of kRowBytes: four registers
// each.
template <int kAtomBytes, int kSteps, int kRowBytes = kAtomRowBytes, int kRegisters>
__device__ __forceinline__ void load_operand(uint32_t (&operand)[kRegisters], uint32_t address, int32_t warp,
                                             int32_t lane) {
  constexpr int kAtomSteps = kRowBytes / 32;
  const uint32_t row = address + (warp * 16 + lane % 16) * kRowBytes;
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const int32_t vector = swizzled<kRowBytes>(k % kAtomSteps * 2 + lane / 16, lane % 16);
    load_matrix_x4(row + k / kAtomSteps * kAtomBytes + vector * 16, operand[4 * k], operand[4 * k + 1],
                   operand[4 * k + 2], operand[4 * k + 3]);
  }
}

// Stores a packed accumulator of one warp, 16 rows from `first_row` on, into atoms of 64 columns and kRows rows.
template <int kRows, int kPairs>
__device__ __forceinline__ void store_operand(uint32_t address, const uint32_t (&packed)[kPairs], int32_t first_row,
                                              int32_t lane) {
  const int32_t row = first_row + lane % 16;
#pragma unroll
  for (int k = 0; k < kPairs / 4; ++k) {
    const int32_t vector = k % 4 * 2 + lane / 16;  // of 16 bytes, in the row of an atom
    const uint32_t in_atom = address + row * kAtomRowBytes + ((vector ^ row % 8) * 16);
    store_matrix_x4(in_atom + k / 4 * (kRows * kAtomRowBytes), packed[4 * k], packed[4 * k + 1], packed[4 * k + 2],
                    packed[4 * k + 3]);
  }
}

// A transposed tile: its rows are the columns of an accumulator, and an atom holds 64 rows of the accumulator. Returns
// the offset of the row that lane `lane` of warp `warp` passes to stmatrix or ldmatrix for the first 16 columns. The
// four 8 x 8 matrices are in the order of a fragment: both of the warp's rows, then both again for the next 8 columns.
__device__ __forceinline__ uint32_t transposed_offset(int32_t warp, int32_t lane) {
  const int32_t column = lane / 16 * 8 + lane % 8, vector = warp * 2 + lane / 8 % 2;
  return column * kAtomRowBytes + swizzled(vector, column) * 16;
}
constexpr int kTransposedStep = 16 * kAtomRowBytes;  // bytes to the next 16 columns

// Stores a packed accumulator of one warp to a transposed tile.
template <int kPairs>
__device__ __forceinline__ void store_operand_transposed(uint32_t offset, const uint32_t (&packed)[kPairs]) {
#pragma unroll
  for (int k = 0; k < kPairs / 4; ++k) {
    store_matrix_x4_transposed(offset + k * kTransposedStep, packed[4 * k], packed[4 * k + 1], packed[4 * k + 2],
                               packed[4 * k + 3]);
  }
}

// Writes atoms kFirst to kFirst + kAtoms - 1 of an accumulator (64 columns each) to shared memory as 16-bit values, in
// the swizzled layout that TMA reads. Atoms are kAtomBytes apart.
template <typename T, int kAtomBytes, int kFirst, int kAtoms, int kValues>
__device__ __forceinline__ void stage_16bit(uint8_t* staging, const float (&values)[kValues]) {
  const auto thread = read_thread();  // read again, so that no register holds it over the main loop
  const int32_t lane = thread % 32;
  const int32_t row = thread % kWarpgroupThreads / 32 * 16 + lane % 16;
#pragma unroll
  for (int k = 4 * kFirst; k < kValues / 8 && k < 4 * (kFirst + kAtoms); ++k) {
    const int32_t vector = k % 4 * 2 + lane / 16;
    store_matrix_x4(
        smem_address(staging) + (k / 4 - kFirst) * kAtomBytes + row * kAtomRowBytes + (vector ^ row % 8) * 16,
        pack2<T>(values[8 * k], values[8 * k + 1]), pack2<T>(values[8 * k + 2], values[8 * k + 3]),
        pack2<T>(values[8 * k + 4], values[8 * k + 5]), pack2<T>(values[8 * k + 6], values[8 * k + 7]));
  }
}

// Zeroes the rows of a tile from `valid` on. They may hold NaN, and a matrix product would spread it, because 0 * NaN
// is NaN. Called by kThreads consecutive threads, which synchronize at named barrier `barrier`.
template <int kAtoms, int kAtomBytes, int kThreads, int kRowBytes = kAtomRowBytes>
__device__ void zero_invalid_rows(uint8_t* tile, int32_t valid, uint32_t barrier) {
  constexpr int kRows = kAtomBytes / kRowBytes;
  const int32_t vectors = (kRows - valid) * (kRowBytes / 16);
#pragma unroll 1
  for (int atom = 0; atom < kAtoms; ++atom) {
    uint4* rows = reinterpret_cast<uint4*>(tile + atom * kAtomBytes + valid * kRowBytes);
#pragma unroll 1
    for (int i = threadIdx.x % kThreads; i < vectors; i += kThreads) rows[i] = make_uint4(0, 0, 0, 0);
  }
  fence_async_shared();
  named_barrier_sync(barrier, kThreads);
}

}  // namespace flashbwd

// Work on the accumulators of a warpgroup between its products: row statistics, packing to 16 bits, operands and
// results in shared memory. Thread `lane` of warp w holds rows 16 w + lane / 4 and 8 further of 64, and of each 8
// columns j the pair 8 j + lane % 4 * 2 and the next: values 4 j and 4 j + 1 of the first row, 4 j + 2 and 4 j + 3 of
// the second.
#pragma once

#include <cstdint>

#include "hopper.cuh"
#include "numeric.cuh"
#include "warpgroup.h"
#include "wgmma.cuh"

namespace flashbwd {

// Numbers of a thread's columns in shared memory, a pair for each four values of an accumulator. `first` points at its
// first column. The first kEarly pairs are loaded before they are needed.
template <int kEarly>
struct QueryValues {
  const float* first;
  float2 early[kEarly + 1];  // one more, because kEarly may be 0

  __device__ __forceinline__ explicit QueryValues(const float* first) : first(first) {
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

// Zeroes values of an accumulator, or packed pairs of 16-bit values, by a mask. Bit n of visible(half) belongs to the
// thread's n-th column, of its first row if half is 0 and of its second row if half is 1.
template <int kValues, typename Visible>
__device__ __forceinline__ void keep_visible(float (&values)[kValues], Visible visible) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t bits = visible(half);
#pragma unroll
    for (int n = 0; n < kValues / 2; ++n) {
      float& value = values[n / 2 * 4 + 2 * half + n % 2];
      value = bits >> n & 1 ? value : 0.f;
    }
  }
}

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
    const int32_t place = swizzled<kRowBytes>(k % kAtomSteps * 2 + lane / 16, lane % 16);
    load_matrix_x4(row + k / kAtomSteps * kAtomBytes + place * 16, operand[4 * k], operand[4 * k + 1],
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
    const int32_t piece = k % 4 * 2 + lane / 16;
    const uint32_t in_atom = address + row * kAtomRowBytes + ((piece ^ row % 8) * 16);
    store_matrix_x4(in_atom + k / 4 * (kRows * kAtomRowBytes), packed[4 * k], packed[4 * k + 1], packed[4 * k + 2],
                    packed[4 * k + 3]);
  }
}

// A transposed tile: its rows are the columns of an accumulator, 64 of whose rows make an atom. Returns the address at
// which lane `lane` of warp `warp` finds its row of the first 16. Matrices of 8 x 8 lie in the order of a fragment: the
// two of the warp's rows, then those 8 columns further.
__device__ __forceinline__ uint32_t transposed_offset(int32_t warp, int32_t lane) {
  const int32_t column = lane / 16 * 8 + lane % 8, piece = warp * 2 + lane / 8 % 2;
  return column * kAtomRowBytes + swizzled(piece, column) * 16;
}
constexpr int kTransposedStep = 16 * kAtomRowBytes;  // bytes to the next 16 columns

// Stores a packed accumulator of one warp to a transposed tile.
template <int kPairs>
__device__ __forceinline__ void store_operand_transposed(uint32_t place, const uint32_t (&packed)[kPairs]) {
#pragma unroll
  for (int k = 0; k < kPairs / 4; ++k) {
    store_matrix_x4_transposed(place + k * kTransposedStep, packed[4 * k], packed[4 * k + 1], packed[4 * k + 2],
                               packed[4 * k + 3]);
  }
}

// Stages up to kAtoms atoms of 64 columns of an accumulator, from atom kFirst on, as 16-bit values, kAtomBytes
// apart, as TMA reads them.
template <typename T, int kAtomBytes, int kFirst, int kAtoms, int kValues>
__device__ __forceinline__ void stage_16bit(uint8_t* staging, const float (&values)[kValues]) {
  const auto thread = read_thread();  // read again, so that no register holds it over the main loop
  const int32_t lane = thread % 32;
  const int32_t row = thread % kWarpgroupThreads / 32 * 16 + lane % 16;
#pragma unroll
  for (int k = 4 * kFirst; k < kValues / 8 && k < 4 * (kFirst + kAtoms); ++k) {
    const int32_t piece = k % 4 * 2 + lane / 16;
    store_matrix_x4(
        smem_address(staging) + (k / 4 - kFirst) * kAtomBytes + row * kAtomRowBytes + (piece ^ row % 8) * 16,
        pack2<T>(values[8 * k], values[8 * k + 1]), pack2<T>(values[8 * k + 2], values[8 * k + 3]),
        pack2<T>(values[8 * k + 4], values[8 * k + 5]), pack2<T>(values[8 * k + 6], values[8 * k + 7]));
  }
}

// Zeroes rows from `valid` on of a tile, because they hold other data, and 0 * NaN is NaN. Called by kThreads
// consecutive threads, which meet at `barrier`.
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

// The code that depends on the dtype: the shared memory layout and the MMAs.
//
// A shared memory row consists of 16-byte vectors. Vector c of row r is stored at r * kVectors + (c ^ r % 8). This XOR
// swizzle makes ldmatrix free of bank conflicts. An MMA multiplies A (16, kStep) by B (kStep, 8).
//
// P and dS are computed in fp32. They are split into the value rounded to the operand's precision and the residual, so
// that only the final result is rounded. float32 operands are split in the same way, since TF32 keeps only 11 bits.
#pragma once

#include "params.h"
#include "ptx.cuh"

#ifdef __CUDACC__

namespace flashbwd {

struct Half {
  using Storage = unsigned short;
};
struct BFloat16 {
  using Storage = unsigned short;
};
struct Float {
  using Storage = float;
};

template <class T, class U>
constexpr bool kSame = false;
template <class T>
constexpr bool kSame<T, T> = true;

template <class T>
constexpr bool kIsBFloat16 = kSame<T, BFloat16>;
template <class T>
constexpr bool kIsFloat = kSame<T, Float>;
template <class T>
constexpr int kBytes = sizeof(typename T::Storage);
template <class T>
constexpr int kStep = 32 / kBytes<T>;  // inner dimension of one MMA, in elements: 16, or 8 for float32

// Addresses and copies of a swizzled shared memory tile, (rows, kColumns).
template <class T, int kColumns>
struct SharedTile {
  static constexpr int kVectors = kColumns * kBytes<T> / 16;  // 16-byte vectors per row
  static constexpr int kVectorElements = 16 / kBytes<T>;
  static constexpr int kSteps = kColumns / kStep<T>;  // MMAs along the columns

  __device__ static __forceinline__ uint32 at(int row, int vector) {
    return static_cast<uint32>((row * kVectors + (vector ^ (row & 7))) * 16);
  }

  // Loads the A operand: rows [row, row + 16) and columns [step * kStep, (step + 1) * kStep).
  __device__ static __forceinline__ void load_a(uint32 (&a)[4], uint32 tile, int row, int step) {
    const int lane = threadIdx.x % 32;
    load_matrices(a, tile + at(row + lane % 16, step * 2 + lane / 16));
  }

  // Loads two B operands from a tile stored as (n, k): rows [row, row + 8) into b[0..1] and the next 8 rows into
  // b[2..3]. Both have columns [step * kStep, (step + 1) * kStep).
  __device__ static __forceinline__ void load_b(uint32 (&b)[4], uint32 tile, int row, int step) {
    const int lane = threadIdx.x % 32;
    load_matrices(b, tile + at(row + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
  }

  // Loads two B operands from a tile stored as (k, n), rows [row, row + kStep): columns [16 * pair, 16 * pair + 8) go
  // into b[0..1] and the next 8 columns into b[2..3]. For float32, k is permuted as in split_a().
  __device__ static __forceinline__ void load_b_rows(uint32 (&b)[4], uint32 tile, int row, int pair) {
    const int lane = threadIdx.x % 32;
    if constexpr (kIsFloat<T>) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = pair * 16 + i / 2 * 8 + lane / 4;
        b[i] = load_shared(tile + at(row + lane % 4 * 2 + i % 2, column / 4) + column % 4 * 4);
      }
    } else {
      load_matrices_transposed(b, tile + at(row + lane % 16, pair * 2 + lane / 16));
    }
  }

  // Starts cp.async copies of kRows aligned rows. Each thread copies vectors of one column index from several rows, so
  // its swizzled addresses differ only by an XOR and an offset that are compile-time constants.
  template <int kThreads, int kRows>
  __device__ static __forceinline__ void load_rows(uint32 tile, int thread, const typename T::Storage* source,
                                                   long long stride, int columns) {
    constexpr int kRowsAtOnce = kThreads / kVectors;
    const int row = thread / kVectors, vector = thread % kVectors;
    const bool inside = vector * kVectorElements < columns;
    const typename T::Storage* from = source + row * stride + (inside ? vector * kVectorElements : 0);
    const uint32 to = tile + at(row, vector);
#pragma unroll
    for (int i = 0; i < kRows * kVectors / kThreads; ++i) {
      const int first = i * kRowsAtOnce;
      copy_async_16((to ^ first % 8 * 16) + first * kVectors * 16, from, inside ? 16 : 0);
      from += kRowsAtOnce * stride;
    }
  }

  // Copies vector number `vector` of a row of `columns` elements, with zeros past the end. Stores only zeros if
  // `inside` is false. The copy uses cp.async if kAligned is true; else it is synchronous.
  template <bool kAligned>
  __device__ static __forceinline__ void load_vector(uint32 tile, int row, int vector,
                                                     const typename T::Storage* source, int columns, bool inside) {
    if constexpr (kAligned) {
      const int left = inside ? columns - vector * kVectorElements : 0;
      copy_async_16(tile + at(row, vector), source + (left > 0 ? vector * kVectorElements : 0),
                    max(0, min(left * kBytes<T>, 16)));
    } else {
      copy_vector<false>(tile, row, vector, source, columns, inside);
    }
  }

  // Like load_vector(), but always synchronous.
  template <bool kAligned>
  __device__ static __forceinline__ void copy_vector(uint32 tile, int row, int vector,
                                                     const typename T::Storage* source, int columns, bool inside) {
    const int left = inside ? columns - vector * kVectorElements : 0;
    const typename T::Storage* const from = source + vector * kVectorElements;
    uint32 words[4] = {};
    if (kAligned && left >= kVectorElements) {
      const uint4 whole = *reinterpret_cast<const uint4*>(from);
      words[0] = whole.x, words[1] = whole.y, words[2] = whole.z, words[3] = whole.w;
    } else {
#pragma unroll
      for (int i = 0; i < kVectorElements; ++i) {
        if (i >= left) continue;
        if constexpr (kIsFloat<T>) {
          words[i] = __float_as_uint(from[i]);
        } else {
          words[i / 2] |= static_cast<uint32>(from[i]) << i % 2 * 16;
        }
      }
    }
    store_shared(tile + at(row, vector), words);
  }
};

// An A operand, split into its rounded value and the residual.
template <class T>
struct SplitA {
  uint32 high[4], residual[4];
};

__device__ __forceinline__ void split_tf32(float x, uint32& high, uint32& residual) {
  high = to_tf32(x);
  residual = to_tf32(x - __uint_as_float(high));
}

// Splits the accumulators (16, kStep) of a previous MMA: one fragment of 8 columns, or two for 16-bit operands.
template <class T>
__device__ __forceinline__ void split_a(SplitA<T>& a, const float (*fragments)[4]) {
  if constexpr (kIsFloat<T>) {
    // Permutes k to match the accumulator layout: accumulator column 2c is k index c, column 2c + 1 is k index c + 4.
#pragma unroll
    for (int i = 0; i < 4; ++i) split_tf32(fragments[0][i % 2 * 2 + i / 2], a.high[i], a.residual[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x0 = fragments[i / 2][i % 2 * 2], x1 = fragments[i / 2][i % 2 * 2 + 1];
      a.high[i] = pack_16bit<kIsBFloat16<T>>(x0, x1);
      a.residual[i] = pack_16bit<kIsBFloat16<T>>(x0 - unpack_16bit<kIsBFloat16<T>, 0>(a.high[i]),
                                                 x1 - unpack_16bit<kIsBFloat16<T>, 1>(a.high[i]));
    }
  }
}

// d (16, 8) += a (16, kStep) @ b (kStep, 8). `a` is split; b0 and b1 are as loaded from memory.
template <class T>
__device__ __forceinline__ void multiply(float (&d)[4], const SplitA<T>& a, uint32 b0, uint32 b1) {
  if constexpr (kIsFloat<T>) {
    uint32 high[2], residual[2];
    split_tf32(__uint_as_float(b0), high[0], residual[0]);
    split_tf32(__uint_as_float(b1), high[1], residual[1]);
    mma_16x8x8(d, a.residual, high[0], high[1]);
    mma_16x8x8(d, a.high, residual[0], residual[1]);
    mma_16x8x8(d, a.high, high[0], high[1]);
  } else {
    mma_16x8x16<kIsBFloat16<T>>(d, a.high, b0, b1);
    mma_16x8x16<kIsBFloat16<T>>(d, a.residual, b0, b1);
  }
}

// d (16, 8) += a (16, kStep) @ b (kStep, 8). Both operands are as loaded from memory.
template <class T>
__device__ __forceinline__ void multiply(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  if constexpr (kIsFloat<T>) {
    SplitA<T> split;
#pragma unroll
    for (int i = 0; i < 4; ++i) split_tf32(__uint_as_float(a[i]), split.high[i], split.residual[i]);
    multiply(d, split, b0, b1);
  } else {
    mma_16x8x16<kIsBFloat16<T>>(d, a, b0, b1);
  }
}

// d (16, 16) += a (16, kStep) @ b (kStep, 16), for the two B operands that load_b() or load_b_rows() loads.
template <class T, class A>
__device__ __forceinline__ void multiply_two(float (*d)[4], const A& a, const uint32 (&b)[4]) {
  multiply<T>(d[0], a, b[0], b[1]);
  multiply<T>(d[1], a, b[2], b[3]);
}

template <int kFragments>
__device__ __forceinline__ void set_zero(float (&fragments)[kFragments][4]) {
#pragma unroll
  for (int i = 0; i < kFragments * 4; ++i) fragments[i / 4][i % 4] = 0.f;
}

// Stores elements 2 * pair and 2 * pair + 1 of a row of `columns` elements; omits the second element if it is past the
// end. Rows of odd length are not aligned to pairs, so their elements are stored one by one.
template <class T>
__device__ __forceinline__ void store_pair(void* row, int pair, int columns, float low, float high) {
  typename T::Storage* const to = static_cast<typename T::Storage*>(row) + pair * 2;
  if constexpr (kIsFloat<T>) {
    if (columns % 2 == 0) {
      *reinterpret_cast<float2*>(to) = make_float2(low, high);
    } else {
      to[0] = low;
      if (pair * 2 + 1 < columns) to[1] = high;
    }
  } else {
    const uint32 both = pack_16bit<kIsBFloat16<T>>(low, high);
    if (columns % 2 == 0) {
      *reinterpret_cast<uint32*>(to) = both;
    } else {
      to[0] = static_cast<unsigned short>(both);
      if (pair * 2 + 1 < columns) to[1] = static_cast<unsigned short>(both >> 16);
    }
  }
}

// Loads elements `column` (even) and `column` + 1 of a row of 16-bit values, with zeros past the end.
template <bool kAligned>
__device__ __forceinline__ uint32 load_pair(const unsigned short* row, int column, int columns) {
  if (kAligned && column + 1 < columns) return *reinterpret_cast<const uint32*>(row + column);
  uint32 pair = column < columns ? row[column] : 0u;
  if (!kAligned && column + 1 < columns) pair |= static_cast<uint32>(row[column + 1]) << 16;
  return pair;
}

template <class T>
__device__ __forceinline__ float load_element(const void* from, long long at) {
  const typename T::Storage value = static_cast<const typename T::Storage*>(from)[at];
  if constexpr (kIsFloat<T>) {
    return value;
  } else {
    return kIsBFloat16<T> ? float_of_bfloat16(value) : float_of_half(value);
  }
}

}  // namespace flashbwd

#endif

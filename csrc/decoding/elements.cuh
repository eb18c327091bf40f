// The dtypes of the kernels: how they lie in shared memory, and how the tensor cores multiply them.
//
// Rows lie in pieces of 16 bytes; piece c of row r is at r * pieces + (c ^ r % 8), so that no two rows of a matrix
// share banks. A product has A (16, step) and B (step, 8), step = 32 bytes of elements: 16, or 8 for float32. What is
// computed in fp32 and goes into a product (P, dS) is split into a part with the operand's precision and the rest of
// it, so that a result has one rounding, its last; float32 operands, which TF32 would cut to 11 bits, are split
// likewise.
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
constexpr int kStep = 32 / kBytes<T>;  // elements of a product's inner dimension

// A tile of rows of kColumns elements.
template <class T, int kColumns>
struct SharedTile {
  static constexpr int kPieces = kColumns * kBytes<T> / 16;  // of a row
  static constexpr int kPieceElements = 16 / kBytes<T>;
  static constexpr int kSteps = kColumns / kStep<T>;

  __device__ static __forceinline__ uint32 at(int row, int piece) {
    return static_cast<uint32>((row * kPieces + (piece ^ (row & 7))) * 16);
  }

  // A, 16 rows from `row`, columns of `step`.
  __device__ static __forceinline__ void load_a(uint32 (&a)[4], uint32 tile, int row, int step) {
    const int lane = threadIdx.x % 32;
    load_matrices(a, tile + at(row + lane % 16, step * 2 + lane / 16));
  }

  // B, two of them, (columns of `step`) x (8 rows from `row`, and the next 8): b[0..1] and b[2..3].
  __device__ static __forceinline__ void load_b(uint32 (&b)[4], uint32 tile, int row, int step) {
    const int lane = threadIdx.x % 32;
    load_matrices(b, tile + at(row + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
  }

  // B, two of them, (kStep rows from `row`) x (8 columns from 16 * pair, and the next 8). The inner dimension of a
  // float32 product is in the order in which split_a() has it.
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

  // kRows aligned rows, which arrive later. A thread copies the same piece of some rows: its places, as at() has them,
  // are one place with bits flipped and bytes added that are the same for all threads.
  template <int kThreads, int kRows>
  __device__ static __forceinline__ void load_rows(uint32 tile, int thread, const typename T::Storage* source,
                                                   long long stride, int columns) {
    constexpr int kRowsAtOnce = kThreads / kPieces;
    const int row = thread / kPieces, piece = thread % kPieces;
    const bool inside = piece * kPieceElements < columns;
    const typename T::Storage* from = source + row * stride + (inside ? piece * kPieceElements : 0);
    const uint32 to = tile + at(row, piece);
#pragma unroll
    for (int i = 0; i < kRows * kPieces / kThreads; ++i) {
      const int first = i * kRowsAtOnce;
      copy_async_16((to ^ first % 8 * 16) + first * kPieces * 16, from, inside ? 16 : 0);
      from += kRowsAtOnce * stride;
    }
  }

  // One piece of a row of `columns` elements: zeros past the last, or all when not `inside`. Aligned ones arrive later.
  template <bool kAligned>
  __device__ static __forceinline__ void load_piece(uint32 tile, int row, int piece, const typename T::Storage* source,
                                                    int columns, bool inside) {
    if constexpr (kAligned) {
      const int left = inside ? columns - piece * kPieceElements : 0;
      copy_async_16(tile + at(row, piece), source + (left > 0 ? piece * kPieceElements : 0),
                    max(0, min(left * kBytes<T>, 16)));
    } else {
      copy_piece<false>(tile, row, piece, source, columns, inside);
    }
  }

  // The same, at once.
  template <bool kAligned>
  __device__ static __forceinline__ void copy_piece(uint32 tile, int row, int piece, const typename T::Storage* source,
                                                    int columns, bool inside) {
    const int left = inside ? columns - piece * kPieceElements : 0;
    const typename T::Storage* const from = source + piece * kPieceElements;
    uint32 words[4] = {};
    if (kAligned && left >= kPieceElements) {
      const uint4 whole = *reinterpret_cast<const uint4*>(from);
      words[0] = whole.x, words[1] = whole.y, words[2] = whole.z, words[3] = whole.w;
    } else {
#pragma unroll
      for (int i = 0; i < kPieceElements; ++i) {
        if (i >= left) continue;
        if constexpr (kIsFloat<T>) {
          words[i] = __float_as_uint(from[i]);
        } else {
          words[i / 2] |= static_cast<uint32>(from[i]) << i % 2 * 16;
        }
      }
    }
    store_shared(tile + at(row, piece), words);
  }
};

// The A operand of a product in two parts.
template <class T>
struct SplitA {
  uint32 part[4], rest[4];
};

__device__ __forceinline__ void split_tf32(float x, uint32& part, uint32& rest) {
  part = to_tf32(x);
  rest = to_tf32(x - __uint_as_float(part));
}

// From the (16, kStep) accumulators of a product before: one tile of 8 columns, or two for 16-bit operands.
template <class T>
__device__ __forceinline__ void split_a(SplitA<T>& a, const float (*tiles)[4]) {
  if constexpr (kIsFloat<T>) {
    // Column 2c of the accumulators is row c of the inner dimension, column 2c + 1 row c + 4.
#pragma unroll
    for (int i = 0; i < 4; ++i) split_tf32(tiles[0][i % 2 * 2 + i / 2], a.part[i], a.rest[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float low = tiles[i / 2][i % 2 * 2], high = tiles[i / 2][i % 2 * 2 + 1];
      a.part[i] = pack_16bit<kIsBFloat16<T>>(low, high);
      a.rest[i] = pack_16bit<kIsBFloat16<T>>(low - unpack_16bit<kIsBFloat16<T>, 0>(a.part[i]),
                                             high - unpack_16bit<kIsBFloat16<T>, 1>(a.part[i]));
    }
  }
}

// d (16, 8) += a b, with b as it lies in memory.
template <class T>
__device__ __forceinline__ void multiply(float (&d)[4], const SplitA<T>& a, uint32 b0, uint32 b1) {
  if constexpr (kIsFloat<T>) {
    uint32 part[2], rest[2];
    split_tf32(__uint_as_float(b0), part[0], rest[0]);
    split_tf32(__uint_as_float(b1), part[1], rest[1]);
    mma_16x8x8(d, a.rest, part[0], part[1]);
    mma_16x8x8(d, a.part, rest[0], rest[1]);
    mma_16x8x8(d, a.part, part[0], part[1]);
  } else {
    mma_16x8x16<kIsBFloat16<T>>(d, a.part, b0, b1);
    mma_16x8x16<kIsBFloat16<T>>(d, a.rest, b0, b1);
  }
}

// d (16, 8) += a b, both as they lie in memory.
template <class T>
__device__ __forceinline__ void multiply(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  if constexpr (kIsFloat<T>) {
    SplitA<T> split;
#pragma unroll
    for (int i = 0; i < 4; ++i) split_tf32(__uint_as_float(a[i]), split.part[i], split.rest[i]);
    multiply(d, split, b0, b1);
  } else {
    mma_16x8x16<kIsBFloat16<T>>(d, a, b0, b1);
  }
}

// Two neighbours of a row of `columns` elements, the second only where there is one; rows of an odd length are not
// aligned to pairs.
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

// Elements `column` (even) and the next of a row of 16-bit values, zeros past the last.
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

// Matrix products of fp32 tiles with the interface of Mma: m16n8k8 in TF32, with three products to keep fp32 precision,
// or with one.
#pragma once

#include <cstdint>

#include "mma.cuh"

namespace flashbwd {

// How an fp32 product is made from TF32 ones. Three: x = big + small, and three of the four products.
enum class Fp32Products {
  kOne,             // x rounded
  kOneAsTriton,     // x truncated: as PyTorch's FlexAttention multiplies
  kThree,           // most accurate: big is x rounded, and fp32 additions sum the steps
  kThreeAsCutlass,  // as PyTorch's forward computes scores: big is x truncated, and fp32 additions sum chains of steps
};

template <Fp32Products kProducts>
struct MmaFp32 {
  using Scores = MmaFp32;
  static constexpr bool kSplit = kProducts == Fp32Products::kThree || kProducts == Fp32Products::kThreeAsCutlass;
  static constexpr bool kChained = kProducts == Fp32Products::kThreeAsCutlass;
  static constexpr int kStep = 8;
  static constexpr int kChain = kChained ? 4 : 0;                            // steps that the tensor core chains
  static constexpr bool ends_chain(int step) { return step % kChain == 0; }  // the first step is a chain of its own
  struct A {
    uint32_t big[4], small[kSplit ? 4 : 1];
  };
  struct B {
    uint32_t big[4], small[kSplit ? 4 : 1];
  };

  // kThree: big is x rounded to TF32 (two integer instructions; cvt.rna takes four on 9.0). small is the exact
  // remainder; the tensor core ignores its lowest bits, an unbiased error of 2^-22 of x. kThreeAsCutlass truncates big,
  // so small always has the sign of x, and is rounded.
  template <typename Operand>
  static __device__ __forceinline__ void split(Operand& operand, int i, uint32_t bits) {
    if constexpr (kChained) {
      operand.big[i] = bits & 0xffffe000u;
      operand.small[i] = __float_as_uint(__uint_as_float(bits) - __uint_as_float(operand.big[i])) + 0x1000u;
    } else if constexpr (kSplit) {
      operand.big[i] = (bits + 0x1000u) & 0xffffe000u;
      operand.small[i] = __float_as_uint(__uint_as_float(bits) - __uint_as_float(operand.big[i]));
    } else if constexpr (kProducts == Fp32Products::kOneAsTriton) {
      operand.big[i] = bits;  // the tensor core ignores the lowest 13 bits
    } else {
      asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(operand.big[i]) : "f"(__uint_as_float(bits)));
    }
  }

  template <int kRowBytes, int kSteps>
  struct RowsA : LaneAddress<kRowBytes, kSteps * 2, true> {
    __device__ explicit RowsA(uint32_t tile, int32_t lane, int32_t first_row, int32_t first_step = 0)
        : LaneAddress<kRowBytes, kSteps * 2, true>(tile, first_row + lane % 16, lane / 16, first_step * 2) {}
    __device__ __forceinline__ A load(int row, int step) const {
      uint32_t r[4];
      load_matrix_x4(r, this->at(row, step * 2));  // an 8 x 8 matrix of 16-bit elements is an 8 x 4 matrix of words
      A a;
#pragma unroll
      for (int i = 0; i < 4; ++i) split(a, i, r[i]);
      return a;
    }
  };

  template <int kRowBytes>
  struct RowsB : LaneAddress<kRowBytes, kRowBytes / 16, true> {
    __device__ explicit RowsB(uint32_t tile, int32_t lane, int32_t first_row)
        : LaneAddress<kRowBytes, kRowBytes / 16, true>(tile, first_row + lane % 8 + lane / 16 * 8, lane / 8 % 2, 0) {}
    __device__ __forceinline__ B load(int row, int step) const {
      uint32_t r[4];
      load_matrix_x4(r, this->at(row, step * 2));
      B b;
#pragma unroll
      for (int i = 0; i < 4; ++i) split(b, i, r[i]);
      return b;
    }
  };

  // Operands whose rows are summed are loaded word by word, because ldmatrix cannot transpose 32-bit elements. `first`
  // is the lane's word at step 0 and column 0. The swizzle changes only bits 4 to 6 of an address, so a column below 32
  // is an XOR, and all else is an offset. `column` must share no bit below 32 with the lane's first column.
  template <int kRowBytes>
  struct WordAddress {
    static_assert(kRowBytes % 128 == 0, "whole lines");
    uint32_t first;
    __device__ __forceinline__ WordAddress(uint32_t tile, uint32_t row, uint32_t column)
        : first(tile + VectorSwizzle<kRowBytes, true>::offset(row, column / 4) + column % 4 * 4) {}
    // The word kRow rows further. kRow = 4: the lane's row is one of the first four of eight; kRow = 1: it is even.
    template <int kRow>
    __device__ __forceinline__ uint32_t word(int step, int column) const {
      static_assert(kRow == 0 || kRow == 1 || kRow == 4);
      constexpr uint32_t kKey = kRow == 4 ? 1 : kRow * 2;
      return load_shared_word((first ^ (column % 32 * 4 ^ kKey * 16)) + column / 32 * 128 +
                              (step * kStep + kRow) * kRowBytes);
    }
  };

  template <int kRowBytes, int kColumns>
  struct ColumnsA : WordAddress<kRowBytes> {
    __device__ explicit ColumnsA(uint32_t tile, int32_t lane, int32_t first_column)
        : WordAddress<kRowBytes>(tile, lane % 4, first_column + lane / 4) {}
    __device__ __forceinline__ A load(int step, int column) const {
      A a;
      split(a, 0, this->template word<0>(step, column));
      split(a, 1, this->template word<0>(step, column + 8));
      split(a, 2, this->template word<4>(step, column));
      split(a, 3, this->template word<4>(step, column + 8));
      return a;
    }
  };

  // In a Held operand, lane t of a quad has columns 2 t and 2 t + 1 of the accumulator, instead of t and t + 4.
  template <int kRowBytes, int kColumns, bool kHeld>
  struct ColumnsB : WordAddress<kRowBytes> {
    static constexpr int kOther = kHeld ? 1 : 4;
    __device__ explicit ColumnsB(uint32_t tile, int32_t lane, int32_t first_column)
        : WordAddress<kRowBytes>(tile, kHeld ? lane % 4 * 2 : lane % 4, first_column + lane / 4) {}
    __device__ __forceinline__ B load(int step, int column) const {
      B b;
      split(b, 0, this->template word<0>(step, column));
      split(b, 1, this->template word<kOther>(step, column));
      split(b, 2, this->template word<0>(step, column + 8));
      split(b, 3, this->template word<kOther>(step, column + 8));
      return b;
    }
  };

  // `c` has two n-tiles for each element of `b`. A product must wait for the previous one on the same n-tile, so
  // consecutive products use different n-tiles.
  template <int kPairs>
  static __device__ __forceinline__ void multiply(float (*c)[4], const A& a, const B (&b)[kPairs]) {
    const auto products = [&](float (*sum)[4], const uint32_t (&x)[4], auto part) {
#pragma unroll
      for (int n = 0; n < 2 * kPairs; ++n) {
        const uint32_t* const y = part(b[n / 2]) + n % 2 * 2;
        multiply_tf32(sum[n], x, y[0], y[1]);
      }
    };
    const auto big = [](const B& pair) { return pair.big; };
    // The tensor core truncates its sums, so kThree starts each step at zero and adds it to `c` in fp32.
    if constexpr (kChained) {
      products(c, a.big, [](const B& pair) { return pair.small; });
      products(c, a.small, big);
      products(c, a.big, big);
    } else if constexpr (kSplit) {
      float step[2 * kPairs][4] = {};
      products(step, a.small, big);
      products(step, a.big, [](const B& pair) { return pair.small; });
      products(step, a.big, big);
#pragma unroll
      for (int n = 0; n < 2 * kPairs; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) c[n][e] += step[n][e];
      }
    } else {
      products(c, a.big, big);
    }
  }

  static constexpr int kHeldTiles = 1;
  struct Held {
    float r[4];
  };
  static __device__ __forceinline__ Held hold(const float (*c)[4]) { return {{c[0][0], c[0][2], c[0][1], c[0][3]}}; }
  static __device__ __forceinline__ A operand(const Held& held) {
    A a;
#pragma unroll
    for (int i = 0; i < 4; ++i) split(a, i, __float_as_uint(held.r[i]));
    return a;
  }
  template <int kRowBytes>
  static __device__ __forceinline__ void store(uint32_t tile, int32_t row, int32_t column, int32_t lane,
                                               const Held& held) {
    using Swizzle = VectorSwizzle<kRowBytes, true>;
    const uint32_t r = row + lane / 4, c = column + lane % 4 * 2;
    const uint32_t upper = tile + Swizzle::offset(r, c / 4) + c % 4 * 4;
    const uint32_t lower = tile + Swizzle::offset(r + 8, c / 4) + c % 4 * 4;
    store_shared_pair(upper, held.r[0], held.r[2]);
    store_shared_pair(lower, held.r[1], held.r[3]);
  }
};

template <>
struct Mma<float> : MmaFp32<Fp32Products::kThree> {
  using Scores = MmaFp32<Fp32Products::kThreeAsCutlass>;
};

}  // namespace flashbwd

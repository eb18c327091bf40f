// Warp-level matrix products on tiles in shared memory, for compute capability 8.0 and later.
//
// 16-bit elements (m16n8k16) and fp32 (m16n8k8 in TF32, with three products to keep fp32 precision or with one) have
// the same interface and addresses: a step covers 32 bytes of the summed dimension. The 16-byte vectors of each row are
// swizzled, so that the eight rows of a fragment are in different banks.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "mma_ptx.cuh"
#include "numeric.cuh"

namespace flashbwd {

// The swizzle of the 16-byte vectors of a row: an XOR over eight vectors, over four if the row is an odd number of
// 64-byte halves, or over two if it is an odd number of 32-byte quarters (such rows alternate between two or four
// groups of banks anyway). kWords: elements of 32 bits, which are also loaded singly, eight columns of four consecutive
// rows at a time, without bank conflicts.
template <int kRowBytes, bool kWords = false>
struct VectorSwizzle {
  static_assert(kRowBytes % 32 == 0, "rows are a multiple of 32 bytes");
  static __device__ __forceinline__ uint32_t key(uint32_t row) {
    if constexpr (kRowBytes % 64 != 0) return row / 4 % 2;
    if constexpr (kRowBytes % 128 != 0) return row / 2 % 4;
    return kWords ? row % 4 * 2 + row / 4 % 2 : row % 8;
  }
  static __device__ __forceinline__ uint32_t offset(uint32_t row, uint32_t vector) {
    return row * kRowBytes + (vector ^ key(row)) * 16;
  }
};

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void load_matrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

__device__ __forceinline__ void load_matrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

#if __CUDA_ARCH__ >= 900
// The inverse of load_matrix_x4.
__device__ __forceinline__ void store_matrix_x4(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}
#endif

__device__ __forceinline__ uint32_t load_shared_word(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address));
  return value;
}

__device__ __forceinline__ void store_shared_word(uint32_t address, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void store_shared_pair(uint32_t address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

// Waits for `threads` threads (whole warps) at one of the 16 named barriers of a CTA; barrier 0 is __syncthreads.
__device__ __forceinline__ void named_barrier(int32_t barrier, int32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Copies the first `bytes` (0 to 16) of a 16-byte vector and fills the rest with zeros. Both addresses are 16-byte
// aligned.
__device__ __forceinline__ void copy_async_16(uint32_t destination, const void* source, int32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// A lane's address in an operand tile. `row` and the low bit of `vector` depend on the lane, the rest does not.
// kVectors: the number of vectors per row that the warp reads, from first_vector on.
template <int kRowBytes, int kVectors, bool kWords = false>
struct LaneAddress {
  uint32_t row_base;
  uint32_t vector;  // swizzled

  __device__ __forceinline__ LaneAddress(uint32_t tile, uint32_t row, uint32_t low_vector, uint32_t first_vector)
      : row_base(tile + row * kRowBytes), vector(low_vector ^ VectorSwizzle<kRowBytes, kWords>::key(row)) {
    // The swizzle permutes groups of eight vectors, so higher bits of the vector are a plain offset.
    if constexpr (kVectors % 8 == 0) {
      row_base += first_vector * 16;
    } else if constexpr (8 % kVectors == 0) {
      row_base += first_vector / 8 * 128;
      vector ^= first_vector % 8;
    } else {
      first = first_vector;
    }
  }
  // `row` must be a multiple of 8, `even_vector` even.
  __device__ __forceinline__ uint32_t at(uint32_t row, uint32_t even_vector) const {
    const uint32_t from = 8 % kVectors == 0 || kVectors % 8 == 0 ? even_vector : first + even_vector;
    return row_base + row * kRowBytes + ((vector ^ from % 8) << 4) + from / 8 * 128;
  }

 private:
  uint32_t first;
};

// Fragments of one step. Tiles are described by their layout in memory: (rows, columns), columns contiguous.
template <typename T>
struct Mma {
  static_assert(sizeof(T) == 2);
  using Scores = Mma;  // the products for s
  static constexpr int kChain = 0;
  static constexpr int kStep = 16;  // elements of the summed dimension per step
  struct A {
    uint32_t r[4];  // (16, 16)
  };
  struct B {
    uint32_t r[4];  // (16, 16): two n-tiles of 8
  };

  // Operand A with rows as m and columns summed: 16 rows from `row`, one of kSteps steps from first_step on.
  template <int kRowBytes, int kSteps>
  struct RowsA : LaneAddress<kRowBytes, kSteps * 2> {
    __device__ explicit RowsA(uint32_t tile, int32_t lane, int32_t first_row, int32_t first_step = 0)
        : LaneAddress<kRowBytes, kSteps * 2>(tile, first_row + lane % 16, lane / 16, first_step * 2) {}
    __device__ __forceinline__ A load(int row, int step) const {
      A a;
      load_matrix_x4(a.r, this->at(row, step * 2));
      return a;
    }
  };

  // Operand B with rows as n and columns summed: 16 rows from `row`.
  template <int kRowBytes>
  struct RowsB : LaneAddress<kRowBytes, kRowBytes / 16> {
    __device__ explicit RowsB(uint32_t tile, int32_t lane, int32_t first_row)
        : LaneAddress<kRowBytes, kRowBytes / 16>(tile, first_row + lane % 8 + lane / 16 * 8, lane / 8 % 2, 0) {}
    __device__ __forceinline__ B load(int row, int step) const {
      B b;
      load_matrix_x4(b.r, this->at(row, step * 2));
      return b;
    }
  };

  // Operand A with rows summed and columns as m: 16 columns from first_column + column, of kColumns.
  template <int kRowBytes, int kColumns>
  struct ColumnsA : LaneAddress<kRowBytes, kColumns / 8> {
    __device__ explicit ColumnsA(uint32_t tile, int32_t lane, int32_t first_column)
        : LaneAddress<kRowBytes, kColumns / 8>(tile, lane % 8 + lane / 16 * 8, lane / 8 % 2, first_column / 8) {}
    __device__ __forceinline__ A load(int step, int column) const {
      A a;
      load_matrix_x4_trans(a.r, this->at(step * kStep, column / 8));
      return a;
    }
  };

  // Operand B with rows summed and columns as n: 16 columns. kHeld: the other operand is a Held.
  template <int kRowBytes, int kColumns, bool kHeld>
  struct ColumnsB : LaneAddress<kRowBytes, kColumns / 8> {
    __device__ explicit ColumnsB(uint32_t tile, int32_t lane, int32_t first_column)
        : LaneAddress<kRowBytes, kColumns / 8>(tile, lane % 16, lane / 16, first_column / 8) {}
    __device__ __forceinline__ B load(int step, int column) const {
      B b;
      load_matrix_x4_trans(b.r, this->at(step * kStep, column / 8));
      return b;
    }
  };

  static __device__ __forceinline__ void multiply(float (&c)[4], const A& a, uint32_t b0, uint32_t b1) {
    multiply_16bit<T>(c[0], c[1], c[2], c[3], a.r[0], a.r[1], a.r[2], a.r[3], b0, b1);
  }
  // `c` has two n-tiles for each element of `b`.
  template <int kPairs>
  static __device__ __forceinline__ void multiply(float (*c)[4], const A& a, const B (&b)[kPairs]) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      multiply(c[2 * i], a, b[i].r[0], b[i].r[1]);
      multiply(c[2 * i + 1], a, b[i].r[2], b[i].r[3]);
    }
  }

  // A (16, kStep) accumulator, rounded to T, as operand A of a later product.
  static constexpr int kHeldTiles = kStep / 8;  // n-tiles of the accumulator
  struct Held {
    uint32_t r[4];
  };
  static __device__ __forceinline__ Held hold(const float (*c)[4]) {
    return {{pack2<T>(c[0][0], c[0][1]), pack2<T>(c[0][2], c[0][3]), pack2<T>(c[1][0], c[1][1]),
             pack2<T>(c[1][2], c[1][3])}};
  }
  static __device__ __forceinline__ A operand(const Held& held) {
    return {{held.r[0], held.r[1], held.r[2], held.r[3]}};
  }
  // Stores to rows `row` to row + 15 of a tile, columns from `column` on. On 9.0, a lane's elements are written through
  // another lane's address, so a __syncwarp must follow reads of what the tile held before.
  template <int kRowBytes>
  static __device__ __forceinline__ void store(uint32_t tile, int32_t row, int32_t column, int32_t lane,
                                               const Held& held) {
    using Swizzle = VectorSwizzle<kRowBytes>;
#if __CUDA_ARCH__ >= 900
    store_matrix_x4(tile + Swizzle::offset(row + lane % 16, column / 8 + lane / 16), held.r);
#else
    const uint32_t r = row + lane / 4, vector = column / 8, within = lane % 4 * 4;
    store_shared_word(tile + Swizzle::offset(r, vector) + within, held.r[0]);
    store_shared_word(tile + Swizzle::offset(r + 8, vector) + within, held.r[1]);
    store_shared_word(tile + Swizzle::offset(r, vector + 1) + within, held.r[2]);
    store_shared_word(tile + Swizzle::offset(r + 8, vector + 1) + within, held.r[3]);
#endif
  }
};

// fp32 products from TF32 ones. Split: x = big + small, and three of the four products.
enum class Fp32Products {
  kOne,             // x rounded
  kOneAsTriton,     // x truncated: as PyTorch's FlexAttention computes scores
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

// Warp-level matrix products on tiles in shared memory, for compute capability 8.0 and later.
//
// 16-bit elements (m16n8k16) and fp32 (m16n8k8 in TF32: mma_fp32.cuh) have the same interface and addresses: a step
// covers 32 bytes of the summed dimension. The 16-byte vectors of each row are swizzled, so that the eight rows of a
// fragment are in different banks.
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
  // Stores 16 x 16 elements of a warp to a tile, from `row` and `column` on. On 9.0, stmatrix writes a lane's elements
  // to addresses of other lanes, so a __syncwarp must follow earlier reads of the tile.
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

}  // namespace flashbwd

// Warpgroup matrix products on tiles in shared memory with the 128-byte or the 64-byte swizzle.
//
// A tile is stored in atoms, column blocks that are one swizzle atom wide: 64 columns of 16-bit elements
// (SWIZZLE_128B) or 32 columns (SWIZZLE_64B). In an atom, each row is 128 (64) bytes, and its 16-byte vector v is at
// position v ^ (r % 8) (v ^ (r / 2 % 4)). Atoms follow each other, 1024-byte aligned. A TMA copy with a box one atom
// wide writes this layout.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "wgmma_ptx.cuh"

namespace flashbwd {

constexpr int kAtomColumns = 64;
constexpr int kAtomRowBytes = 128;

// The position of 16-byte vector `vector` within its row.
template <int kRowBytes = kAtomRowBytes>
__device__ __forceinline__ int32_t swizzled(int32_t vector, int32_t row) {
  static_assert(kRowBytes == 128 || kRowBytes == 64, "a swizzle that tensor copies have");
  return kRowBytes == 128 ? vector ^ row % 8 : vector ^ row / 2 % 4;
}

// An operand whose K dimension is along the columns of its tile (K-major); the rows are its M or N.
template <int kAtomBytes, int kRowBytes = kAtomRowBytes>
struct KMajorOperand {
  static constexpr Major kMajor = Major::K;
  static constexpr int kAtomSteps = kRowBytes / 32;  // of 16 columns each
  static constexpr int step_bytes(int k) { return k / kAtomSteps * kAtomBytes + k % kAtomSteps * 32; }
  static __device__ __forceinline__ uint64_t descriptor(uint32_t address) {
    return wgmma_descriptor<kRowBytes>(address, 16);
  }
};

// An operand whose K dimension is along the rows of its tile (MN-major); the columns are its M or N.
template <int kAtomBytes, int kRowBytes = kAtomRowBytes>
struct MnMajorOperand {
  static constexpr Major kMajor = Major::MN;
  static constexpr int step_bytes(int k) { return k * 16 * kRowBytes; }  // 16 rows per step
  static constexpr int column_bytes(int column) { return column / (kRowBytes / 2) * kAtomBytes; }
  static __device__ __forceinline__ uint64_t descriptor(uint32_t address) {
    return wgmma_descriptor<kRowBytes>(address, kAtomBytes);
  }
};

// Keeps the compiler from moving accesses to the accumulator across the issue of a product or the wait for it.
template <int kRegisters>
__device__ __forceinline__ void fence_registers(float (&d)[kRegisters]) {
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

template <int kRegisters>
__device__ __forceinline__ void fence_registers(uint32_t (&d)[kRegisters]) {
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// Forces the compiler to compute what depends on `address` here, instead of hoisting it into registers that then spill.
__device__ __forceinline__ uint32_t not_hoisted(uint32_t address) {
  asm volatile("" : "+r"(address));
  return address;
}

// d (64 x N, N = 2 * kRegisters) = or += A B^T over kSteps * 16, or with -A depending on kSignA. A and B are in shared
// memory. Commits one group.
template <typename T, int kSteps, bool kAccumulate, typename OperandA, typename OperandB, ScaleIn kSignA = ScaleIn::One,
          int kRegisters>
__device__ __forceinline__ void product(float (&d)[kRegisters], uint32_t address_a, uint32_t address_b) {
  const uint64_t a = OperandA::descriptor(address_a);
  const uint64_t b = OperandB::descriptor(address_b);
  fence_registers(d);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    wgmma<T, kRegisters * 2, OperandA::kMajor, OperandB::kMajor, kSignA>(
        d, a + (OperandA::step_bytes(k) >> 4), b + (OperandB::step_bytes(k) >> 4), kAccumulate || k > 0);
  }
  wgmma_commit();
}

// The same, with the first kRegisterSteps steps of A in registers: four registers per step, in the order of the 16-bit
// fragment of a 64 x 16 tile. If kRegisterSteps is 0, `a` is not read.
template <typename T, int kSteps, int kRegisterSteps, bool kAccumulate, typename OperandA, typename OperandB,
          ScaleIn kSignA = ScaleIn::One, int kRegisters, int kRegistersA>
__device__ __forceinline__ void product(float (&d)[kRegisters], uint32_t (&a)[kRegistersA], uint32_t address_a,
                                        uint32_t address_b) {
  const uint64_t shared_a = OperandA::descriptor(address_a);
  const uint64_t b = OperandB::descriptor(address_b);
  fence_registers(d);
  if constexpr (kRegisterSteps > 0) fence_registers(a);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const bool accumulate = kAccumulate || k > 0;
    const uint64_t b_step = b + (OperandB::step_bytes(k) >> 4);
    if (k < kRegisterSteps) {
      wgmma<T, kRegisters * 2, OperandB::kMajor, kSignA>(d, a + 4 * k, b_step, accumulate);
    } else {
      wgmma<T, kRegisters * 2, OperandA::kMajor, OperandB::kMajor, kSignA>(d, shared_a + (OperandA::step_bytes(k) >> 4),
                                                                           b_step, accumulate);
    }
  }
  wgmma_commit();
}

// The same with all of A in registers. N = 256 is split in two, because one instruction with 128 accumulator registers
// does not compile in a CTA of 512 threads.
template <typename T, bool kAccumulate, typename OperandB, int kRegisters, int kRegistersA>
__device__ __forceinline__ void product(float (&d)[kRegisters], uint32_t (&a)[kRegistersA], uint32_t address_b) {
  constexpr int kParts = kRegisters > 96 ? 2 : 1;
  constexpr int kPartRegisters = kRegisters / kParts;
  const uint64_t b = OperandB::descriptor(address_b);
  fence_registers(d);
  fence_registers(a);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kRegistersA / 4; ++k) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      wgmma<T, kPartRegisters * 2, OperandB::kMajor, ScaleIn::One>(
          d + part * kPartRegisters, a + 4 * k,
          b + ((OperandB::step_bytes(k) + OperandB::column_bytes(part * kPartRegisters * 2)) >> 4),
          kAccumulate || k > 0);
    }
  }
  wgmma_commit();
}

// Waits until all but the last kPending groups of products are complete.
template <int kPending>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

}  // namespace flashbwd

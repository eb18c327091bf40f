// Warpgroup matrix products on tiles in shared memory with the 128-byte or the 64-byte swizzle.
//
// A tile is stored in atoms, column blocks that are one swizzle atom wide: 64 columns of 16-bit elements
// (SWIZZLE_128B) or 32 columns (SWIZZLE_64B). In an atom, each row is 128 (64) bytes, and its 16-byte vector v is at
// position p ^ (r % 8) (p ^ (r / 2 % 4)). Atoms follow each other, 1024-byte aligned. A TMA copy with a box one atom
// wide writes this layout.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <type_traits>
#include <utility>

namespace flashbwd {

using cute::SM90::GMMA::Major;
using cute::SM90::GMMA::ScaleIn;
using cute::SM90::GMMA::ScaleOut;

constexpr int kAtomColumns = 64;
constexpr int kAtomRowBytes = 128;

// The position of 16-byte vector `vector` within its row.
template <int kRowBytes = kAtomRowBytes>
__device__ __forceinline__ int32_t swizzled(int32_t vector, int32_t row) {
  static_assert(kRowBytes == 128 || kRowBytes == 64, "a swizzle that tensor copies have");
  return kRowBytes == 128 ? vector ^ row % 8 : vector ^ row / 2 % 4;
}

template <int kRowBytes>
__device__ __forceinline__ uint64_t smem_descriptor(uint32_t address, int leading_bytes) {
  using cute::SM90::GMMA::LayoutType;
  cute::GmmaDescriptor descriptor;
  descriptor.bitfield.start_address_ = static_cast<uint16_t>(address >> 4);
  descriptor.bitfield.leading_byte_offset_ = static_cast<uint16_t>(leading_bytes >> 4);
  descriptor.bitfield.stride_byte_offset_ = 8 * kRowBytes >> 4;
  descriptor.bitfield.layout_type_ = static_cast<uint8_t>(kRowBytes == 128 ? LayoutType::B128 : LayoutType::B64);
  return descriptor.desc_;
}

// An operand whose K dimension is along the columns of its tile (K-major); the rows are its M or N.
template <int kAtomBytes, int kRowBytes = kAtomRowBytes>
struct KMajorOperand {
  static constexpr Major kMajor = Major::K;
  static constexpr int kAtomSteps = kRowBytes / 32;  // of 16 columns each
  static constexpr int step_bytes(int k) { return k / kAtomSteps * kAtomBytes + k % kAtomSteps * 32; }
  static __device__ __forceinline__ uint64_t descriptor(uint32_t address) {
    return smem_descriptor<kRowBytes>(address, 16);
  }
};

// An operand whose K dimension is along the rows of its tile (MN-major); the columns are its M or N.
template <int kAtomBytes, int kRowBytes = kAtomRowBytes>
struct MnMajorOperand {
  static constexpr Major kMajor = Major::MN;
  static constexpr int step_bytes(int k) { return k * 16 * kRowBytes; }  // 16 rows per step
  static constexpr int column_bytes(int column) { return column / (kRowBytes / 2) * kAtomBytes; }
  static __device__ __forceinline__ uint64_t descriptor(uint32_t address) {
    return smem_descriptor<kRowBytes>(address, kAtomBytes);
  }
};

namespace detail {

template <typename T, int N, Major kMajorA, Major kMajorB, ScaleIn kSignA>
constexpr auto shared_atom() {
  namespace atoms = cute::SM90::GMMA;
  constexpr bool kBF16 = std::is_same_v<T, __nv_bfloat16>;
  if constexpr (N == 32) {
    if constexpr (kBF16) return atoms::MMA_64x32x16_F32BF16BF16_SS<kMajorA, kMajorB, kSignA>{};
    if constexpr (!kBF16) return atoms::MMA_64x32x16_F32F16F16_SS<kMajorA, kMajorB, kSignA>{};
  } else if constexpr (N == 64) {
    if constexpr (kBF16) return atoms::MMA_64x64x16_F32BF16BF16_SS<kMajorA, kMajorB, kSignA>{};
    if constexpr (!kBF16) return atoms::MMA_64x64x16_F32F16F16_SS<kMajorA, kMajorB, kSignA>{};
  } else if constexpr (N == 128) {
    if constexpr (kBF16) return atoms::MMA_64x128x16_F32BF16BF16_SS<kMajorA, kMajorB, kSignA>{};
    if constexpr (!kBF16) return atoms::MMA_64x128x16_F32F16F16_SS<kMajorA, kMajorB, kSignA>{};
  } else {
    static_assert(N == 0, "add the atom's name here");
  }
}

template <typename T, int N, Major kMajorB, ScaleIn kSignA = ScaleIn::One>
constexpr auto register_atom() {
  namespace atoms = cute::SM90::GMMA;
  constexpr bool kBF16 = std::is_same_v<T, __nv_bfloat16>;
  if constexpr (N == 32) {
    if constexpr (kBF16) return atoms::MMA_64x32x16_F32BF16BF16_RS<Major::K, kMajorB, kSignA>{};
    if constexpr (!kBF16) return atoms::MMA_64x32x16_F32F16F16_RS<Major::K, kMajorB, kSignA>{};
  } else if constexpr (N == 64) {
    if constexpr (kBF16) return atoms::MMA_64x64x16_F32BF16BF16_RS<Major::K, kMajorB, kSignA>{};
    if constexpr (!kBF16) return atoms::MMA_64x64x16_F32F16F16_RS<Major::K, kMajorB, kSignA>{};
#ifdef CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
  } else if constexpr (N == 80) {
    if constexpr (kBF16) return atoms::MMA_64x80x16_F32BF16BF16_RS<Major::K, kMajorB, kSignA>{};
    if constexpr (!kBF16) return atoms::MMA_64x80x16_F32F16F16_RS<Major::K, kMajorB, kSignA>{};
#endif
  } else if constexpr (N == 96) {
    if constexpr (kBF16) return atoms::MMA_64x96x16_F32BF16BF16_RS<Major::K, kMajorB, kSignA>{};
    if constexpr (!kBF16) return atoms::MMA_64x96x16_F32F16F16_RS<Major::K, kMajorB, kSignA>{};
  } else if constexpr (N == 128) {
    if constexpr (kBF16) return atoms::MMA_64x128x16_F32BF16BF16_RS<Major::K, kMajorB, kSignA>{};
    if constexpr (!kBF16) return atoms::MMA_64x128x16_F32F16F16_RS<Major::K, kMajorB, kSignA>{};
  } else if constexpr (N == 192) {
    if constexpr (kBF16) return atoms::MMA_64x192x16_F32BF16BF16_RS<Major::K, kMajorB, kSignA>{};
    if constexpr (!kBF16) return atoms::MMA_64x192x16_F32F16F16_RS<Major::K, kMajorB, kSignA>{};
  } else {
    static_assert(N == 0, "add the atom's name here");
  }
}

template <typename Atom, int kRegisters, int... I>
__device__ __forceinline__ void issue(float (&d)[kRegisters], uint64_t a, uint64_t b, ScaleOut scale,
                                      std::integer_sequence<int, I...>) {
  Atom::fma(a, b, d[I]..., scale);
}

// Uses the accumulator's registers from kFirst on.
template <typename Atom, int kFirst, int kRegisters, int... I>
__device__ __forceinline__ void issue(float (&d)[kRegisters], const uint32_t* a, uint64_t b, ScaleOut scale,
                                      std::integer_sequence<int, I...>) {
  Atom::fma(a[0], a[1], a[2], a[3], b, d[kFirst + I]..., scale);
}

}  // namespace detail

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
  using Atom = decltype(detail::shared_atom<T, kRegisters * 2, OperandA::kMajor, OperandB::kMajor, kSignA>());
  const uint64_t a = OperandA::descriptor(address_a);
  const uint64_t b = OperandB::descriptor(address_b);
  fence_registers(d);
  cute::warpgroup_arrive();
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    detail::issue<Atom>(d, a + (OperandA::step_bytes(k) >> 4), b + (OperandB::step_bytes(k) >> 4),
                        kAccumulate || k > 0 ? ScaleOut::One : ScaleOut::Zero,
                        std::make_integer_sequence<int, kRegisters>());
  }
  cute::warpgroup_commit_batch();
}

// The same, with the first kRegisterSteps steps of A in registers: four registers per step, in the order of the 16-bit
// fragment of a 64 x 16 tile. If kRegisterSteps is 0, `a` is not read.
template <typename T, int kSteps, int kRegisterSteps, bool kAccumulate, typename OperandA, typename OperandB,
          ScaleIn kSignA = ScaleIn::One, int kRegisters, int kRegistersA>
__device__ __forceinline__ void product(float (&d)[kRegisters], uint32_t (&a)[kRegistersA], uint32_t address_a,
                                        uint32_t address_b) {
  using RegisterAtom = decltype(detail::register_atom<T, kRegisters * 2, OperandB::kMajor, kSignA>());
  using Atom = decltype(detail::shared_atom<T, kRegisters * 2, OperandA::kMajor, OperandB::kMajor, kSignA>());
  using Indices = std::make_integer_sequence<int, kRegisters>;
  const uint64_t shared_a = OperandA::descriptor(address_a);
  const uint64_t b = OperandB::descriptor(address_b);
  fence_registers(d);
  if constexpr (kRegisterSteps > 0) fence_registers(a);
  cute::warpgroup_arrive();
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const ScaleOut scale = kAccumulate || k > 0 ? ScaleOut::One : ScaleOut::Zero;
    const uint64_t b_step = b + (OperandB::step_bytes(k) >> 4);
    if (k < kRegisterSteps) {
      detail::issue<RegisterAtom, 0>(d, a + 4 * k, b_step, scale, Indices());
    } else {
      detail::issue<Atom>(d, shared_a + (OperandA::step_bytes(k) >> 4), b_step, scale, Indices());
    }
  }
  cute::warpgroup_commit_batch();
}

// The same with all of A in registers. N = 256 is split in two, because one instruction with 128 accumulator registers
// does not compile in a CTA of 512 threads.
template <typename T, bool kAccumulate, typename OperandB, int kRegisters, int kRegistersA>
__device__ __forceinline__ void product(float (&d)[kRegisters], uint32_t (&a)[kRegistersA], uint32_t address_b) {
  constexpr int kParts = kRegisters > 96 ? 2 : 1;
  constexpr int kPartRegisters = kRegisters / kParts;
  using Atom = decltype(detail::register_atom<T, kPartRegisters * 2, OperandB::kMajor>());
  using Indices = std::make_integer_sequence<int, kPartRegisters>;
  const uint64_t b = OperandB::descriptor(address_b);
  fence_registers(d);
  fence_registers(a);
  cute::warpgroup_arrive();
#pragma unroll
  for (int k = 0; k < kRegistersA / 4; ++k) {
    const ScaleOut scale = kAccumulate || k > 0 ? ScaleOut::One : ScaleOut::Zero;
    const uint64_t b_step = b + (OperandB::step_bytes(k) >> 4);
    detail::issue<Atom, 0>(d, a + 4 * k, b_step, scale, Indices());
    if constexpr (kParts == 2) {
      detail::issue<Atom, kPartRegisters>(d, a + 4 * k, b_step + (OperandB::column_bytes(kRegisters) >> 4), scale,
                                          Indices());
    }
  }
  cute::warpgroup_commit_batch();
}

// Waits until all but the last kPending groups of products are complete.
template <int kPending>
__device__ __forceinline__ void wait_products() {
  cute::warpgroup_wait<kPending>();
}

}  // namespace flashbwd

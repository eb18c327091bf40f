// PTX wrappers of warpgroup matrix products. The PTX ISA describes the instructions in the section "Asynchronous
// Warpgroup Level Matrix Multiply-Accumulate Instructions". Titles in quotation marks are those of its subsections.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace flashbwd {

// The values are those of the immediate operands of wgmma.mma_async.
enum class Major { K = 0, MN = 1 };  // which dimension of an operand is contiguous in shared memory
enum class ScaleIn { Neg = -1, One = 1 };

// "Matrix Descriptor Format": describes an operand in shared memory with the swizzle of kRowBytes bytes per row. Eight
// rows form a swizzle pattern, and patterns follow each other without a gap. The fields are in units of 16 bytes.
template <int kRowBytes>
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address, uint32_t leading_bytes) {
  static_assert(kRowBytes == 128 || kRowBytes == 64, "a swizzle that tensor copies have");
  constexpr uint64_t kStride = 8 * kRowBytes >> 4;
  constexpr uint64_t kSwizzle = kRowBytes == 128 ? 1 : 2;
  const uint64_t start = address >> 4 & 0x3fff, leading = leading_bytes >> 4 & 0x3fff;
  return start | leading << 16 | kStride << 32 | kSwizzle << 62;
}

// Orders the following products after this thread's earlier accesses to their registers.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Makes one group of all products since the previous commit.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// The first operands of a product are the accumulator's registers d[0], d[1] and so on. FLASHBWD_NUMBERS_n are their
// numbers in the text of the asm statement, and FLASHBWD_REGISTERS_n their constraints.
#define FLASHBWD_NUMBERS_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define FLASHBWD_NUMBERS_32 \
  FLASHBWD_NUMBERS_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FLASHBWD_NUMBERS_40 FLASHBWD_NUMBERS_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FLASHBWD_NUMBERS_48 FLASHBWD_NUMBERS_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FLASHBWD_NUMBERS_64 \
  FLASHBWD_NUMBERS_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FLASHBWD_NUMBERS_80 \
  FLASHBWD_NUMBERS_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define FLASHBWD_NUMBERS_96 \
  FLASHBWD_NUMBERS_80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"

#define FLASHBWD_FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define FLASHBWD_EIGHT(i) FLASHBWD_FOUR(i), FLASHBWD_FOUR(i + 4)
#define FLASHBWD_REGISTERS_16 FLASHBWD_EIGHT(0), FLASHBWD_EIGHT(8)
#define FLASHBWD_REGISTERS_32 FLASHBWD_REGISTERS_16, FLASHBWD_EIGHT(16), FLASHBWD_EIGHT(24)
#define FLASHBWD_REGISTERS_40 FLASHBWD_REGISTERS_32, FLASHBWD_EIGHT(32)
#define FLASHBWD_REGISTERS_48 FLASHBWD_REGISTERS_40, FLASHBWD_EIGHT(40)
#define FLASHBWD_REGISTERS_64 FLASHBWD_REGISTERS_48, FLASHBWD_EIGHT(48), FLASHBWD_EIGHT(56)
#define FLASHBWD_REGISTERS_80 FLASHBWD_REGISTERS_64, FLASHBWD_EIGHT(64), FLASHBWD_EIGHT(72)
#define FLASHBWD_REGISTERS_96 FLASHBWD_REGISTERS_80, FLASHBWD_EIGHT(80), FLASHBWD_EIGHT(88)

// One wgmma.mma_async. `type` is that of A and B. `a`, `b`, `accumulate`, `sign` (of A; B's is positive) and `majors`
// are the operands' numbers in the text. The other arguments are the operands' constraints and values.
#define FLASHBWD_WGMMA_TYPE(type, n, count, a, b, accumulate, sign, majors, ...)                                       \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, " accumulate ", 0; wgmma.mma_async.sync.aligned.m64n" #n                \
               "k16.f32." type "." type " {" FLASHBWD_NUMBERS_##count "}, " a ", " b ", p, " sign ", 1, " majors "; }" \
               : FLASHBWD_REGISTERS_##count                                                                            \
               : __VA_ARGS__)
#define FLASHBWD_WGMMA(...)                           \
  do {                                                \
    if constexpr (std::is_same_v<T, __nv_bfloat16>) { \
      FLASHBWD_WGMMA_TYPE("bf16", __VA_ARGS__);       \
    } else {                                          \
      static_assert(std::is_same_v<T, __half>);       \
      FLASHBWD_WGMMA_TYPE("f16", __VA_ARGS__);        \
    }                                                 \
  } while (false)

// A is in shared memory or in registers. x0 to x7 are the numbers of the operands after the accumulator: count, count +
// 1 and so on. They are arguments because the preprocessor cannot add.
#define FLASHBWD_WGMMA_SHARED(n, count, x0, x1, x2, x3, x4, x5)                                              \
  FLASHBWD_WGMMA(n, count, "%" #x0, "%" #x1, "%" #x2, "%" #x3, "%" #x4 ", %" #x5, "l"(a), "l"(b), "r"(flag), \
                 "n"(int(kSignA)), "n"(int(kMajorA)), "n"(int(kMajorB)))
#define FLASHBWD_WGMMA_REGISTERS(n, count, x0, x1, x2, x3, x4, x5, x6, x7)                                            \
  FLASHBWD_WGMMA(n, count, "{%" #x0 ", %" #x1 ", %" #x2 ", %" #x3 "}", "%" #x4, "%" #x5, "%" #x6, "%" #x7, "r"(a[0]), \
                 "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(flag), "n"(int(kSignA)), "n"(int(kMajorB)))

// "wgmma.mma_async": d (64 x N, in N / 2 registers per thread) = A B if not `accumulate`, else d += A B. If kSignA is
// ScaleIn::Neg, the instruction uses -A. A (64 x 16) and B (16 x N) are in shared memory.
template <typename T, int N, Major kMajorA, Major kMajorB, ScaleIn kSignA>
__device__ __forceinline__ void wgmma(float* d, uint64_t a, uint64_t b, bool accumulate) {
  static_assert(N == 32 || N == 64 || N == 128, "add a line for this N");
  const int32_t flag = accumulate;
  if constexpr (N == 32) FLASHBWD_WGMMA_SHARED(32, 16, 16, 17, 18, 19, 20, 21);
  if constexpr (N == 64) FLASHBWD_WGMMA_SHARED(64, 32, 32, 33, 34, 35, 36, 37);
  if constexpr (N == 128) FLASHBWD_WGMMA_SHARED(128, 64, 64, 65, 66, 67, 68, 69);
}

// The same with A in four registers per thread.
template <typename T, int N, Major kMajorB, ScaleIn kSignA>
__device__ __forceinline__ void wgmma(float* d, const uint32_t* a, uint64_t b, bool accumulate) {
  static_assert(N == 32 || N == 64 || N == 80 || N == 96 || N == 128 || N == 192, "add a line for this N");
  const int32_t flag = accumulate;
  if constexpr (N == 32) FLASHBWD_WGMMA_REGISTERS(32, 16, 16, 17, 18, 19, 20, 21, 22, 23);
  if constexpr (N == 64) FLASHBWD_WGMMA_REGISTERS(64, 32, 32, 33, 34, 35, 36, 37, 38, 39);
  if constexpr (N == 80) FLASHBWD_WGMMA_REGISTERS(80, 40, 40, 41, 42, 43, 44, 45, 46, 47);
  if constexpr (N == 96) FLASHBWD_WGMMA_REGISTERS(96, 48, 48, 49, 50, 51, 52, 53, 54, 55);
  if constexpr (N == 128) FLASHBWD_WGMMA_REGISTERS(128, 64, 64, 65, 66, 67, 68, 69, 70, 71);
  if constexpr (N == 192) FLASHBWD_WGMMA_REGISTERS(192, 96, 96, 97, 98, 99, 100, 101, 102, 103);
}

#undef FLASHBWD_NUMBERS_16
#undef FLASHBWD_NUMBERS_32
#undef FLASHBWD_NUMBERS_40
#undef FLASHBWD_NUMBERS_48
#undef FLASHBWD_NUMBERS_64
#undef FLASHBWD_NUMBERS_80
#undef FLASHBWD_NUMBERS_96
#undef FLASHBWD_FOUR
#undef FLASHBWD_EIGHT
#undef FLASHBWD_REGISTERS_16
#undef FLASHBWD_REGISTERS_32
#undef FLASHBWD_REGISTERS_40
#undef FLASHBWD_REGISTERS_48
#undef FLASHBWD_REGISTERS_64
#undef FLASHBWD_REGISTERS_80
#undef FLASHBWD_REGISTERS_96
#undef FLASHBWD_WGMMA_TYPE
#undef FLASHBWD_WGMMA
#undef FLASHBWD_WGMMA_SHARED
#undef FLASHBWD_WGMMA_REGISTERS

}  // namespace flashbwd

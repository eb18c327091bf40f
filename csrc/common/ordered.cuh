// Counters and flags in global memory with which CTAs of one GPU wait for each other.
#pragma once

#include <cstdint>

namespace flashbwd {

// Acquire: this thread sees all writes that precede the matching release.
__device__ __forceinline__ int32_t load_acquire(const int32_t* pointer) {
  int32_t value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
  return value;
}

// The thread does not stall until it uses the value.
__device__ __forceinline__ int32_t load_relaxed(const int32_t* pointer) {
  int32_t value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
  return value;
}

__device__ __forceinline__ void add_relaxed(int32_t* pointer, int32_t value) {
  asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}

// Earlier relaxed loads become acquire loads, and later relaxed adds release earlier writes.
__device__ __forceinline__ void fence_acq_rel() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

__device__ __forceinline__ void store_release(int32_t* pointer, int32_t value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}

__device__ __forceinline__ void store_release(uint8_t* pointer, uint32_t value) {
  asm volatile("st.release.gpu.global.u8 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}

__device__ __forceinline__ void add_release(int32_t* pointer, int32_t value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}

__device__ __forceinline__ void or_release(int32_t* pointer, int32_t bits) {
  asm volatile("red.release.gpu.global.or.b32 [%0], %1;" ::"l"(pointer), "r"(bits) : "memory");
}

}  // namespace flashbwd

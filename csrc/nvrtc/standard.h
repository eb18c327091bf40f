// What the attention kernels use of the standard library and of CUDA's headers, for NVRTC, which has neither.
// flashbwd/mods/nvrtc.py offers this file under the names of those headers.
#pragma once

using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long;
using uint64_t = unsigned long;
using uintptr_t = unsigned long;
#define INT32_MAX 2147483647
#define INFINITY __int_as_float(0x7f800000)

namespace std {

template <typename T, T kValue>
struct integral_constant {
  static constexpr T value = kValue;
};

template <bool kCondition, typename True, typename False>
struct conditional {
  using type = True;
};
template <typename True, typename False>
struct conditional<false, True, False> {
  using type = False;
};
template <bool kCondition, typename True, typename False>
using conditional_t = typename conditional<kCondition, True, False>::type;

template <typename A, typename B>
constexpr bool is_same_v = false;
template <typename A>
constexpr bool is_same_v<A, A> = true;

template <typename T>
constexpr T max(T a, T b) {
  return a < b ? b : a;
}

// Host code that the kernels' headers declare mentions these two.
template <typename T, int kSize>
struct array {
  T elements[kSize];
  constexpr const T& operator[](int i) const { return elements[i]; }
};
struct string {
  string(const char*) {}
};

}  // namespace std

struct alignas(64) CUtensorMap {
  uint64_t opaque[16];
};

struct __nv_bfloat16 {
  uint16_t bits;
};
struct alignas(4) __nv_bfloat162 {
  uint32_t bits;
};
struct __half {
  uint16_t bits;
};
struct alignas(4) __half2 {
  uint32_t bits;
};

__device__ __forceinline__ __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
  __nv_bfloat162 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair.bits) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ __half2 __floats2half2_rn(float low, float high) {
  __half2 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair.bits) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ __nv_bfloat16 __float2bfloat16_rn(float x) {
  __nv_bfloat16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
__device__ __forceinline__ __half __float2half_rn(float x) {
  __half y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
__device__ __forceinline__ float __bfloat162float(__nv_bfloat16 x) {
  return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
}
__device__ __forceinline__ float __half2float(__half x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
__device__ __forceinline__ float2 __bfloat1622float2(__nv_bfloat162 pair) {
  return make_float2(__uint_as_float(pair.bits << 16), __uint_as_float(pair.bits & 0xffff0000u));
}
__device__ __forceinline__ float2 __half22float2(__half2 pair) {
  return make_float2(__half2float({static_cast<uint16_t>(pair.bits)}),
                     __half2float({static_cast<uint16_t>(pair.bits >> 16)}));
}

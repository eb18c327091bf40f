// Conversions and fast functions of one number, for modifications and the decoding kernels. NVRTC compiles this file
// too, so it includes no header.
#pragma once

#ifdef __CUDACC__

namespace flashbwd {

using uint32 = unsigned int;
#define FLASHBWD_INFINITY __int_as_float(0x7f800000)

// Rounds two floats to 16 bits and packs them into one register, `low` in the low half.
template <bool kBFloat16>
__device__ __forceinline__ uint32 pack_16bit(float low, float high) {
  uint32 packed;
  if constexpr (kBFloat16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// Returns tanh(x): a Taylor series near 0, else 1 - 2 / (exp(2 |x|) + 1). The relative error is below 1e-6, and the
// cost is a fifth of that of tanhf.
__device__ __forceinline__ float tanh_of(float x) {
  constexpr float kTwoLog2e = 2.8853900817779268f;
  const float x2 = x * x;
  const float series = x * (1.f + x2 * (-1.f / 3 + x2 * (2.f / 15 + x2 * (-17.f / 315))));
  const float large = 1.f - __fdividef(2.f, exp2_approx(fabsf(x) * kTwoLog2e) + 1.f);
  return x2 < 0.03f ? series : copysignf(large, x);
}

__device__ __forceinline__ float float_of_half(unsigned short bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;\n" : "=f"(x) : "h"(bits));
  return x;
}

__device__ __forceinline__ float float_of_bfloat16(unsigned short bits) {
  return __uint_as_float(static_cast<uint32>(bits) << 16);
}

// The value in the low (0) or high (1) half of a packed register.
template <bool kBFloat16, int kHalf>
__device__ __forceinline__ float unpack_16bit(uint32 packed) {
  const unsigned short bits = static_cast<unsigned short>(packed >> (16 * kHalf));
  return kBFloat16 ? float_of_bfloat16(bits) : float_of_half(bits);
}

}  // namespace flashbwd

#endif

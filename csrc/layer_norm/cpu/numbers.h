// Conversions of 16-bit numbers without branches, so that the compiler vectorises loops that contain them.
#pragma once

#include <cstdint>
#include <cstring>

#define FLASHBWD_INLINE inline __attribute__((always_inline))

namespace flashbwd::cpu {

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

FLASHBWD_INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

FLASHBWD_INLINE float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

FLASHBWD_INLINE float to_float(float value) { return value; }

FLASHBWD_INLINE float to_float(BFloat16 value) { return float_of(uint32_t{value.bits} << 16); }

FLASHBWD_INLINE float to_float(Float16 value) {
  const uint32_t sign = (uint32_t{value.bits} & 0x8000u) << 16;
  const uint32_t magnitude = (uint32_t{value.bits} & 0x7fffu) << 13;  // exponent and mantissa in float's positions
  const uint32_t normal = magnitude + 0x38000000u;                    // adds the difference of the exponents' biases
  const uint32_t special = 0u - uint32_t{magnitude >= 0x0f800000u};   // all bits set for infinities and NaN
  // Subnormal numbers have no hidden bit. As floats they are normal numbers, so a processor that flushes denormals
  // keeps them.
  const uint32_t subnormal = bits_of(float_of(magnitude + 0x38800000u) - 0x1p-14f);
  const uint32_t is_subnormal = 0u - uint32_t{magnitude < 0x00800000u};
  return float_of(sign | (is_subnormal & subnormal) | (~is_subnormal & normal) | (special & 0x7f800000u));
}

// Rounds to nearest, ties to even. NaN stays NaN.
FLASHBWD_INLINE void store(float value, float* target) { *target = value; }

FLASHBWD_INLINE void store(float value, BFloat16* target) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  target->bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

FLASHBWD_INLINE void store(float value, Float16* target) {
  const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // One unit in the last place of 0.5 is the smallest float16, so the sum rounds to a multiple of it.
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t is_subnormal = 0u - uint32_t{magnitude < 0x38800000u};  // all bits set below 2^-14
  uint32_t result = (subnormal & is_subnormal) | (normal & ~is_subnormal);
  result = magnitude >= 0x477ff000u ? 0x7c00u : result;  // 65520, which rounds to infinity
  result = magnitude > 0x7f800000u ? 0x7e00u : result;
  target->bits = static_cast<uint16_t>(((bits >> 16) & 0x8000u) | result);
}

}  // namespace flashbwd::cpu

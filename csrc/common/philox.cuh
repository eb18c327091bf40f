// Redraws the dropout masks of the supported forward passes. docs/numerics.md describes how they number the elements.
#pragma once

#include <cstdint>

namespace flashbwd {

// Returns x, which must be equal in all lanes. The reduction tells the compiler that it is, so that values derived from
// x go to uniform registers.
__device__ __forceinline__ uint32_t uniform(uint32_t x) { return __reduce_or_sync(0xffffffffu, x); }
__device__ __forceinline__ uint64_t uniform(uint64_t x) {
  return uint64_t{uniform(static_cast<uint32_t>(x >> 32))} << 32 | uniform(static_cast<uint32_t>(x));
}

// The 64-bit product. For the C++ expression, nvcc 13.0 also adds 0 to the upper half: a quarter of Philox's
// instructions.
__device__ __forceinline__ uint64_t multiply_wide(uint32_t a, uint32_t b) {
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
}

// One round of Philox4x32 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011). kZeros:
// the upper half of the counter is 0.
template <bool kZeros = false>
__device__ __forceinline__ uint4 philox_round(const uint4& c, uint32_t k0, uint32_t k1) {
  const uint64_t first = multiply_wide(0xD2511F53u, c.x);
  const uint64_t second = kZeros ? 0 : multiply_wide(0xCD9E8D57u, c.z);
  return make_uint4(static_cast<uint32_t>(second >> 32) ^ c.y ^ k0, static_cast<uint32_t>(second),
                    static_cast<uint32_t>(first >> 32) ^ c.w ^ k1, static_cast<uint32_t>(first));
}

// Increments of the key from round to round.
constexpr uint32_t kPhiloxKeyStep0 = 0x9E3779B9u, kPhiloxKeyStep1 = 0xBB67AE85u;

template <int kRounds, bool kZeros = false>
__device__ __forceinline__ uint4 philox4x32(uint64_t seed, uint64_t counter_low, uint32_t c2, uint32_t c3) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  uint4 c = make_uint4(static_cast<uint32_t>(counter_low), static_cast<uint32_t>(counter_low >> 32), c2, c3);
  c = philox_round<kZeros>(c, k0, k1);
#pragma unroll
  for (int round = 1; round < kRounds; ++round) {
    k0 += kPhiloxKeyStep0;
    k1 += kPhiloxKeyStep1;
    c = philox_round(c, k0, k1);
  }
  return c;
}

// PyTorch's memory-efficient forward: element n of the mask is word n % 4 of call n / 4. Words from a threshold on are
// kept (efficient_threshold in attention/dropout.h).
__device__ __forceinline__ uint4 efficient_words(uint64_t seed, uint64_t draw) {
  return philox4x32<10, true>(seed, draw, 0, 0);
}
__device__ __forceinline__ uint32_t word_of(const uint4& words, uint32_t index) {
  const uint32_t low = index & 1 ? words.y : words.x, high = index & 1 ? words.w : words.z;
  return index & 2 ? high : low;
}

// FlashAttention-2: the 16 bytes of queries {i, i ^ 8} and keys {j, j ^ 1, j ^ 8, j ^ 16, ...} in a block of 16 queries
// and 32 keys. Query i and key j have byte j / 16 % 2 * 8 + j / 8 % 2 * 4 + i / 8 % 2 * 2 + j % 2. Bytes up to a
// threshold are kept (flash_threshold in attention/dropout.h).
__device__ __forceinline__ uint4 flash_bytes(uint64_t seed, uint64_t head_offset, uint32_t i, uint32_t j) {
  return philox4x32<7>(seed, head_offset + i % 8 * 4 + j % 8 / 2, i / 16, j / 32);
}

}  // namespace flashbwd

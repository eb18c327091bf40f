// Which elements a dropout kept.
#pragma once

#include "../common/philox.cuh"
#include "arguments.h"

namespace flashbwd::layer_norm {

// Bit e: whether element first + e is kept, numbered as PyTorch's memory-efficient attention numbers its own: element n
// has word n % 4 of the block of counter n / 4. Blocks before `first` may be those of negative numbers, which nobody
// uses.
template <int kElements>
__device__ uint32_t drawn_bits(uint64_t seed, uint64_t first, uint32_t keep_from) {
  const int skip = first & 3;
  uint32_t bits = 0;
#pragma unroll 1
  for (int q = 0; 4 * q < kElements + skip; ++q) {
    const uint4 words = philox4x32<10>(seed, ((first >> 2) + q) & (~uint64_t{0} >> 2), 0, 0);
    bits |= (words.x >= keep_from ? 1u : 0u) << 4 * q | (words.y >= keep_from ? 2u : 0u) << 4 * q |
            (words.z >= keep_from ? 4u : 0u) << 4 * q | (words.w >= keep_from ? 8u : 0u) << 4 * q;
  }
  return bits >> skip & ((1u << kElements) - 1);
}

// Bit e: whether keep[e] is set, for the elements from `skip` on and before `count`.
template <int kElements>
__device__ uint32_t given_bits(const uint8_t* keep, int skip, int count, bool vector) {
  uint32_t bits = 0;
  if (vector && skip == 0 && count == kElements) {
#pragma unroll
    for (int q = 0; q < kElements / 4; ++q) {
      const uint32_t four = *reinterpret_cast<const uint32_t*>(keep + 4 * q);  // each byte 0 or 1
      bits |= four * 0x10204080u >> 28 << 4 * q;
    }
  } else {
    for (int e = skip; e < count; ++e) bits |= (keep[e] != 0 ? 1u : 0u) << e;
  }
  return bits;
}

}  // namespace flashbwd::layer_norm

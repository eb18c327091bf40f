// Which elements a dropout kept.
#pragma once

#include "../common/philox.cuh"
#include "arguments.h"
#include "device.cuh"

namespace flashbwd::layer_norm {

// Bit e: whether element first + e is kept, numbered as PyTorch's memory-efficient attention numbers its own: element n
// has word n % 4 of the block of counter n / 4. Blocks before `first` may be those of negative numbers, which nobody
// uses.
template <int kElements>
__device__ uint32_t drawn_bits(uint64_t seed, uint64_t first, uint32_t keep_from) {
  const auto four_bits = [&](int q) {
    const uint4 words = philox4x32<10, true>(seed, ((first >> 2) + q) & (~uint64_t{0} >> 2), 0, 0);
    return (words.x >= keep_from ? 1u : 0u) << 4 * q | (words.y >= keep_from ? 2u : 0u) << 4 * q |
           (words.z >= keep_from ? 4u : 0u) << 4 * q | (words.w >= keep_from ? 8u : 0u) << 4 * q;
  };
  uint32_t bits = 0;
#pragma unroll
  for (int q = 0; q < kElements / 4; ++q) bits |= four_bits(q);
  if (const int skip = first & 3; skip != 0) {  // one block more
    bits = (bits | four_bits(kElements / 4)) >> skip & ((1u << kElements) - 1);
  }
  return bits;
}

// Bit e: whether keep[e] is set, for kElements elements that lie as aligned words in global or shared memory. Bytes
// that are no element's may hold anything.
template <int kElements>
__device__ uint32_t given_bits(const void* keep) {
  uint32_t bits = 0;
#pragma unroll
  for (int q = 0; q < kElements / 4; ++q) {
    bits |= (static_cast<const uint32_t*>(keep)[q] & 0x01010101u) * 0x10204080u >> 28 << 4 * q;
  }
  return bits;
}

// Fetches kElements of these into shared memory, of which `skip` to `count` are wanted: asynchronously with `vector`,
// where the others are the tensor's too, else one by one.
template <int kElements>
__device__ void fill_mask(uint32_t shared, const uint8_t* keep, int skip, int count, bool vector) {
  if (vector) {
    copy_async<kElements>(shared, keep);
    return;
  }
#pragma unroll 1
  for (int e = skip; e < count; ++e) store_shared(shared + e, keep[e]);
}

// Bits `skip` to `count` alone, whose bytes are read one by one.
template <int kElements>
__device__ uint32_t given_bits(const uint8_t* keep, int skip, int count) {
  uint32_t bits = 0;
#pragma unroll
  for (int e = 0; e < kElements; ++e) {
    if (e >= skip && e < count) bits |= static_cast<uint32_t>(keep[e]) << e;
  }
  return bits;
}

}  // namespace flashbwd::layer_norm

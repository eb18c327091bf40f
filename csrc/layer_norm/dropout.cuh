// Which elements a dropout kept.
#pragma once

#include "../common/philox.cuh"
#include "arguments.h"
#include "device.cuh"

namespace flashbwd::layer_norm {

// A mask of up to 32 elements is one register: element e has bit mask_bit(e), which puts four neighbours, a quad, at
// the same place of each byte. Shifted left by 7 - quad, the bytes have the signs of that quad's elements.
constexpr int mask_bit(int e) { return 8 * (e % 4) + e / 4; }
constexpr uint32_t kQuad = 0x01010101u;

// The value of element e of a quad, or 0 where it was dropped. `signs`: the mask, shifted to that quad.
inline __device__ uint32_t kept_or_zero(uint32_t value, uint32_t signs, int selector) {
  uint32_t mask;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(mask) : "r"(signs), "r"(selector));
  return value & mask;
}
inline __device__ float kept_or_zero(float value, uint32_t signs, int e) {
  return __uint_as_float(kept_or_zero(__float_as_uint(value), signs, 0x8888 + 0x1111 * e));
}

// Of 16 bytes of T, what was dropped becomes 0. `mask`: shifted so that the first of them is element 0.
template <typename T>
__device__ uint4 kept_or_zero(uint4 values, uint32_t mask) {
  if constexpr (sizeof(T) == 4) {
    const uint32_t signs = mask << 7;
    return make_uint4(kept_or_zero(values.x, signs, 0x8888), kept_or_zero(values.y, signs, 0x9999),
                      kept_or_zero(values.z, signs, 0xaaaa), kept_or_zero(values.w, signs, 0xbbbb));
  } else {
    return make_uint4(kept_or_zero(values.x, mask << 7, 0x9988), kept_or_zero(values.y, mask << 7, 0xbbaa),
                      kept_or_zero(values.z, mask << 6, 0x9988), kept_or_zero(values.w, mask << 6, 0xbbaa));
  }
}

// A block's four elements, as quad 0.
inline __device__ uint32_t drawn_quad(uint64_t seed, uint64_t block, uint32_t keep_from) {
  const uint4 words = philox4x32<10, true>(seed, block & (~uint64_t{0} >> 2), 0, 0);
  uint32_t kept = words.x >= keep_from ? 1u : 0u;
  if (words.y >= keep_from) kept |= 1u << 8;
  if (words.z >= keep_from) kept |= 1u << 16;
  if (words.w >= keep_from) kept |= 1u << 24;
  return kept;
}

// The mask of kElements elements from number `first` on, as PyTorch's memory-efficient attention numbers its own:
// element n has word n % 4 of the block of counter n / 4. Blocks before the first may be those of negative numbers,
// which nobody uses.
template <int kElements>
__device__ uint32_t drawn_mask(uint64_t seed, uint64_t first, uint32_t keep_from) {
  constexpr int kQuads = (kElements + 3) / 4;
  const uint64_t block = first >> 2;
  const int skip = first & 3;
  uint32_t kept = 0;
  const auto low = static_cast<uint32_t>(block);
  if (skip == 0 && low <= ~0u - kQuads) {  // quads are blocks; their numbers' upper halves agree: less to compute
#pragma unroll
    for (int q = 0; q < kQuads; ++q) kept |= drawn_quad(seed, block - low | (low + q), keep_from) << q;
    return kept;
  }
#pragma unroll 1
  for (int q = 0; q < kQuads + 1; ++q) kept |= drawn_quad(seed, block + q, keep_from) << q;
  return __funnelshift_r(kept, kept >> 1, 8 * skip) & kQuad * ((1u << kQuads) - 1);
}

// The mask from keep[e], for kElements elements that lie as aligned words in global or shared memory. Bytes that are no
// element's may hold anything.
template <int kElements>
__device__ uint32_t given_mask(const void* keep) {
  uint32_t mask = 0;
#pragma unroll
  for (int q = 0; q < kElements / 4; ++q) mask |= (static_cast<const uint32_t*>(keep)[q] & kQuad) << q;
  return mask;
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

// The mask of elements `skip` to `count` alone, whose bytes are read one by one.
template <int kElements>
__device__ uint32_t given_mask(const uint8_t* keep, int skip, int count) {
  uint32_t mask = 0;
#pragma unroll
  for (int e = 0; e < kElements; ++e) {
    if (e >= skip && e < count) mask |= static_cast<uint32_t>(keep[e]) << mask_bit(e);
  }
  return mask;
}

}  // namespace flashbwd::layer_norm

// Dropout masks: loading a given mask, and regenerating one from the Philox state.
#pragma once

#include "../common/philox.cuh"
#include "arguments.h"
#include "device.cuh"

namespace flashbwd::layer_norm {

// A mask of up to 32 elements is one register, in which element e has bit mask_bit(e): the four elements of a quad have
// the same bit position in the four bytes. Shifted left by 7 - quad, the sign bits of the bytes are the quad's mask,
// which prmt can replicate.
constexpr int mask_bit(int e) { return 8 * (e % 4) + e / 4; }
constexpr uint32_t kQuad = 0x01010101u;

// Returns `value`, or 0 if it was dropped. `signs`: the mask, shifted left for this quad. `selector`: the prmt selector
// that replicates the sign of the element's byte.
inline __device__ uint32_t kept_or_zero(uint32_t value, uint32_t signs, int selector) {
  uint32_t mask;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(mask) : "r"(signs), "r"(selector));
  return value & mask;
}
inline __device__ float kept_or_zero(float value, uint32_t signs, int e) {
  return __uint_as_float(kept_or_zero(__float_as_uint(value), signs, 0x8888 + 0x1111 * e));
}

// Zeroes the dropped elements among 16 bytes of T. `mask`: shifted right so that the first of them is element 0.
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

// The keys of all Philox rounds and the offset, in shared memory. Loading a key takes fewer instructions than computing
// it from the previous one.
struct DrawnFrom {
  static constexpr int kRounds = 10;
  uint32_t shared;  // (kRounds, 2) keys, then the offset: kDrawnFromBytes
  uint32_t keep_from;

  // Called by all threads of the CTA; the caller synchronizes them before the first read.
  __device__ void write(const int64_t* rng) const {
    const auto* words = reinterpret_cast<const uint32_t*>(rng);  // seed, offset
    for (int word = threadIdx.x; word < 2 * kRounds + 2; word += blockDim.x) {
      const uint32_t steps = word / 2 * (word % 2 == 0 ? kPhiloxKeyStep0 : kPhiloxKeyStep1);
      store_shared(shared + 4 * word, word < 2 * kRounds ? words[word % 2] + steps : words[2 + word % 2]);
    }
  }

  __device__ uint64_t offset() const {
    const uint2 words = load_shared<uint2>(shared + 8 * kRounds);
    return uint64_t{words.y} << 32 | words.x;
  }

  // The mask of kBlocks Philox blocks (four elements each) with counters block, block + 1, ..., as quads 0, 1, ...
  // kNear: the counters have the same upper 32 bits.
  template <int kBlocks, bool kNear>
  __device__ uint32_t quads(uint32_t keys_s, uint64_t block) const {
    uint4 c[kBlocks];
#pragma unroll
    for (int q = 0; q < kBlocks; ++q) {
      const uint64_t high = (kNear ? block : block + q) >> 32 & (~0u >> 2);
      c[q] = make_uint4(static_cast<uint32_t>(block) + q, static_cast<uint32_t>(high), 0, 0);
    }
#pragma unroll
    for (int round = 0; round < kRounds; round += 2) {
      const uint4 keys = load_shared<uint4>(keys_s + 8 * round);
#pragma unroll
      for (int q = 0; q < kBlocks; ++q) c[q] = philox_round(c[q], keys.x, keys.y);
#pragma unroll
      for (int q = 0; q < kBlocks; ++q) c[q] = philox_round(c[q], keys.z, keys.w);
    }
    uint32_t kept = 0;
#pragma unroll
    for (int q = 0; q < kBlocks; ++q) {
      if (c[q].x >= keep_from) kept |= 1u << mask_bit(4 * q);
      if (c[q].y >= keep_from) kept |= 1u << mask_bit(4 * q + 1);
      if (c[q].z >= keep_from) kept |= 1u << mask_bit(4 * q + 2);
      if (c[q].w >= keep_from) kept |= 1u << mask_bit(4 * q + 3);
    }
    return kept;
  }

  // The mask of `vectors` vectors of kElements elements, the first elements of which are `first`, first + step, ... As
  // in PyTorch's memory-efficient attention, element n uses word n % 4 of the Philox block with counter n / 4. Elements
  // with negative n (before the first row) get an arbitrary mask, which is not used.
  template <int kElements>
  __device__ uint32_t mask(uint64_t first, int step, int vectors) const {
    constexpr int kQuads = (kElements + 3) / 4;  // per vector; one more block if a vector does not start at a block
    const uint64_t block = first >> 2;
    const uint32_t skip = first & 3;
    const uint32_t low = static_cast<uint32_t>(block);
    const uint32_t block_step = step / 4;
    const uint32_t keys_s = keep(shared);
    uint32_t kept = 0;
    if (skip == 0 && low <= low + (vectors - 1) * block_step + kQuads) {  // all counters have the same upper 32 bits
#pragma unroll 1
      for (int v = 0; v < vectors; ++v) {
        kept |= quads<kQuads, true>(keys_s, block - low + (low + v * block_step)) << v * kQuads;
      }
      return kept;
    }
#pragma unroll 1
    for (int v = 0; v < vectors; ++v) {
      const uint32_t drawn = quads<kQuads + 1, false>(keys_s, block + v * block_step);
      kept |= (__funnelshift_r(drawn, drawn >> 1, 8 * skip) & kQuad * ((1u << kQuads) - 1)) << v * kQuads;
    }
    return kept;
  }
};

// The mask of kElements elements from their bools keep[e], read as aligned words from global or shared memory. Bytes
// outside the row may hold any value.
template <int kElements>
__device__ uint32_t given_mask(const void* keep) {
  uint32_t mask = 0;
#pragma unroll
  for (int q = 0; q < kElements / 4; ++q) mask |= (static_cast<const uint32_t*>(keep)[q] & kQuad) << q;
  return mask;
}

// Copies the bools of elements [skip, count) of a vector to shared memory. With `vector`, one cp.async copies all
// kElements bools, which must be inside the tensor; otherwise they are copied one by one.
template <int kElements>
__device__ void fill_mask(uint32_t shared, const uint8_t* keep, int skip, int count, bool vector) {
  if (vector) {
    copy_async<kElements>(shared, keep);
    return;
  }
#pragma unroll 1
  for (int e = skip; e < count; ++e) store_shared(shared + e, keep[e]);
}

// The mask of elements [skip, count), whose bools are read one by one.
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

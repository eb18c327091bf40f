// Dropout masks for the accumulators of a warpgroup (wgmma_fragments.cuh): bits for 16 keys and 64 queries, drawn by
// the warp that holds the probabilities.
#pragma once

#include "philox.cuh"

namespace flashbwd {

// Seed and offset of a call.
struct PhiloxState {
  uint64_t seed, offset;
};

// A bitwise function of three words given by its truth table: one instruction. nvcc 13.0 makes up to three of
// `bytes_above`.
template <int kTable>
__device__ __forceinline__ uint32_t logic3(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(result) : "r"(a), "r"(b), "r"(c), "n"(kTable));
  return result;
}
constexpr int kFirstWord = 0xf0, kSecondWord = 0xcc, kThirdWord = 0xaa;  // columns of the truth table

// Bit 7 of each byte says whether the byte of `bytes` is above the threshold, a byte. The other bits are undefined.
__device__ __forceinline__ uint32_t bytes_above(uint32_t bytes, uint32_t threshold) {
  const uint32_t high = threshold & 0x80 ? ~0u : 0u;
  const uint32_t below = (threshold | 0x80) * 0x01010101u - (bytes & 0x7f7f7f7fu);  // only bit 7 of each byte counts
  return logic3<(kFirstWord & ~kSecondWord | ~kThirdWord & (kFirstWord | ~kSecondWord)) & 0xff>(bytes, below, high);
}

// Appends one bit per byte of two words of a draw to the bits of earlier draws in each byte, from the highest bit down.
__device__ __forceinline__ uint32_t append(uint32_t taken, uint32_t first, uint32_t second, uint32_t threshold) {
  constexpr int kSelect = (kFirstWord & kThirdWord | kSecondWord & ~kThirdWord) & 0xff;
  const uint32_t two = logic3<kSelect>(bytes_above(first, threshold), bytes_above(second, threshold) >> 1, 0x80808080u);
  return logic3<kSelect>(two, taken >> 2, 0xc0c0c0c0u);
}

// FlashAttention-2: a draw has 16 bytes, word key / 8 % 4 and in it byte 2 (query / 8 % 2) + key % 2, for lane
// 4 (query % 8) + key % 8 / 2 of the warp that draws a block of 16 queries and 32 keys. A warp here has half of these
// keys. The mask of its keys and of 64 queries is one word: value v of a lane's accumulator (wgmma_fragments.cuh) is
// bit dropped_bit(v).
constexpr __host__ __device__ int dropped_bit(int v) { return v % 2 * 16 + v / 4 % 2 * 8 + v / 8 * 2 + 1 - v / 2 % 2; }
constexpr __host__ __device__ int dropped_value(int bit) {
  return bit / 16 + (1 - bit % 2) * 2 + bit / 8 % 2 * 4 + bit / 2 % 4 * 8;
}

// Takes this lane's bits from the lanes that have drawn: first query of each 8, and second query 4 lanes further.
__device__ __forceinline__ int32_t drawing_lane(int32_t lane) { return lane % 4 * 8 + lane / 8; }
__device__ __forceinline__ uint32_t own_keys(uint32_t of_first, uint32_t of_second, int32_t lane) {
  return __byte_perm(of_first, of_second, lane / 4 % 2 == 0 ? 0x6420 : 0x7531);
}

// Called by one warp; half of each draw is unused. `first_key`: of the warp. kUnrolls takes more registers.
template <bool kUnrolls>
__device__ __forceinline__ uint32_t draw_dropped_alone(uint64_t seed, uint64_t offset, uint64_t head,
                                                       int32_t first_query, int32_t first_key, uint32_t threshold,
                                                       int32_t lane) {
  const bool second_half = first_key / 16 % 2 != 0;
  uint32_t taken = 0;
#pragma unroll(kUnrolls ? 4 : 1)
  for (int32_t draw = 0; draw < 4; ++draw) {
    const uint4 words = philox4x32<7>(seed, offset + head * 32 + lane, first_query / 16 + draw, first_key / 32);
    taken = append(taken, second_half ? words.z : words.x, second_half ? words.w : words.y, threshold);
  }
  const int32_t source = drawing_lane(lane);
  return own_keys(__shfl_sync(0xffffffffu, taken, source), __shfl_sync(0xffffffffu, taken, source + 4), lane);
}

// Called by two warps; each has half of the keys, and one word per 64 queries. Each warp draws the bits of half of the
// queries for both and exchanges them through shared memory: `buffers` holds 256 bytes per warp, kBufferBytes apart.
// `sync` synchronizes the two warps; after it, a warp may reuse its own buffer until it draws again.
template <int kBufferBytes, int kWords, typename Sync>
__device__ __forceinline__ void draw_dropped(uint32_t (&dropped)[kWords], const PhiloxState& state, uint64_t head,
                                             int32_t first_query, int32_t first_key, uint32_t threshold, int32_t half,
                                             int32_t lane, uint8_t* buffers, Sync sync) {
  constexpr int kDraws = 2 * kWords;
  const uint64_t counter = state.offset + head * 32 + lane;
  uint32_t taken[2] = {};  // of the keys of each warp
#pragma unroll
  for (int draw = 0; draw < kDraws; ++draw) {
    const uint4 words = philox4x32<7>(state.seed, counter, first_query / 16 + half * kDraws + draw, first_key / 32);
    taken[0] = append(taken[0], words.x, words.y, threshold);
    taken[1] = append(taken[1], words.z, words.w, threshold);
  }
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    reinterpret_cast<uint32_t*>(buffers + k * kBufferBytes)[2 * lane + half] = taken[k];
  }
  sync();
  const uint2* const own = reinterpret_cast<const uint2*>(buffers + half * kBufferBytes);
  const uint2 of_first = own[drawing_lane(lane)], of_second = own[drawing_lane(lane) + 4];
  const uint32_t first_half = own_keys(of_first.x, of_second.x, lane);
  const uint32_t second_half = own_keys(of_first.y, of_second.y, lane);
  if constexpr (kWords == 1) {
    dropped[0] = first_half >> 4 & 0x0f0f0f0f | second_half & 0xf0f0f0f0;
  } else {
    static_assert(kWords == 2);
    dropped[0] = first_half;
    dropped[1] = second_half;
  }
}

// PyTorch's memory-efficient forward: where the element numbers of a (batch, head) begin (philox.cuh), for keys and
// queries that follow one another.
struct WordNumbering {
  uint64_t first;
  uint32_t keys;

  // `keys` of the sequence; the others as the forward had them. 32 bits if no element number within a plane needs more.
  __device__ __forceinline__ WordNumbering(uint64_t offset, uint64_t plane, int32_t seqlen_q, int32_t seqlen_k,
                                           bool wraps, int32_t keys)
      : keys(keys) {
    const uint64_t before = plane * (static_cast<uint64_t>(seqlen_q) * seqlen_k);
    first = offset + (wraps ? static_cast<uint32_t>(before) : before);
  }
};

// Shifts a bit into `kept`: set if a word is not below the threshold.
__device__ __forceinline__ void append_kept(uint32_t& kept, uint32_t word, uint32_t threshold) {
  asm("{\n.reg .u32 difference, inverse;\nnot.b32 inverse, %0;\nsub.cc.u32 difference, %1, %2;\n"
      "subc.u32 %0, %0, inverse;\n}"
      : "+r"(kept)
      : "r"(word), "r"(threshold));
}

// Of the draw of `number` and the next, with the first word lowest. Numbers wrap at 2^64, draws earlier.
template <int kDraws>
__device__ __forceinline__ void draw_kept_words(uint32_t& kept, uint64_t seed, uint64_t number, uint32_t threshold) {
#pragma unroll
  for (int i = kDraws - 1; i >= 0; --i) {
    const uint4 words = efficient_words(seed, (number + 4 * i) >> 2);
    append_kept(kept, words.w, threshold);
    append_kept(kept, words.z, threshold);
    append_kept(kept, words.y, threshold);
    append_kept(kept, words.x, threshold);
  }
}

// Transposes bits in each byte among lanes 4 n + lane % 4, n from 0 to 7: bit n of byte r becomes bit r of byte n of
// lane 4 n + lane % 4. Exchanges halves of the rows and columns, then quarters, then eighths.
__device__ __forceinline__ uint32_t transpose_bits(uint32_t rows, int32_t lane) {
#pragma unroll
  for (int distance = 4; distance > 0; distance /= 2) {
    const uint32_t lower = distance == 4 ? 0x0f0f0f0fu : distance == 2 ? 0x33333333u : 0x55555555u;
    const bool is_upper = lane & 4 * distance;
    const uint32_t other = __shfl_xor_sync(0xffffffffu, rows, 4 * distance), own = is_upper ? ~lower : lower;
    rows = rows & own | __funnelshift_l(other, other, is_upper ? 32 - distance : distance) & ~own;
  }
  return rows;
}

// The word of draw_dropped_alone for PyTorch's memory-efficient forward. A draw has four keys of a query, which lie in
// four lanes. Each lane draws eight keys of four queries for the eight lanes that have these keys and queries. kUnrolls
// takes more registers.
template <bool kUnrolls>
__device__ __forceinline__ uint32_t draw_dropped_words(uint64_t seed, const WordNumbering& numbering,
                                                       int32_t first_query, int32_t first_key, uint32_t threshold,
                                                       int32_t lane) {
  const int32_t query = first_query + lane / 8 * 16 + lane % 4 * 2, key = first_key + 8 - lane / 4 % 2 * 8;
  const uint64_t first = numbering.first + static_cast<uint64_t>(query) * numbering.keys + key;
  const bool aligned = (numbering.first | numbering.keys) % 4 == 0;
  uint32_t kept = 0;
  if (aligned) {
#pragma unroll(kUnrolls ? 4 : 1)
    for (int row = 3; row >= 0; --row) {
      const uint64_t number = first + static_cast<uint64_t>(row % 2 * 8 + row / 2) * numbering.keys;
      draw_kept_words<2>(kept, seed, number, threshold);
    }
  } else {
#pragma unroll 1
    for (int row = 3; row >= 0; --row) {
      const uint64_t number = first + static_cast<uint64_t>(row % 2 * 8 + row / 2) * numbering.keys;
      uint32_t of_three = 0;
      draw_kept_words<3>(of_three, seed, number, threshold);
      kept = kept << 8 | of_three >> number % 4 & 0xff;
    }
  }
  return transpose_bits(~kept, lane);
}

// Sets the sign of what dropout drops (0 or positive numbers). Bits are tested seven at a time.
template <int kWords>
__device__ __forceinline__ void mark_dropped(float (&p)[32 * kWords], const uint32_t (&dropped)[kWords]) {
#pragma unroll
  for (int word = 0; word < kWords; ++word) {
#pragma unroll
    for (int bit = 0; bit < 32; ++bit) {
      float& value = p[word * 32 + dropped_value(bit)];
      value = dropped[word] >> bit & 1 ? -value : value;
    }
  }
}

}  // namespace flashbwd

// Redraws the dropout mask for a thread's scores. Lanes share the results of a Philox call that covers several of them.
#pragma once

#include <cstdint>

#include "../../common/philox_fragments.cuh"
#include "scores.cuh"

namespace flashbwd::sm80 {

// Sets x to 0, with its sign, if keeps is 0. A predicated product, because selections have half of its throughput.
__device__ __forceinline__ void multiply_by_zero_unless(uint32_t keeps, float& x) {
  asm("{\n.reg .pred drops;\nsetp.eq.u32 drops, %1, 0;\n@drops mul.f32 %0, %0, 0f00000000;\n}" : "+f"(x) : "r"(keeps));
}

// One bit per element. A thread has two queries per 8-query tile, with a word each, and one key per octet (8 keys). The
// bit within the word is given by the query tile and the octet: bytes and the bits of a byte are in the order in which
// draw_flash() appends them.
template <typename Traits>
struct DropoutMask {
  using Position = ScorePosition<Traits>;
  static constexpr int kOctets = 2 * Traits::kKeyTiles;
  static_assert(Traits::kScoreTiles <= 8 && kOctets <= 4, "a word has one bit per element");

  uint32_t words[2] = {};

  static constexpr __device__ __forceinline__ int tile_bit(int nt) {
    return nt % 2 * 8 + nt / 2 * 2 + 8 - Traits::kScoreTiles;
  }
  static constexpr __device__ __forceinline__ int octet_bit(int octet) { return octet / 2 * 16 + 1 - octet % 2; }
  static constexpr __device__ __forceinline__ int bit(int nt, int octet) { return tile_bit(nt) + octet_bit(octet); }
  static constexpr __device__ __forceinline__ uint32_t tile_bits() {
    uint32_t bits = 0;
    for (int nt = 0; nt < Traits::kScoreTiles; ++nt) bits |= 1u << tile_bit(nt);
    return bits;
  }
  // Not 0 if the element is kept.
  __device__ __forceinline__ uint32_t keeps(int mt, int nt, int e) const {
    return words[e % 2] & 1u << bit(nt, mt * 2 + e / 2);
  }

  __device__ __forceinline__ void draw(const KernelParams& params, const WorkTile& work, int32_t head,
                                       int32_t query_block) {
    const AttentionBackwardParams& p = params.attention;
    const uint64_t seed = p.philox.current_seed(), offset = p.philox.current_offset();
    const uint64_t plane = static_cast<uint64_t>(work.batch) * p.heads + head;
    const int32_t query = Position::first_query(query_block), key = Position::first_key(work);
    if (p.dropout_layout == DropoutLayout::kFlash) {
      draw_flash(seed, offset + plane * 32, query, key, params.dropout_threshold);
      return;
    }
    const bool wraps = p.dropout_layout == DropoutLayout::kEfficient32;
    const uint64_t plane_size = static_cast<uint64_t>(p.seqlen_q) * p.seqlen_k;
    const Numbering numbering = {seed,
                                 offset + (wraps ? static_cast<uint32_t>(plane * plane_size) : plane * plane_size),
                                 static_cast<uint32_t>(work.visibility.seqlen_k), params.dropout_threshold, wraps};
    if (numbering.first % 4 == 0 && numbering.keys % 4 == 0) {
      draw_efficient(numbering, query, key);
    } else {
      draw_each(numbering, query, key);
    }
  }

 private:
  // The numbering of PyTorch's memory-efficient forward: number(i, j) is the number of element (i, j) of a plane.
  struct Numbering {
    uint64_t seed;
    uint64_t first;
    uint32_t keys;
    uint32_t threshold;  // words from this one on are kept
    bool wraps;
    __device__ __forceinline__ uint64_t number(int32_t i, int32_t j) const {
      const uint64_t within = static_cast<uint64_t>(i) * keys + j;
      return first + (wraps ? static_cast<uint32_t>(within) : within);
    }
  };

  // A call covers queries i and i + 8 and keys of both parities. Two lanes with neighbouring keys (lanes l and l ^ 4)
  // share the calls: the one with the even key draws the even query, the other the odd query, and they exchange the
  // bits that the other one needs.
  __device__ __forceinline__ void draw_flash(uint64_t seed, uint64_t offset, int32_t query, int32_t key,
                                             uint32_t threshold) {
    const bool odd = key % 2 != 0;
    uint32_t dropped[2] = {};  // of 16 keys each; byte 2 (nt % 2) + key % 2
#pragma unroll 2
    for (int pair = 0; pair < Traits::kScoreTiles / 2; ++pair) {
      const uint4 bytes = flash_bytes(seed, offset, query + pair * 16 + odd, key);
      const bool upper = kOctets == 2 && key / 16 % 2 != 0;
      dropped[0] = append(dropped[0], upper ? bytes.z : bytes.x, upper ? bytes.w : bytes.y, threshold);
      if (kOctets == 4) dropped[1] = append(dropped[1], bytes.z, bytes.w, threshold);
    }
    const uint32_t even_keys = ~__byte_perm(dropped[0], dropped[1], 0x6420);
    const uint32_t odd_keys = ~__byte_perm(dropped[0], dropped[1], 0x7531);
    const uint32_t own = odd ? odd_keys : even_keys;
    const uint32_t received = __shfl_xor_sync(0xffffffffu, odd ? even_keys : odd_keys, 4);
    words[0] = odd ? received : own;
    words[1] = odd ? own : received;
  }

  // A call covers four consecutive keys, which belong to four lanes. Each of them draws for all four: lane a draws
  // octet a, or with two octets, octet a % 2 of query a / 2.
  __device__ __forceinline__ void draw_efficient(const Numbering& n, int32_t query, int32_t key) {
    constexpr int kCalls = kOctets == 4 ? 2 : 1;  // per lane and tile
    const int32_t lane = Traits::lane(), a = lane / 4 % 4;
    const int32_t first = key - lane / 4 % 4 + (kOctets == 4 ? a : a % 2) * 8;
    uint32_t drawn[kCalls] = {};  // tile_bit(nt) + i % 2 + i / 2 * 16: key i of the four
#pragma unroll 1
    for (int nt = 0; nt < Traits::kScoreTiles; ++nt) {
#pragma unroll
      for (int call = 0; call < kCalls; ++call) {
        const int32_t c = kOctets == 4 ? call : a / 2;
        const uint4 w = efficient_words(n.seed, n.number(query + nt * 8 + c, first) >> 2);
        const uint32_t kept = static_cast<uint32_t>(w.x >= n.threshold) | (w.y >= n.threshold) << 1 |
                              (w.z >= n.threshold) << 16 | (w.w >= n.threshold) << 17;
        drawn[call] |= kept << tile_bit(nt);
      }
    }
    words[0] = words[1] = 0;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int octet = 0; octet < kOctets; ++octet) {
        const int32_t drawer = kOctets == 4 ? octet : c * 2 + octet;
        const uint32_t of_four =
            __shfl_sync(0xffffffffu, drawn[kOctets == 4 ? c : 0], lane / 16 * 16 + drawer * 4 + lane % 4);
        words[c] |= (of_four >> (a % 2 + a / 2 * 16) & tile_bits()) << octet_bit(octet);
      }
    }
  }

  __device__ __forceinline__ void draw_each(const Numbering& n, int32_t query, int32_t key) {
    words[0] = words[1] = 0;
#pragma unroll 1
    for (int32_t nt = 0; nt < Traits::kScoreTiles; ++nt) {
#pragma unroll
      for (int octet = 0; octet < kOctets; ++octet) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const uint64_t number = n.number(query + nt * 8 + c, key + octet * 8);
          const uint32_t word = word_of(efficient_words(n.seed, number >> 2), number & 3);
          words[c] |= static_cast<uint32_t>(word >= n.threshold) << bit(nt, octet);
        }
      }
    }
  }
};

}  // namespace flashbwd::sm80

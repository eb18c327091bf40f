// Redraws the dropout mask for a thread's scores. Lanes share the results of a Philox call that covers several of them.
#pragma once

#include <cstdint>

#include "../../common/philox.cuh"
#include "scores.cuh"

namespace flashbwd::sm80 {

// One bit per element. A thread has two queries per 8-query tile, with a word each, and one key per octet (8 keys). The
// bit within the word is given by the query tile and the octet.
template <typename Traits>
struct DropoutMask {
  using Position = ScorePosition<Traits>;
  static constexpr int kOctets = 2 * Traits::kKeyTiles;
  static_assert(Traits::kScoreTiles <= 8 && kOctets <= 4, "a word has one bit per element");
  static constexpr uint32_t kEveryTile = 0x11111111u;  // the bits of octet 0 in every tile

  uint32_t words[2] = {};

  static constexpr __device__ __forceinline__ int bit(int nt, int octet) { return nt % 2 * 16 + nt / 2 * 4 + octet; }
  __device__ __forceinline__ bool keeps(int mt, int nt, int e) const {
    return (words[e % 2] & 1u << bit(nt, mt * 2 + e / 2)) != 0;
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
  // bits that the other one needs. Bytes up to `threshold` are kept.
  __device__ __forceinline__ void draw_flash(uint64_t seed, uint64_t offset, int32_t query, int32_t key,
                                             uint32_t threshold) {
    const bool odd = key % 2 != 0;
    // bit 8 survives the subtraction iff byte <= threshold
    const uint32_t no_borrow = 0x01000100u + threshold * 0x00010001u;
    uint32_t even_keys = 0, odd_keys = 0;
#pragma unroll 2
    for (int pair = 0; pair < Traits::kScoreTiles / 2; ++pair) {
      const uint4 bytes = flash_bytes(seed, offset, query + pair * 16 + odd, key);
      const bool upper = kOctets == 2 && key / 16 % 2 != 0;
      const uint32_t of_octets[4] = {upper ? bytes.z : bytes.x, upper ? bytes.w : bytes.y, bytes.z, bytes.w};
#pragma unroll
      for (int octet = 0; octet < kOctets; ++octet) {
        // Bit 0 of a byte's index is the parity of the key, bit 1 selects the 8 of the 16 queries.
        const uint32_t even = no_borrow - (of_octets[octet] & 0x00ff00ffu);
        const uint32_t uneven = no_borrow - (of_octets[octet] >> 8 & 0x00ff00ffu);
        even_keys |= (even >> 8 & 0x00010001u) << (pair * 4 + octet);
        odd_keys |= (uneven >> 8 & 0x00010001u) << (pair * 4 + octet);
      }
    }
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
    uint32_t drawn[kCalls] = {};  // bit(nt, i): key i of the four
#pragma unroll 1
    for (int nt = 0; nt < Traits::kScoreTiles; ++nt) {
#pragma unroll
      for (int call = 0; call < kCalls; ++call) {
        const int32_t c = kOctets == 4 ? call : a / 2;
        const uint4 w = efficient_words(n.seed, n.number(query + nt * 8 + c, first) >> 2);
        const uint32_t kept = static_cast<uint32_t>(w.x >= n.threshold) | (w.y >= n.threshold) << 1 |
                              (w.z >= n.threshold) << 2 | (w.w >= n.threshold) << 3;
        drawn[call] |= kept << bit(nt, 0);
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
        words[c] |= (of_four >> a & kEveryTile) << octet;
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

// The element-wise code of a block mask: probabilities and ds of the visible pairs, with a softcap and ALiBi.
#pragma once

#include <cstdint>

#include "features.cuh"
#include "scores.cuh"

namespace flashbwd::sm80 {

// The bits of a thread's elements in a tile of bits, which docs/kernels/attention_sm90_features.md describes: for each
// 16 keys and each lane, the bits of the lane's queries with its first key, then those with its second key.
template <typename Traits>
struct TileBits {
  static constexpr int kBits = 2 * Traits::kScoreTiles;  // of a thread and a key
  static_assert(kBits == 16 || kBits == 8 || kBits == 4, "the bits of a key are a half-word, a byte or half a byte");

  static constexpr int kAllBits = Traits::kKeyTiles * 2 * kBits;  // of a thread
  uint32_t words[(kAllBits + 31) / 32];  // the keys one after the other; bits that are left over are 1

  __device__ __forceinline__ void load(const int32_t* bits, int32_t tile) {
    for (uint32_t& word : words) word = tile < 0 ? ~0u : kAllBits < 32 ? ~0u << kAllBits % 32 : 0;
    if (tile < 0) return;  // every pair is visible
    const int64_t keys = int64_t{tile} * (Traits::kBlockN / 16) + Traits::warp_n() * Traits::kKeyTiles;
    const int64_t first = (keys * 32 + Traits::lane()) * (Traits::kBlockM / 2) + Traits::warp_s() * kBits;
#pragma unroll
    for (int octet = 0; octet < 2 * Traits::kKeyTiles; ++octet) {
      const int64_t bit = first + octet / 2 * 32 * (Traits::kBlockM / 2) + octet % 2 * (Traits::kBlockM / 4);
      words[octet * kBits / 32] |= of_key(bits, bit) << octet * kBits % 32;
    }
  }
  // Whether all pairs of the warp are visible. Called by all lanes.
  __device__ __forceinline__ bool all() const {
    bool every = true;
    for (const uint32_t word : words) every = every && word == ~0u;
    return __all_sync(0xffffffffu, every);
  }
  __device__ __forceinline__ bool visible(int mt, int nt, int e) const {
    const int bit = (mt * 2 + e / 2) * kBits + nt * 2 + e % 2;
    return (words[bit / 32] >> bit % 32 & 1) != 0;
  }

 private:
  // kBits bits from bit `first` on.
  static __device__ __forceinline__ uint32_t of_key(const int32_t* bits, int64_t first) {
    const auto* const bytes = reinterpret_cast<const uint8_t*>(bits) + first / 8;
    if constexpr (kBits == 16) return __ldg(reinterpret_cast<const uint16_t*>(bytes));
    return __ldg(bytes) >> first % 8 & ((1 << kBits) - 1);
  }
};

// What the scores with a block mask have in common.
template <typename Traits>
struct ListedScores {
  using Position = ScorePosition<Traits>;
  using Accumulator = typename Position::Accumulator;
  using Iteration = typename Traits::QueryIteration;

  const KernelParams& params;
  const typename Traits::WorkTile& work;
  TileBits<Traits> bits;  // of the current tile

  __device__ __forceinline__ ListedScores(const KernelParams& params, const typename Traits::WorkTile& work)
      : params(params), work(work) {}

  // Starts to load the bits of a tile, before its products.
  __device__ __forceinline__ void load_bits(int32_t tile) { bits.load(params.attention.block_mask.bits, tile); }

  // Calls f(mt, nt, e, score, gradient, lse, delta) for every element.
  template <typename F>
  static __device__ __forceinline__ void for_each(const float* lse, const float* delta, Accumulator& s, Accumulator& dp,
                                                  const F& f) {
#pragma unroll
    for (int nt = 0; nt < Traits::kScoreTiles; ++nt) {
      const float2 row_lse = *reinterpret_cast<const float2*>(lse + Position::first_column() + nt * 8);
      const float2 row_delta = *reinterpret_cast<const float2*>(delta + Position::first_column() + nt * 8);
#pragma unroll
      for (int mt = 0; mt < Traits::kKeyTiles; ++mt) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          f(mt, nt, e, s[mt][nt][e], dp[mt][nt][e], e % 2 == 0 ? row_lse.x : row_lse.y,
            e % 2 == 0 ? row_delta.x : row_delta.y);
        }
      }
    }
  }
};

template <typename Traits>
struct BlockMaskScores : ListedScores<Traits> {
  using Base = ListedScores<Traits>;
  using typename Base::Accumulator, typename Base::Iteration, typename Base::Position;
  using T = typename Traits::T;
  using Base::Base, Base::bits, Base::for_each, Base::params, Base::work;

  // On entry s and dp are the products; on return s has the probabilities for dv, and dp their gradients for dk and dq.
  // `lse`: (kBlockM,) times log2(e), `delta`: (kBlockM,), of the tile's queries.
  __device__ __forceinline__ void apply(const Iteration& iteration, const float* lse, const float* delta,
                                        Accumulator& s, Accumulator& dp) const {
    const AttentionBackwardParams& p = params.attention;
    if (p.softcap > 0.f || p.alibi_slopes != nullptr) {
      apply_built_in(iteration, lse, delta, s, dp);
      return;
    }
    const float scale = p.softmax_scale * kLog2E;
    const auto probability = [&](float& x, float row_lse) { x = exponential<T>(fmaf(x, scale, -row_lse)); };
    if (bits.all()) {
      for_each(lse, delta, s, dp, [&](int, int, int, float& x, float& y, float row_lse, float row_delta) {
        probability(x, row_lse);
        y = x * (y - row_delta);
      });
    } else {
      for_each(lse, delta, s, dp, [&](int mt, int nt, int e, float& x, float& y, float row_lse, float row_delta) {
        const bool visible = bits.visible(mt, nt, e);
        probability(x, row_lse);
        y = visible ? x * (y - row_delta) : 0.f;
        x = visible ? x : 0.f;
      });
    }
  }

 private:
  // Without a softcap, its derivative is 1; without ALiBi, the slope is 0.
  __device__ __forceinline__ void apply_built_in(const Iteration& iteration, const float* lse, const float* delta,
                                                 Accumulator& s, Accumulator& dp) const {
    const AttentionBackwardParams& p = params.attention;
    float slope = 0.f;
    if (p.alibi_slopes != nullptr) slope = kLog2E * p.alibi_slopes[work.batch * p.alibi_batch_stride + iteration.head];
    const float distance = static_cast<float>(Position::first_query(iteration.query_block(work)) + p.seqlen_k -
                                              p.seqlen_q - Position::first_key(work));
    const bool capped = p.softcap > 0.f;
    const float to_cap = capped ? p.softmax_scale / p.softcap : 0.f, from_cap = p.softcap * kLog2E;
    const float scale = p.softmax_scale * kLog2E;
    for_each(lse, delta, s, dp, [&](int mt, int nt, int e, float& x, float& y, float row_lse, float row_delta) {
      const bool visible = bits.visible(mt, nt, e);
      float score = x * scale, derivative = 1.f;
      if (capped) {
        const float t = hyperbolic_tangent<T>(x * to_cap);
        score = from_cap * t;
        derivative = 1.f - t * t;
      }
      score -= slope * fabsf(distance + static_cast<float>(Position::query(nt, e) - Position::key(mt, e)));
      x = visible ? exponential<T>(score - row_lse) : 0.f;
      y = visible ? x * derivative * (y - row_delta) : 0.f;
    });
  }
};

}  // namespace flashbwd::sm80

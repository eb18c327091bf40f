// A score_mod that flashbwd/flex/generated.py traced and wrote as CUDA. NVRTC compiles the kernel with it, always with
// a block mask, whose bits also hide what is beyond the sequences.
//
// Mod::score_mod(p, score, b, h, q, k) returns the modified score, and Mod::score_gradient(p, score, b, h, q, k, ds,
// adds, sums) the gradient of `score` for a gradient `ds` of the modified score. If `adds`, the latter also adds to the
// gradients of captured tensors; Mod::Sums has a GradientSum (csrc/mods/gradient_sum.cuh) for each access.
#pragma once

#include "../generated_params.h"
#include "plain.cuh"

namespace flashbwd::sm90 {

// The scores of a thread in one iteration. Value v belongs to key first_key + 8 (v % 4 / 2) and to query first_query +
// 8 (v / 4) + v % 2. Mod is called for hidden pairs too, with indices inside the sequences; its results are dropped.
template <typename Traits>
struct GeneratedFunction {
  using Mod = typename Traits::Mod;
  using Bits = VisibleBits<Traits::kBlockM / 64>;

  const GeneratedParams& p;
  int32_t batch, head, first_query, first_key;
  Bits visible;

  template <typename Consumer>
  __device__ __forceinline__ GeneratedFunction(const Consumer& c, const Bits& visible)
      : p(static_cast<const GeneratedParams&>(c.params)),
        batch(c.work.batch),
        head(c.it.head()),
        first_query(c.it.query_block() * Traits::kBlockM + c.pair),
        first_key(c.work.first_key + c.first_own_key()),
        visible(visible) {}

  __device__ __forceinline__ int32_t query(int v) const {
    return at_most(first_query + v / 4 * 8 + v % 2, p.attention.seqlen_q - 1);
  }
  __device__ __forceinline__ int32_t key(int v) const {
    return at_most(first_key + v % 4 / 2 * 8, p.attention.seqlen_k - 1);
  }

  // `product`: of q and k. lse_log2: of the query, in units of log2.
  __device__ __forceinline__ float probability(int v, float product, float lse_log2) const {
    const float score = Mod::score_mod(p, product * p.attention.softmax_scale, batch, head, query(v), key(v));
    return visible[v] ? exp2_approximate(score * kLog2E - lse_log2) : 0.f;
  }

  // The gradient of softmax_scale * product, for a gradient `ds` of the modified score. If that is 0, as for a hidden
  // pair, the result is 0 even if the derivative is infinite.
  __device__ __forceinline__ float gradient(int v, float product, float ds, typename Mod::Sums& sums) const {
    const bool adds = Mod::kCapturedGradients && ds != 0.f;
    const float scaled =
        Mod::score_gradient(p, product * p.attention.softmax_scale, batch, head, query(v), key(v), ds, adds, sums);
    return ds == 0.f ? 0.f : scaled;
  }

  // Makes the compiler compute what depends on the indices again from here on, instead of holding it in registers.
  __device__ __forceinline__ void forget() { asm volatile("" : "+r"(first_query), "+r"(first_key)::"memory"); }
};

// S becomes P times the derivative, as in CappedScores. With gradients of captured tensors S stays, because these need
// dS, which is known only after dP.
template <typename Traits>
struct GeneratedScores : PlainScores<Traits> {
  using Base = PlainScores<Traits>;
  using typename Base::Operand, typename Base::Scores, typename Base::T;
  static constexpr bool kDeltaFirst = Base::kDeltaFirst;
  static constexpr bool kAdds = Traits::Mod::kCapturedGradients;
  // Values whose P is computed while the tensor cores compute dP: with 128 queries, registers do not hold all.
  static constexpr int kUnderDp = Traits::kEarlyDv ? Base::kValues : kAdds ? 0 : Base::kValues / 2;

  GeneratedFunction<Traits> function;

  template <typename Consumer>
  __device__ __forceinline__ explicit GeneratedScores(const Consumer& c) : Base(c), function(c, c.tile_mask.bits(c)) {}

  template <typename Consumer, typename Lse>
  __device__ __forceinline__ void probabilities(const Consumer&, Scores& s, Operand& p16, const Lse& lse) {
    weigh<0, kUnderDp>(s, p16, lse);
  }

  template <typename Consumer>
  __device__ __forceinline__ void pack_probabilities(const Consumer&, Operand&, const Scores&) const {}

  template <typename Consumer, typename Lse, typename Delta>
  __device__ __forceinline__ void gradients(const Consumer& c, Scores& s, Operand& p16, Scores& dp, const Lse& lse,
                                            const Delta& delta) {
    if constexpr (kAdds) {
      add_gradients(s, p16, dp, lse, delta);
    } else if constexpr (kDeltaFirst) {
      Base::gradients(c, s, p16, dp, lse, delta);
    } else {  // the first half of S is free before the second half is computed
      const auto subtract = [&](int v, float row) { dp[0][v] = s[0][v] * (dp[0][v] - row); };
      for_each_query<0, kUnderDp>(delta, subtract);
      weigh<kUnderDp, Base::kValues>(s, p16, lse);
      for_each_query<kUnderDp, Base::kValues>(delta, subtract);
    }
  }

 private:
  // p16 becomes P in values kBegin to kEnd, and unless kAdds, S becomes P times the derivative.
  template <int kBegin, int kEnd, typename Lse>
  __device__ __forceinline__ void weigh(Scores& s, Operand& p16, const Lse& lse) {
    [[maybe_unused]] typename Traits::Mod::Sums unused;
#pragma unroll
    for (int v = kBegin; v < kEnd; v += 2) {
      const float2 rows = lse[v / 4];
      const float p[] = {function.probability(v, s[0][v], rows.x), function.probability(v + 1, s[0][v + 1], rows.y)};
      p16[0][v / 2] = pack2<T>(p[0], p[1]);
      if constexpr (!kAdds) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) s[0][v + odd] = function.gradient(v + odd, s[0][v + odd], p[odd], unused);
      }
    }
  }

  // dP becomes dS, and p16 P if it is not yet. P is computed again, because registers do not hold it beside S and dP.
  template <typename Lse, typename Delta>
  __device__ __forceinline__ void add_gradients(const Scores& s, Operand& p16, Scores& dp, const Lse& lse,
                                                const Delta& delta) {
    typename Traits::Mod::Sums sums;
#pragma unroll
    for (int v = 0; v < Base::kValues; v += 2) {
      function.forget();
      const float2 lse_pair = lse[v / 4], delta_pair = delta[v / 4];
      const float p[] = {function.probability(v, s[0][v], lse_pair.x),
                         function.probability(v + 1, s[0][v + 1], lse_pair.y)};
      if constexpr (!Traits::kEarlyDv) p16[0][v / 2] = pack2<T>(p[0], p[1]);
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        float& value = dp[0][v + odd];
        const float change = kDeltaFirst ? -value : value - (odd == 0 ? delta_pair.x : delta_pair.y);
        value = function.gradient(v + odd, s[0][v + odd], p[odd] * change, sums);
      }
    }
    sums.finish();
  }
};

}  // namespace flashbwd::sm90

// A score_mod beside a block mask, in the warpgroups of P and dS: softcap and ALiBi (../score_mod/scores.cuh), or a
// function that is compiled at run time (../score_mod/generated.cuh). `c` is the warpgroup, `visible` has a bit for
// each score of the thread (BitMask), and `exchange` points at what the warpgroup of P sends to that of dS: four values
// every kWarpgroupThreads.
//
// A generated function is evaluated in loops over kGroup values. Unrolled, it would exceed the instruction cache and
// spill. Registers cannot be indexed in such a loop, so arrays rotate.
#pragma once

#include "../score_mod/generated.cuh"
#include "../score_mod/scores.cuh"

namespace flashbwd::sm90::large_head_dim {

template <typename Traits>
constexpr int kGroup = Traits::kHeadDim > 192 || Traits::kSendsScores ? 4 : 8;

// Writes values kBegin to kEnd.
template <int kBegin, int kEnd, int kValues>
__device__ __forceinline__ void send(const float (&s)[kValues], float4* exchange) {
#pragma unroll
  for (int v = kBegin; v < kEnd; v += 4) {
    exchange[v / 4 * kWarpgroupThreads] = make_float4(s[v], s[v + 1], s[v + 2], s[v + 3]);
  }
}

// Drops the first kNew values of an array and appends others.
template <typename Value, int kNew, int kValues>
__device__ __forceinline__ void rotate(Value (&values)[kValues], const Value (&added)[kNew]) {
#pragma unroll
  for (int i = 0; i < kValues; ++i) values[i] = i + kNew < kValues ? values[i + kNew] : added[i + kNew - kValues];
}

// The function for a group of values from `first` on, which it numbers from 0. `visible`: their bits.
template <typename Traits, typename Consumer>
__device__ __forceinline__ GeneratedFunction<Traits> function_of_group(const Consumer& c, int first, uint32_t visible) {
  GeneratedFunction<Traits> function(c, {visible});
  function.first_query += 2 * first;
  return function;
}

// The warpgroup of P: p16 becomes P. It sends P times the derivative, or with Traits::kSendsScores the scores. lse_log2
// points at the number of the thread's first query.
template <typename Traits, typename Consumer, int kValues>
__device__ __forceinline__ void modified_probabilities(const Consumer& c, uint32_t visible, float (&s)[kValues],
                                                       uint32_t (&p16)[kValues / 2], const float* lse_log2,
                                                       float4* exchange) {
  using T = typename Traits::T;
  if constexpr (Traits::kGenerated) {
    send<0, kValues>(s, exchange);
    [[maybe_unused]] typename Traits::Mod::Sums unused;
#pragma unroll 1
    for (int first = 0; first < kValues; first += kGroup<Traits>) {
      const auto function = function_of_group<Traits>(c, first, visible >> first / 2);
      const QueryValues<0> lse(lse_log2 + 2 * first);
      uint32_t group16[kGroup<Traits> / 2];
#pragma unroll
      for (int v = 0; v < kGroup<Traits>; v += 4) {
        float4& slot = exchange[(first + v) / 4 * kWarpgroupThreads];
        float4 quad = slot;
        const float2 rows = lse[v / 4];
        const auto weigh = [&](int i, float& score, float row) {
          const float p = function.probability(i, score, row);
          if constexpr (!Traits::kSendsScores) score = function.gradient(i, score, p, unused);
          return p;
        };
        group16[v / 2] = pack2<T>(weigh(v, quad.x, rows.x), weigh(v + 1, quad.y, rows.y));
        group16[v / 2 + 1] = pack2<T>(weigh(v + 2, quad.z, rows.x), weigh(v + 3, quad.w, rows.y));
        if constexpr (!Traits::kSendsScores) slot = quad;
      }
      rotate(p16, group16);
    }
  } else {
    constexpr int kHalf = kValues / 2;  // P and S do not fit in the registers
    const auto function = score_function<Traits, true>(c, {visible});
    function.template exponentiate<0, kHalf, T>(s, p16, QueryValues<0>(lse_log2));
    send<0, kHalf>(s, exchange);
    function.template exponentiate<kHalf, kValues, T>(s, p16, QueryValues<0>(lse_log2));
    send<kHalf, kValues>(s, exchange);
  }
}

// The warpgroup of dS with Traits::kSendsScores: dP becomes dS, and the gradients of captured tensors are added. P is
// computed again. lse_log2 and delta point at the numbers of the thread's first query.
template <typename Traits, typename Consumer, int kValues>
__device__ __forceinline__ void modified_gradients(const Consumer& c, float (&dp)[kValues], const float4* exchange,
                                                   const float* lse_log2, const float* delta) {
  const uint32_t visible = c.load_visible();  // the warpgroup of P has just read the same word
  typename Traits::Mod::Sums sums;
#pragma unroll 1
  for (int first = 0; first < kValues; first += kGroup<Traits>) {
    const auto function = function_of_group<Traits>(c, first, visible >> first / 2);
    const QueryValues<0> lse(lse_log2 + 2 * first), deltas(delta + 2 * first);
    float ds[kGroup<Traits>];
#pragma unroll
    for (int v = 0; v < kGroup<Traits>; v += 4) {
      const float4 quad = exchange[(first + v) / 4 * kWarpgroupThreads];
      const float s[] = {quad.x, quad.y, quad.z, quad.w};
      const float2 lse_pair = lse[v / 4], delta_pair = deltas[v / 4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float p = function.probability(v + e, s[e], e % 2 == 0 ? lse_pair.x : lse_pair.y);
        const float change = dp[v + e] - (e % 2 == 0 ? delta_pair.x : delta_pair.y);
        ds[v + e] = function.gradient(v + e, s[e], p * change, sums);
      }
    }
    rotate(dp, ds);
  }
  sums.finish();
}

}  // namespace flashbwd::sm90::large_head_dim

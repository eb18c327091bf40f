// The element-wise code between the matrix products, without features: probabilities and ds, in registers.
//
// A warp has s and dp of its 16 queries and of a step of 32 keys as MMA accumulators. Element e of tile t is
//   query first_query + 8 (e / 2), key first_key + 8 t + e % 2.
#pragma once

#include <cstdint>

#include "pair.cuh"

namespace flashbwd::short_sequences {

template <typename Traits>
struct Position {
  static __device__ __forceinline__ int32_t first_query() { return Traits::warp() * kWarpRows + Traits::lane() / 4; }
  static __device__ __forceinline__ int32_t first_key(int32_t step) {
    return step * Traits::kStepKeys + Traits::lane() % 4 * 2;
  }

  // Calls f(t, e) for every element.
  template <typename F>
  static __device__ __forceinline__ void for_each(const F& f) {
#pragma unroll
    for (int t = 0; t < Traits::kScoreTiles; ++t) {
#pragma unroll
      for (int e = 0; e < 4; ++e) f(t, e);
    }
  }

  // True if all queries of the warp that exist see all keys of the step.
  static __device__ __forceinline__ bool interior(const Visibility& v, int32_t step) {
    if ((step + 1) * Traits::kStepKeys > v.seqlen_k) return false;
    return v.full() || interior_query_blocks(v, step, kWarpRows, Traits::kStepKeys).contains(Traits::warp());
  }

  // Sets s = hidden for pairs that are not visible. Queries past the end have lse = +inf and need no mask.
  static __device__ __forceinline__ void mask(const Visibility& v, int32_t step, float hidden,
                                              typename Traits::Scores& s) {
    const int32_t keys = v.seqlen_k - first_key(step), difference = first_key(step) - first_query();
    const int32_t lo = v.lo - difference, hi = v.hi - difference;
    for_each([&](int t, int e) {
      const int32_t key = t * 8 + e % 2, d = key - e / 2 * 8;
      const bool visible = (d >= lo) & (d < hi) & (key < keys);
      s[t][e] = visible ? s[t][e] : hidden;
    });
  }
};

template <typename Traits>
struct PlainScores {
  using Scores = typename Traits::Scores;
  using SharedStorage = typename Traits::SharedStorage;

  const KernelParams& params;
  const Visibility& visibility;

  __device__ __forceinline__ PlainScores(const KernelParams& params, SharedStorage&, const Pair& pair, int32_t)
      : params(params), visibility(pair.visibility) {}

  // Before the first and after the last pair of a CTA.
  static __device__ __forceinline__ void begin(const KernelParams&, SharedStorage&) {}
  static __device__ __forceinline__ void end(const KernelParams&, SharedStorage&) {}

  // On entry s and dp are the products; on return s has the probabilities, and dp their gradients.
  __device__ __forceinline__ void apply(int32_t step, const RowStatistics<Traits>& rows, Scores& s, Scores& dp) const {
    const float scale = params.attention.softmax_scale * kLog2E;
    Position<Traits>::for_each(
        [&](int t, int e) { s[t][e] = exp2_approximate(fmaf(s[t][e], scale, -rows.lse_log2[e / 2])); });
    if (!Position<Traits>::interior(visibility, step)) Position<Traits>::mask(visibility, step, 0.f, s);
    Position<Traits>::for_each([&](int t, int e) { dp[t][e] = s[t][e] * (dp[t][e] - rows.delta[e / 2]); });
  }

  // Called instead of apply() for a step without a visible pair.
  __device__ __forceinline__ void skip(int32_t) const {}
  // Key steps that apply() or skip() must see.
  __device__ __forceinline__ int32_t steps() const { return 0; }
};

}  // namespace flashbwd::short_sequences

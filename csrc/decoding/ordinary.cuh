// The modifications that every build has kernels for, as arguments: OrdinaryMod of params.h, which
// flashbwd/mods/ordinary.py fills.
#pragma once

#include "params.h"
#include "ptx.cuh"

#ifdef __CUDACC__

namespace flashbwd {

__device__ inline long long sum_of(const DecodingParams& p, const OrdinarySum& sum, int b, int h, int q) {
  long long total = static_cast<long long>(sum.q) * q + sum.constant;
#pragma unroll
  for (const OrdinaryTerm& term : sum.terms) {
    if (term.weight == 0) continue;
    const CapturedTensor& captured = p.captured[term.slot];
    const int index = term.index == OrdinaryTerm::kBatch ? b : term.index == OrdinaryTerm::kHead ? h : 0;
    const long long at = index * captured.strides[0];
    total += term.weight * (term.wide ? static_cast<const long long*>(captured.data)[at]
                                      : static_cast<const int*>(captured.data)[at]);
  }
  return total;
}

// kMask: the bounds are a mask's; else they are where the score stays finite.
template <bool kScore, bool kMask>
struct OrdinaryKernelMod {
  static constexpr bool kHasScoreMod = kScore;
  static constexpr bool kHasMask = kMask;

  // Between which keys a row sees, and its bias: slope * (k + origin).
  struct Row {
    int first, last;
    float slope;
    int origin;

    Row() = default;
    __device__ Row(const DecodingParams& p, int b, int h, int q)
        : first(0), last(0x7fffffff), slope(p.ordinary.slope), origin(0) {
      const OrdinaryMod& mod = p.ordinary;
      for (int i = 0; i < mod.bound_count; ++i) {
        const long long sum = sum_of(p, mod.bounds[i].sum, b, h, q);
        const int limit = static_cast<int>(min(max(mod.bounds[i].k > 0 ? -sum : sum, -1ll), 0x7fffffffll));
        first = mod.bounds[i].k > 0 ? max(first, limit) : first;
        last = mod.bounds[i].k > 0 ? last : min(last, limit);
      }
      if (!kScore || slope == 0) return;
      origin = static_cast<int>(sum_of(p, mod.origin, b, h, q));
      if (mod.slope_slot >= 0) {
        const CapturedTensor& slopes = p.captured[mod.slope_slot];
        slope *= static_cast<const float*>(slopes.data)[h * slopes.strides[0]];
      }
      if (mod.exp2_rate != 0 || mod.exp2_start != 0) slope *= exp2f(mod.exp2_rate * h + mod.exp2_start);
    }
    __device__ bool sees(int k) const { return first <= k && k <= last; }
  };

  __device__ static float score_mod(const DecodingParams& p, const Row& row, float score, int, int, int, int k) {
    const float cap = p.ordinary.softcap;
    if (cap > 0) score = cap * tanh_of(score / cap);
    if (row.slope != 0) score += row.slope * static_cast<float>(k + row.origin);
    return kMask || row.sees(k) ? score : -FLASHBWD_INFINITY;
  }

  __device__ static bool mask_mod(const DecodingParams&, const Row& row, int, int, int, int k) { return row.sees(k); }
};

}  // namespace flashbwd

#endif

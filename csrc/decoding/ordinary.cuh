// The modifications that every build has kernels for, as arguments: OrdinaryMod of params.h, which
// flashbwd/mods/ordinary.py fills.
#pragma once

#include "mod.cuh"
#include "params.h"
#include "ptx.cuh"

#ifdef __CUDACC__

namespace flashbwd {

__device__ inline int sum_of(const DecodingParams& p, const OrdinarySum& sum, int b, int h, int q) {
  int total = sum.q * q + sum.constant;
#pragma unroll 1
  for (const OrdinaryTerm& term : sum.terms) {
    if (term.weight == 0) continue;
    const CapturedTensor& captured = p.captured[term.slot];
    const int index = term.index == OrdinaryTerm::kBatch ? b : term.index == OrdinaryTerm::kHead ? h : 0;
    const long long at = index * captured.strides[0];
    constexpr long long kFar = 1 << 29;  // beyond every key, and two of them stay in 32 bits
    const int value = term.wide
                          ? static_cast<int>(min(max(static_cast<const long long*>(captured.data)[at], -kFar), kFar))
                          : static_cast<const int*>(captured.data)[at];
    total += term.weight * value;
  }
  return total;
}

// kMask: the bounds are a mask's; else they are where the score stays finite.
template <bool kScore, bool kMask>
struct OrdinaryKernelMod : AnyMod {
  static constexpr bool kTotal = true;
  static constexpr bool kHasRanges = true;
  static constexpr bool kHasRow = true;
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
        const int sum = sum_of(p, mod.bounds[i].sum, b, h, q);
        if (mod.bounds[i].k > 0) {
          first = max(first, -sum);
        } else {
          last = min(last, sum);
        }
      }
      if (!kScore || slope == 0) return;
      origin = sum_of(p, mod.origin, b, h, q);
      if (mod.slope_slot >= 0) {
        const CapturedTensor& slopes = p.captured[mod.slope_slot];
        slope *= static_cast<const float*>(slopes.data)[h * slopes.strides[0]];
      }
      if (mod.exp2_rate != 0 || mod.exp2_start != 0) slope *= exp2f(mod.exp2_rate * h + mod.exp2_start);
    }
    __device__ bool sees(int k) const { return first <= k && k <= last; }
  };

  template <int kRowTiles, int kKeyTiles>
  __device__ static void all_scores(const DecodingParams& p, float (&scores)[kRowTiles][kKeyTiles][4]) {
    const float cap = p.ordinary.softcap;
    if (cap == 0) return;
    const float inverse = 1 / cap;
#pragma unroll
    for (int i = 0; i < kRowTiles * kKeyTiles * 4; ++i) {
      float& score = scores[i / (kKeyTiles * 4)][i / 4 % kKeyTiles][i % 4];
      score = cap * tanh_of(score * inverse);
    }
  }

  __device__ static float score_mod(const DecodingParams&, const Row& row, float score, int, int, int, int k,
                                    bool* = nullptr) {
    score += row.slope * static_cast<float>(k + row.origin);
    return kMask || row.sees(k) ? score : -FLASHBWD_INFINITY;
  }

  __device__ static bool sees_all(const Row& row, int first, int last) {
    return row.first <= first && last <= row.last;
  }

  __device__ static bool mask_mod(const DecodingParams&, const Row& row, int, int, int, int k) { return row.sees(k); }
};

}  // namespace flashbwd

#endif

// The built-in modifications, for which every build has kernels. They interpret BuiltInMod (params.h), which
// flashbwd/mods/built_in.py fills.
#pragma once

#include "mod.cuh"
#include "params.h"
#include "ptx.cuh"

#ifdef __CUDACC__

namespace flashbwd {

// Evaluates a sum with wrap-around. Unsigned 64-bit arithmetic is exact modulo 2^64, hence also modulo 2^32 after the
// final cast to int.
__device__ inline long long sum_of(const DecodingParams& p, const BuiltInSum& sum, int b, int h, int q) {
  using Bits = unsigned long long;
  Bits total = static_cast<Bits>(sum.q) * static_cast<Bits>(q) + static_cast<Bits>(sum.constant);
#pragma unroll 1
  for (const BuiltInTerm& term : sum.terms) {
    if (term.weight == 0) continue;
    const CapturedTensor& captured = p.captured[term.slot];
    const int index = term.index == BuiltInTerm::kBatch ? b : term.index == BuiltInTerm::kHead ? h : 0;
    const long long at = index * captured.strides[0];
    const long long value =
        term.wide ? static_cast<const long long*>(captured.data)[at] : static_cast<const int*>(captured.data)[at];
    total += static_cast<Bits>(term.weight) * static_cast<Bits>(value);
  }
  return sum.wide ? static_cast<long long>(total) : static_cast<int>(total);
}

// Returns sign * sum + q * q_idx + constant of a bound, saturated to int. Saturation keeps a limit that is larger than
// all key indices larger than them.
__device__ inline int limit_of(const DecodingParams& p, const BuiltInBound& bound, int b, int h, int q) {
  constexpr long long kBeyond = 1ll << 40, kMost = 0x7fffffff;
  const long long sum = min(max(sum_of(p, bound.sum, b, h, q), -kBeyond), kBeyond);
  const long long limit = bound.sign * sum + static_cast<long long>(bound.q) * q + bound.constant;
  return static_cast<int>(min(max(limit, -kMost), kMost));
}

// kMask: the bounds belong to mask_mod; otherwise score_mod sets the score to -inf where a bound is violated.
template <bool kScore, bool kMask>
struct BuiltInKernelMod : AnyMod {
  static constexpr bool kTotal = true;
  static constexpr bool kHasRanges = true;
  static constexpr bool kHasRow = true;
  static constexpr bool kHasScoreMod = kScore;
  static constexpr bool kHasMask = kMask;

  // The first and the last key that a row sees, and the coefficients of its bias slope * (bias_k * k + origin).
  struct Row {
    int first, last;
    float slope;
    int origin;

    Row() = default;
    __device__ Row(const DecodingParams& p, int b, int h, int q)
        : first(0), last(0x7fffffff), slope(p.built_in.slope), origin(0) {
      const BuiltInMod& mod = p.built_in;
      for (int i = 0; i < mod.bound_count; ++i) {
        const int limit = limit_of(p, mod.bounds[i], b, h, q);
        if (mod.bounds[i].k > 0) {
          first = max(first, -limit);
        } else {
          last = min(last, limit);
        }
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

  template <int kRowTiles, int kKeyTiles>
  __device__ static void all_scores(const DecodingParams& p, float (&scores)[kRowTiles][kKeyTiles][4]) {
    const float cap = p.built_in.softcap;
    if (cap == 0) return;
    const float inverse = 1 / cap;
#pragma unroll
    for (int i = 0; i < kRowTiles * kKeyTiles * 4; ++i) {
      float& score = scores[i / (kKeyTiles * 4)][i / 4 % kKeyTiles][i % 4];
      score = cap * tanh_of(score * inverse);
    }
  }

  __device__ static float score_mod(const DecodingParams& p, const Row& row, float score, int, int, int, int k,
                                    bool* = nullptr) {
    const uint32 distance = static_cast<uint32>(p.built_in.bias_k * k) + static_cast<uint32>(row.origin);
    score += row.slope * static_cast<float>(static_cast<int>(distance));
    return kMask || row.sees(k) ? score : -FLASHBWD_INFINITY;
  }

  __device__ static bool sees_all(const Row& row, int first, int last) {
    return row.first <= first && last <= row.last;
  }

  __device__ static bool mask_mod(const DecodingParams&, const Row& row, int, int, int, int k) { return row.sees(k); }
};

}  // namespace flashbwd

#endif

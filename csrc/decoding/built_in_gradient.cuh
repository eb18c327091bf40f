// The built-in modifications of built_in.cuh and their derivatives, for the backward kernel.
#pragma once

#include "backward_params.h"
#include "built_in.cuh"

#ifdef __CUDACC__

namespace flashbwd {

// kMask: the bounds belong to mask_mod; otherwise score_mod sets the score to -inf where a bound is violated.
template <bool kMask>
struct BuiltInGradient {
  using Forward = BuiltInKernelMod<true, kMask>;
  static constexpr bool kHasScoreMod = true;
  static constexpr bool kHasMask = kMask;
  struct Row {};

  __device__ static float score_mod(const DecodingBackwardParams& p, Row, float score, int b, int h, int q, int k) {
    const float cap = p.built_in.softcap;
    if (cap != 0) score = cap * tanh_of(score * (1 / cap));
    return Forward::score_mod(p, typename Forward::Row(p, b, h, q), score, b, h, q, k);
  }

  __device__ static bool mask_mod(const DecodingBackwardParams& p, Row, int b, int h, int q, int k) {
    return typename BuiltInKernelMod<false, true>::Row(p, b, h, q).sees(k);
  }

  // Only the softcap has a derivative other than 1. A score that a bound sets to -inf has probability 0, hence ds = 0.
  __device__ static float score_gradient(const DecodingBackwardParams& p, float score, int, int, int, int, float ds,
                                         bool) {
    const float cap = p.built_in.softcap;
    if (cap == 0) return ds;
    const float t = tanh_of(score * (1 / cap));
    return ds * (1 - t * t);
  }
};

}  // namespace flashbwd

#endif

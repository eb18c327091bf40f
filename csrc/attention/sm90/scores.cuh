// Softcap, ALiBi and a bias per key, in the kernel of two consumer warpgroups. P is packed at once; after that only P
// times the derivative of the softcap is needed, which takes the place of S. ALiBi and the bias also go with dropout.
#pragma once

#include "fragments.cuh"

namespace flashbwd::sm90 {

// The function from scores to probabilities for a thread in one iteration.
class ScoreFunction {
 public:
  ScoreFunction() = default;
  // A softcap, slope or bias of 0 means none. distance: of the thread's first query from its first key.
  __device__ __forceinline__ ScoreFunction(float softmax_scale, float softcap, const float (&biases)[2], float slope,
                                           float distance)
      : factor_((softcap > 0.f ? 2.f / softcap : 1.f) * softmax_scale * kLog2E),
        softcap_(softcap * kLog2E),
        biases_{biases[0] * kLog2E, biases[1] * kLog2E},
        slope_(slope * kLog2E),
        distance_(distance) {}

  // S becomes P. Without softcap and mask.
  template <int kValues, int kEarly>
  __device__ __forceinline__ void exponentiate(float (&s)[kValues], const float* lse_log2,
                                               const EarlyRows<kEarly>& early) const {
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      s[v] = exp2_approximate(s[v] * factor_ - shift(v, early.pair(lse_log2, v / 4)));
    }
  }

  // S becomes P times the derivative, and p16 becomes P, in values kBegin to kEnd. Without mask.
  template <int kBegin, int kEnd, typename T, int kValues, int kEarly>
  __device__ __forceinline__ void exponentiate(float (&s)[kValues], uint32_t (&p16)[kValues / 2], const float* lse_log2,
                                               const EarlyRows<kEarly>& early) const {
    if (softcap_ > 0.f) {
      exponentiate<true, kBegin, kEnd, T>(s, p16, lse_log2, early);
    } else {
      exponentiate<false, kBegin, kEnd, T>(s, p16, lse_log2, early);
    }
  }

 private:
  // The number that is subtracted from score v of an accumulator. `lse`: of its pair of queries.
  __device__ __forceinline__ float shift(int v, const float2& lse) const {
    const float distance = distance_ + static_cast<float>(v / 4 * 8 + v % 2 - v % 4 / 2 * 8);
    return (v % 2 == 0 ? lse.x : lse.y) + slope_ * fabsf(distance) - biases_[v % 4 / 2];
  }

  template <bool kCapped, int kBegin, int kEnd, typename T, int kValues, int kEarly>
  __device__ __forceinline__ void exponentiate(float (&s)[kValues], uint32_t (&p16)[kValues / 2], const float* lse_log2,
                                               const EarlyRows<kEarly>& early) const {
#pragma unroll
    for (int v = kBegin; v < kEnd; v += 2) {
      const float2 lse = early.pair(lse_log2, v / 4);
      float p[2];
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        float& value = s[v + odd];
        if constexpr (kCapped) {
          const float r = tanh_complement(value * factor_);
          p[odd] = exp2_approximate(softcap_ - r * softcap_ - shift(v + odd, lse));
          value = p[odd] * (r * (2.f - r));
        } else {
          value = p[odd] = exp2_approximate(value * factor_ - shift(v + odd, lse));
        }
      }
      p16[v / 2] = pack2<T>(p[0], p[1]);
    }
  }

  float factor_, softcap_, biases_[2], slope_, distance_;  // scores are in units of log2
};

}  // namespace flashbwd::sm90

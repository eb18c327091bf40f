// Softcap, ALiBi and a bias per key, in the kernel of two consumer warpgroups. P is packed at once; after that only P
// times the derivative of the softcap is needed, which replaces S. ALiBi and the bias also go with dropout.
#pragma once

#include "plain.cuh"

namespace flashbwd::sm90 {

// The function from scores to probabilities for a thread in one iteration. With kMasked, the probabilities of hidden
// scores become 0.
template <bool kMasked>
class ScoreFunction {
 public:
  // A softcap, slope or bias of 0 means none. distance: of the thread's first query from its first key.
  __device__ __forceinline__ ScoreFunction(float softmax_scale, float softcap, const float (&biases)[2], float slope,
                                           float distance, VisibleBits<1> visible)
      : factor_((softcap > 0.f ? 2.f / softcap : 1.f) * softmax_scale * kLog2E),
        softcap_(softcap * kLog2E),
        biases_{biases[0] * kLog2E, biases[1] * kLog2E},
        slope_(slope * kLog2E),
        distance_(distance),
        visible_(visible) {}

  // S becomes the exponent of P. Without softcap and mask.
  template <int kValues, int kEarly>
  __device__ __forceinline__ void scale_scores(float (&s)[kValues], const QueryValues<kEarly>& lse_log2) const {
#pragma unroll
    for (int v = 0; v < kValues; ++v) s[v] = s[v] * factor_ - shift(v, lse_log2[v / 4]);
  }

  // S becomes P times the derivative, and p16 becomes P, in values kBegin to kEnd. Without mask.
  template <int kBegin, int kEnd, typename T, int kValues, int kEarly>
  __device__ __forceinline__ void exponentiate(float (&s)[kValues], uint32_t (&p16)[kValues / 2],
                                               const QueryValues<kEarly>& lse_log2) const {
    if (softcap_ > 0.f) {
      exponentiate<true, kBegin, kEnd, T>(s, p16, lse_log2);
    } else {
      exponentiate<false, kBegin, kEnd, T>(s, p16, lse_log2);
    }
  }

 private:
  // The number that is subtracted from score v of an accumulator. `lse`: of its pair of queries.
  __device__ __forceinline__ float shift(int v, const float2& lse) const {
    const float distance = distance_ + static_cast<float>(v / 4 * 8 + v % 2 - v % 4 / 2 * 8);
    float row = v % 2 == 0 ? lse.x : lse.y;
    if constexpr (kMasked) row = visible_[v] ? row : INFINITY;
    return row + slope_ * fabsf(distance) - biases_[v % 4 / 2];
  }

  template <bool kCapped, int kBegin, int kEnd, typename T, int kValues, int kEarly>
  __device__ __forceinline__ void exponentiate(float (&s)[kValues], uint32_t (&p16)[kValues / 2],
                                               const QueryValues<kEarly>& lse_log2) const {
#pragma unroll
    for (int v = kBegin; v < kEnd; v += 2) {
      const float2 lse = lse_log2[v / 4];
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
  VisibleBits<1> visible_;
};

// The function of a consumer warpgroup's thread in this iteration.
template <typename Traits, bool kMasked = false, typename Consumer>
__device__ __forceinline__ ScoreFunction<kMasked> score_function(const Consumer& c, VisibleBits<1> visible = {}) {
  const AttentionBackwardParams& p = c.params.attention;
  const int32_t head = c.it.head(), key = c.work.first_key + c.first_own_key();
  float slope = 0.f, biases[2] = {};
  if (p.alibi_slopes != nullptr) slope = p.alibi_slopes[c.work.batch * p.alibi_batch_stride + head];
  if (!Traits::kBlockMask && p.bias.data != nullptr) {  // one number per key, the same for all queries
    const int64_t first = c.work.batch * p.bias.batch_stride + head * p.bias.head_stride;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (key + 8 * half >= c.work.visibility.seqlen_k) continue;
      const int64_t offset = first + (key + 8 * half) * p.bias.col_stride;
      biases[half] = p.bias.dtype == DType::kFloat32
                         ? static_cast<const float*>(p.bias.data)[offset]
                         : to_float(static_cast<const typename Traits::T*>(p.bias.data)[offset]);
    }
  }
  const int32_t distance = c.it.query_block() * Traits::kBlockM + c.pair + c.work.diagonal(p) - key;
  return {p.softmax_scale, p.softcap, biases, slope, static_cast<float>(distance), visible};
}

// ALiBi and a bias per key, which dropout may follow.
template <typename Traits>
struct ShiftedScores : PlainScores<Traits> {
  using Base = PlainScores<Traits>;
  using Base::Base;

  template <typename Consumer, typename Lse>
  __device__ __forceinline__ void probabilities(const Consumer& c, typename Base::Scores& s, typename Base::Operand&,
                                                const Lse& lse) const {
    score_function<Traits>(c).scale_scores(s[0], lse);
    Base::exponentiate_and_mask(c, s);
  }
};

// Softcap, ALiBi and a bias per key. Only some of P is computed under dP, because the registers do not hold both. Masks
// come last, on packed values.
template <typename Traits>
struct CappedScores : PlainScores<Traits> {
  using Base = PlainScores<Traits>;
  using typename Base::Operand, typename Base::Scores, typename Base::T;
  static constexpr int kUnderDp = Base::kValues / (Traits::kEarlyDv ? 1 : 2);
  static constexpr bool kDeltaFirst = Base::kDeltaFirst;

  ScoreFunction<false> function;

  template <typename Consumer>
  __device__ __forceinline__ explicit CappedScores(const Consumer& c) : Base(c), function(score_function<Traits>(c)) {}

  template <typename Consumer, typename Lse>
  __device__ __forceinline__ void probabilities(const Consumer&, Scores& s, Operand& p16, const Lse& lse) const {
    function.template exponentiate<0, kUnderDp, T>(s[0], p16[0], lse);
  }

  template <typename Consumer>
  __device__ __forceinline__ void pack_probabilities(const Consumer& c, Operand& p16, const Scores&) const {
    c.tile_mask.apply(c, p16);
  }

  template <typename Consumer, typename Lse, typename Delta>
  __device__ __forceinline__ void gradients(const Consumer& c, Scores& s, Operand& p16, Scores& dp, const Lse& lse,
                                            const Delta& delta) const {
    if constexpr (kDeltaFirst) {
      Base::gradients(c, s, p16, dp, lse, delta);
    } else {
      const auto subtract = [&](int i, float row) { dp[0][i] = s[0][i] * (dp[0][i] - row); };
      for_each_query<0, kUnderDp>(delta, subtract);
      function.template exponentiate<kUnderDp, Base::kValues, T>(s[0], p16[0], lse);
      for_each_query<kUnderDp, Base::kValues>(delta, subtract);
    }
  }

  template <typename Consumer>
  __device__ __forceinline__ void pack_gradients(const Consumer& c, Operand& ds16, const Scores& ds) const {
    Base::pack_tiles(ds16, ds);
    c.tile_mask.apply(c, ds16);
  }
};

}  // namespace flashbwd::sm90

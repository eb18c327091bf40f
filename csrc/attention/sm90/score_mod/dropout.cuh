// Dropout after another policy: P is drawn again as the forward dropped it. A dropped probability has its sign set, so
// dV sees 0 there and dS = P * (mask * dP - delta) still has P. It composes with policies that replace `probabilities`
// alone.
#pragma once

#include "../../../common/philox_fragments.cuh"
#include "../traits.cuh"
#include "plain.cuh"

namespace flashbwd::sm90 {

// The scale of kept probabilities is multiplied with dv and dk after the loop, and delta is divided by it. A bias
// gradient leaves in the loop, so with a bias the scale is multiplied with dP instead.
template <typename Traits, typename Base>
struct DroppedScores : Base {
  using typename Base::Operand, typename Base::Scores;
  static constexpr bool kDeltaFirst = false;
  static constexpr int kWords = Traits::kOwnQueries / 64;

  uint32_t dropped[kWords];

  template <typename Consumer>
  __device__ __forceinline__ explicit DroppedScores(const Consumer& c) : Base(c) {
    draw(c);
  }

  template <typename Consumer, typename Lse>
  __device__ __forceinline__ void probabilities(const Consumer& c, Scores& s, Operand& p16, const Lse& lse) const {
    Base::probabilities(c, s, p16, lse);
    mark_dropped(s[0], dropped);
  }

  template <typename Consumer>
  __device__ __forceinline__ void pack_probabilities(const Consumer&, Operand& p16, const Scores& s) const {
    Base::template pack_tiles<true>(p16, s);
  }

  template <typename Consumer, typename Lse, typename Delta>
  __device__ __forceinline__ void gradients(const Consumer& c, Scores& s, Operand&, Scores& dp, const Lse&,
                                            const Delta& delta) const {
    for_each_query<0, Base::kValues>(delta, [&](int i, float row) {
      const float of_kept = Traits::kBias ? dp[0][i] * c.params.features.dropout_scale : dp[0][i];
      dp[0][i] = fmaxf(s[0][i], 0.f) * of_kept - fabsf(s[0][i]) * (row * c.delta_factor);
    });
  }

 private:
  template <typename Consumer>
  __device__ __forceinline__ void draw(const Consumer& c) {
    const AttentionBackwardParams& p = c.params.attention;
    const uint32_t threshold = c.params.features.dropout_threshold;
    const uint64_t plane = uint64_t{static_cast<uint32_t>(c.work.batch)} * p.heads + c.it.head();
    const int32_t first_query = c.it.query_block() * Traits::kBlockM;
    if constexpr (Traits::kEfficientDropout) {
      const uint64_t seed = uniform(c.smem.philox.seed);
      const WordNumbering numbering(c.smem.philox.offset, plane, p.seqlen_q, p.seqlen_k,
                                    p.dropout_layout == DropoutLayout::kEfficient32, c.work.visibility.seqlen_k);
      const int32_t first_key = c.work.first_key + c.own_key + c.warp * 16;
#pragma unroll
      for (int word = 0; word < kWords; ++word) {
        dropped[word] =
            draw_dropped_words<true>(seed, numbering, first_query + word * 64, first_key, threshold, c.lane);
      }
    } else {
      // The bits pass through this iteration's buffer of dS: no product reads it (Mainloop::score_gradients), and a
      // warp writes its rows of dS only after it has read the bits in them.
      const int32_t first_key = c.own_key + c.warp / 2 * 32;  // of a pair of warps, within the tile
      uint8_t* const bits = c.smem.ds[c.it.index % Traits::kDsBuffers][0] + first_key * kAtomRowBytes;
      draw_dropped<16 * kAtomRowBytes>(dropped, c.smem.philox, plane, first_query, c.work.first_key + first_key,
                                       threshold, c.warp % 2, c.lane, bits,
                                       [&] { named_barrier_sync(kWarpgroupBarrier + c.warpgroup, kWarpgroupThreads); });
    }
  }
};

}  // namespace flashbwd::sm90

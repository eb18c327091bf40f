// A score_mod that flashbwd/flex/generated.py traced and wrote as CUDA, with a block mask whose bits also hide what is
// beyond the sequences. ../sm90/score_mod/generated.cuh describes the functions of Mod.
#pragma once

#include "block_mask_scores.cuh"
#include "generated_params.h"

namespace flashbwd::sm80 {

template <typename Traits>
struct GeneratedScores : ListedScores<Traits> {
  using Base = ListedScores<Traits>;
  using Base::Base, Base::bits, Base::params, Base::work;
  using typename Base::Accumulator, typename Base::Iteration, typename Base::Position;

  // As BlockMaskScores::apply. Mod is called for hidden pairs too, with indices inside the sequences; its results are
  // dropped. A gradient of 0 stays 0 even if the derivative is infinite.
  __device__ __forceinline__ void apply(const Iteration& iteration, const float* lse, const float* delta,
                                        Accumulator& s, Accumulator& dp) const {
    using Mod = typename Traits::Mod;
    const auto& p = static_cast<const GeneratedParams&>(params);
    const float scale = p.attention.softmax_scale;
    const int32_t last_query = p.attention.seqlen_q - 1, last_key = p.attention.seqlen_k - 1;
    const int32_t batch = work.batch, head = iteration.head;
    const int32_t first_query = Position::first_query(iteration.query_block(work));
    const int32_t first_key = Position::first_key(work);
    typename Mod::Sums sums;
    Base::for_each(lse, delta, s, dp, [&](int mt, int nt, int e, float& x, float& y, float row_lse, float row_delta) {
      const int32_t query = min(first_query + Position::query(nt, e), last_query);
      const int32_t key = min(first_key + Position::key(mt, e), last_key);
      const float score = x * scale;
      const float modified = Mod::score_mod(p, score, batch, head, query, key);
      const bool visible = bits.visible(mt, nt, e);
      x = visible ? exponential<typename Traits::T>(modified * kLog2E - row_lse) : 0.f;
      const float ds = visible ? x * (y - row_delta) : 0.f;
      const bool adds = Mod::kCapturedGradients && ds != 0.f;
      const float gradient = Mod::score_gradient(p, score, batch, head, query, key, ds, adds, sums);
      y = ds == 0.f ? 0.f : gradient;
    });
    sums.finish();
  }
};

}  // namespace flashbwd::sm80

// The policy without a feature, which the others extend; score_mod.cuh composes them. The main loop makes one object
// per iteration and calls the members in the order below; with 128 queries, pack_probabilities comes after
// pack_gradients. After `gradients`, dp is the gradient of softmax_scale * q k^T. `c` is the consumer warpgroup.
#pragma once

#include "../key_mask.cuh"
#include "../tile_mask.cuh"

namespace flashbwd::sm90 {

template <typename Traits>
struct PlainScores {
  static constexpr int kMmaTiles = Traits::kMmaTiles, kValues = Traits::kOwnQueries / 2;  // values per MMA tile
  using T = typename Traits::T;
  using Scores = float[kMmaTiles][kValues];
  using Operand = uint32_t[kMmaTiles][kValues / 2];

  // The accumulators of dP start as delta, from which the product is subtracted; else 32 subtractions follow the
  // product. 1 % faster with 64 queries, 1 to 3 % slower with 128.
  static constexpr bool kDeltaFirst = Traits::kColumns <= 64;

  template <typename Consumer>
  __device__ __forceinline__ explicit PlainScores(const Consumer&) {}

  // S becomes P, while dP is computed.
  template <typename Consumer, typename Lse>
  __device__ __forceinline__ void probabilities(const Consumer& c, Scores& s, Operand&, const Lse& lse) const {
#pragma unroll
    for (int m = 0; m < kMmaTiles; ++m) scale_scores(s[m], lse, c.scale_log2);
    exponentiate_and_mask(c, s);
  }

  // The first operand of dV.
  template <typename Consumer>
  __device__ __forceinline__ void pack_probabilities(const Consumer&, Operand& p16, const Scores& s) const {
    pack_tiles(p16, s);
  }

  // dP becomes dS = P * (dP - delta). With kDeltaFirst, dp holds delta - dP.
  template <typename Consumer, typename Lse, typename Delta>
  __device__ __forceinline__ void gradients(const Consumer&, Scores& s, Operand&, Scores& dp, const Lse&,
                                            const Delta& delta) const {
#pragma unroll
    for (int m = 0; m < kMmaTiles; ++m) {
      if constexpr (kDeltaFirst) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) dp[m][i] = s[m][i] * -dp[m][i];
      } else {
        for_each_query<0, kValues>(delta, [&](int i, float row) { dp[m][i] = s[m][i] * (dp[m][i] - row); });
      }
    }
  }

  // The first operand of dK.
  template <typename Consumer>
  __device__ __forceinline__ void pack_gradients(const Consumer&, Operand& ds16, const Scores& ds) const {
    pack_tiles(ds16, ds);
  }

  // Writes dS to shared memory, from where dQ reads it.
  template <typename Consumer>
  static __device__ __forceinline__ void store_gradients(const Consumer& c, const Operand& ds16) {
    auto& buffer = c.smem.ds[c.it.index % Traits::kDsBuffers][Traits::kByQueries ? c.warpgroup : 0];
#pragma unroll
    for (int m = 0; m < kMmaTiles; ++m) {
      store_operand<Traits::kBlockN>(smem_address(buffer), ds16[m], c.own_key + m * 64 + c.warp * 16, c.lane);
    }
  }

  // Called after dQ is issued, and before the next loads may overwrite what the iteration left in shared memory.
  template <typename Consumer>
  static __device__ __forceinline__ void store_bias_gradient(const Consumer&, const Operand&) {}
  static __device__ __forceinline__ void release_gradients() {}

 protected:
  // Exponentials before the branch of a mask. ptxas moves nothing over a branch, and what comes after it to where the
  // warps would compute dS alone, so that exponentials and dS share the time: up to 4 % faster. With kEarlyDv, P is
  // needed at once.
  static constexpr int kBeforeMask = Traits::kEarlyDv ? kValues : kValues / 2;

  // Exponents of visible scores become P, all others 0.
  template <typename Consumer>
  static __device__ __forceinline__ void exponentiate_and_mask(const Consumer& c, Scores& s) {
    const auto hidden = [](int i) { return i < kBeforeMask ? 0.f : -INFINITY; };
#pragma unroll
    for (int m = 0; m < kMmaTiles; ++m) exponentiate<0, kBeforeMask>(s[m]);
    c.tile_mask.apply(c, s, hidden);
    if constexpr (Traits::kBias) KeyMask<Traits>::hide(c, s, hidden);
#pragma unroll
    for (int m = 0; m < kMmaTiles; ++m) exponentiate<kBeforeMask, kValues>(s[m]);
  }

  template <bool kPositive = false>
  static __device__ __forceinline__ void pack_tiles(Operand& packed, const Scores& values) {
#pragma unroll
    for (int m = 0; m < kMmaTiles; ++m) pack<T, kPositive>(packed[m], values[m]);
  }
};

}  // namespace flashbwd::sm90

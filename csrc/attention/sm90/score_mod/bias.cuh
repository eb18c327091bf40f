// A bias with its gradient. TMA loads the bias of an iteration into the dS buffer of that iteration, (queries, 64 keys)
// per warpgroup. Each warp reads its bias and overwrites it with dS; dQ reads dS from there, and TMA stores it as
// dbias. If several heads or batch entries share the bias, the warps add dS from registers instead.
#pragma once

#include "../../../common/ordered.cuh"
#include "plain.cuh"

namespace flashbwd::sm90 {

// S becomes scale * S + bias - lse, the exponent of P. MMA tiles have the same keys and different queries, with one
// bias.
template <typename T, int kMmaTiles, int kValues, int kEarly>
__device__ __forceinline__ void scale_scores_with_bias(float (&s)[kMmaTiles][kValues], uint32_t address,
                                                       const QueryValues<kEarly>& lse_log2, float scale_log2) {
#pragma unroll
  for (int k = 0; k < kValues / 8; ++k) {
    uint32_t bias[4];
    load_matrix_x4_transposed(address + k * kTransposedStep, bias[0], bias[1], bias[2], bias[3]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 b = unpack2<T>(bias[i]);
#pragma unroll
      for (int m = 0; m < kMmaTiles; ++m) {
        const float2 lse = lse_log2[m * (kValues / 4) + 2 * k + i / 2];
        float* const value = &s[m][8 * k + 2 * i];
        value[0] = value[0] * scale_log2 + (b.x * kLog2E - lse.x);
        value[1] = value[1] * scale_log2 + (b.y * kLog2E - lse.y);
      }
    }
  }
}

// P = exp(scale * S + bias - lse), where the bias lies in the dS buffer of the iteration.
template <typename Traits>
struct BiasScores : PlainScores<Traits> {
  using Base = PlainScores<Traits>;
  using Base::Base;

  template <typename Consumer, typename Lse>
  __device__ __forceinline__ void probabilities(const Consumer& c, typename Base::Scores& s, typename Base::Operand&,
                                                const Lse& lse) const {
    scale_scores_with_bias<typename Base::T>(s, address(c), lse, c.scale_log2);
    Base::exponentiate_and_mask(c, s);
  }

  template <typename Consumer, typename Lse, typename Delta>
  __device__ __forceinline__ void gradients(const Consumer& c, typename Base::Scores& s, typename Base::Operand& p16,
                                            typename Base::Scores& dp, const Lse& lse, const Delta& delta) const {
    if constexpr (Traits::kBatchEntries == 1) {
      Base::gradients(c, s, p16, dp, lse, delta);
    } else {
#pragma unroll
      for (int j = 0; j < Base::kMmaTiles * Base::kValues / 4; ++j) {
        const float2 rows = delta[j];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int m = j / (Base::kValues / 4), value = j % (Base::kValues / 4) * 4 + i;
          dp[m][value] = s[m][value] * (dp[m][value] - (i % 2 == 0 ? rows.x : rows.y));
        }
      }
    }
  }

  template <typename Consumer>
  static __device__ __forceinline__ void store_gradients(const Consumer& c, const typename Base::Operand& ds16) {
#pragma unroll
    for (int m = 0; m < Base::kMmaTiles; ++m) {
      store_operand_transposed(address(c) + m * Traits::kBlockM * kAtomRowBytes, ds16[m]);
    }
  }

  // Stores or adds dS of this iteration to the gradient of the bias. The whole warpgroup has written it.
  template <typename Consumer>
  static __device__ __forceinline__ void store_bias_gradient(const Consumer& c, const typename Base::Operand& ds16) {
    const BiasGradientMode mode = c.params.features.bias_gradient.mode;
    if (mode == BiasGradientMode::kAddBlocks) {
      add_blocks(c, ds16);
    } else if (mode == BiasGradientMode::kStore && threadIdx.x % kWarpgroupThreads == 0) {
      tensor_store_4d(&c.params.maps.bias_gradient, tile(c), c.work.first_key + c.own_key,
                      c.it.query_block() * Traits::kBlockM, c.it.head(), c.work.batch, kEvictFirst);
      bulk_commit();
    }
  }
  static __device__ __forceinline__ void release_gradients() {
    bulk_wait_read<0>();
  }  // TMA has read dS; the next bias may overwrite it

 private:
  // Adds this warp's dS, 16 keys of all queries, to the fp32 sums of a shared bias. It is rounded to 16 bits, as the
  // operand of dK, whose registers hold it anyway.
  template <typename Consumer>
  static __device__ __forceinline__ void add_blocks(const Consumer& c, const typename Base::Operand& ds16) {
    const BiasGradient& g = c.params.features.bias_gradient;
    const int32_t key_group = (c.work.first_key + c.own_key) / kBiasBlockKeys + c.warp;
    if (key_group * kBiasBlockKeys >= c.params.attention.seqlen_k) return;
    constexpr int kBlocks = Traits::kBlockM / kBiasBlockQueries;
    const int32_t first_block = c.it.query_block() * kBlocks;
    const int32_t blocks = ceil_div(c.params.attention.seqlen_q, kBiasBlockQueries) - first_block;
    const bool ordered = c.params.features.bias_semaphores != nullptr;
    if (ordered) await_turn(c, key_group);
    float* const sums = static_cast<float*>(g.data) + c.work.batch * g.batch_stride + c.it.head() * g.head_stride +
                        key_group * g.col_stride + first_block * kBiasBlockElements + c.lane * 4;
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) {
      float2 first = unpack2<typename Base::T>(ds16[0][2 * k]), second = unpack2<typename Base::T>(ds16[0][2 * k + 1]);
#pragma unroll
      for (int m = 1; m < Base::kMmaTiles; ++m) {
        const float2 x = unpack2<typename Base::T>(ds16[m][2 * k]), y = unpack2<typename Base::T>(ds16[m][2 * k + 1]);
        first = make_float2(first.x + x.x, first.y + x.y);
        second = make_float2(second.x + y.x, second.y + y.y);
      }
      if (k < blocks) add_vector(sums + k * kBiasBlockElements, first.x, first.y, second.x, second.y);
    }
    if (ordered) end_turn(c, key_group);
  }

  // Called by a warp: returns when the adds of earlier work tiles to its part of a tile are complete. These were handed
  // out before this one, so the wait ends (docs/kernels/attention_sm90.md, "Why no wait lasts forever").
  template <typename Consumer>
  static __device__ __forceinline__ void await_turn(const Consumer& c, int32_t key_group) {
    if (c.lane == 0) {
      const int32_t before = sharers(c).adds_before(c.work.batch / Traits::kBatchEntries, c.it.head());
      const int32_t* const adds = semaphore(c, key_group);
      while (load_acquire(adds) != before) __nanosleep(32);
    }
    __syncwarp();
  }

  // Called by a warp: publishes its adds. The release covers those of all lanes, which the barrier puts before it.
  template <typename Consumer>
  static __device__ __forceinline__ void end_turn(const Consumer& c, int32_t key_group) {
    __syncwarp();
    if (c.lane == 0) add_release(semaphore(c, key_group), 1);
  }

  template <typename Consumer>
  static __device__ __forceinline__ BiasSharers sharers(const Consumer& c) {
    const BiasGradient& g = c.params.features.bias_gradient;
    return {g.batch_stride == 0, g.head_stride == 0, c.params.attention.heads};
  }
  template <typename Consumer>
  static __device__ __forceinline__ int32_t* semaphore(const Consumer& c, int32_t key_group) {
    const uint32_t plane = sharers(c).plane(c.work.batch, c.it.head());
    const uint32_t tile = plane * c.params.schedule.query_blocks + c.it.query_block();
    const uint32_t groups = (static_cast<uint32_t>(c.params.attention.seqlen_k) + kBiasBlockKeys - 1) / kBiasBlockKeys;
    return c.params.features.bias_semaphores + (tile * groups + key_group);
  }

  // Where the bias and dS of this iteration lie: those of the warpgroup, and those of this thread.
  template <typename Consumer>
  static __device__ __forceinline__ uint8_t* tile(const Consumer& c) {
    return c.smem.ds[c.it.index % Traits::kDsBuffers][c.warpgroup];
  }
  template <typename Consumer>
  static __device__ __forceinline__ uint32_t address(const Consumer& c) {
    return smem_address(tile(c)) + transposed_offset(c.warp, c.lane);
  }
};

}  // namespace flashbwd::sm90

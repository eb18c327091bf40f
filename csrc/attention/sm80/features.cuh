// Scores with bias, key mask, ALiBi, softcap and dropout. Each feature is a separate pass over the tile, so that an
// unused feature costs only one branch per tile. The kernels with only a bias have a shorter path of their own.
#pragma once

#include <cstdint>
#include <type_traits>

#include "bias.cuh"
#include "dq.cuh"
#include "dropout.cuh"
#include "key_mask.cuh"
#include "ordered_bias.cuh"
#include "scores.cuh"

namespace flashbwd::sm80 {

template <typename T>
__device__ __forceinline__ float hyperbolic_tangent(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return tanhf(x);
  } else {
    return 1.f - __fdividef(2.f, 1.f + exponential<T>(2.f * kLog2E * x));
  }
}

template <typename Traits>
struct Features {
  using T = typename Traits::T;
  using Position = ScorePosition<Traits>;
  using Accumulator = typename Position::Accumulator;

  static constexpr bool kAll = Traits::kVariant == Variant::kAllFeatures;

  const KernelParams& params;
  const WorkTile& work;
  const uint32_t* key_bits = nullptr;  // see KeyBits; only if kAll
  DropoutMask<Traits> mask;            // of the current tile

  __device__ __forceinline__ Features(const KernelParams& params, const WorkTile& work) : params(params), work(work) {}

  // Starts the copies of a tile's bias to memory that no thread reads any more. Commits a group even if there is no
  // bias.
  __device__ __forceinline__ void load_bias(int32_t head, int32_t query_block, uint8_t* tile) const {
    if (!kAll || params.attention.bias.data != nullptr) Bias<Traits>::load(params, work, head, query_block, tile);
    copy_async_commit();
  }
  // Draws the dropout mask of a tile. Called before apply().
  __device__ __forceinline__ void draw_mask(int32_t head, int32_t query_block) {
    if constexpr (kAll) {
      if (params.attention.dropout_p > 0.f) mask.draw(params, work, head, query_block);
    }
  }

  // On entry s and dp are the products; on return s has the probabilities for dv (with dropout without the factor
  // 1 / (1 - p)), and dp their gradients for dk and dq.
  // `lse`: (kBlockM,) times log2(e), `delta`: (kBlockM,), of the tile's queries. kPending: groups of copies after
  // load_bias().
  template <int kPending>
  __device__ __forceinline__ void apply(int32_t head, int32_t query_block, const float* lse, const float* delta,
                                        const uint8_t* bias, uint8_t* ds, Accumulator& s, Accumulator& dp) {
    if constexpr (kAll) {
      apply_all<kPending>(head, query_block, lse, delta, bias, ds, s, dp);
    } else {
      Bias<Traits>::template probabilities<kPending>(bias, lse, params.attention.softmax_scale * kLog2E, s);
      if (!work.interior.contains(query_block)) Position::mask(work, query_block, 0.f, s);
      finish_with_bias(delta, s, dp);
      if constexpr (Traits::kVariant == Variant::kBias && bias_kernel_adds(Traits::kTile)) {
        if (params.bias_gradient.mode == BiasGradientMode::kAdd) {
          Bias<Traits>::add_gradient(params, work, head, query_block, dp);
        }
      }
    }
  }

  // For a shared bias: loads the sums of the heads before this one, for add_gradient. `sums`: zero on entry.
  using Sums = typename OrderedBias<Traits>::Sums;
  __device__ __forceinline__ void load_sums(int32_t head, int32_t query_block, Sums& sums) const {
    if (!adds_in_any_order()) OrderedBias<Traits>::load_sums(params, work, head, query_block, sums);
  }
  // Adds ds to the shared gradient. `tile`: the ds tile, which this warp has not written yet.
  __device__ __forceinline__ void add_gradient(int32_t head, int32_t query_block, uint8_t* tile, const Accumulator& ds,
                                               const Sums& sums) const {
    if (adds_in_any_order()) {
      Bias<Traits>::add_gradient(params, work, head, query_block, ds);
    } else {
      OrderedBias<Traits>::add_in_order(params, work, head, query_block, tile, ds, sums);
    }
  }
  // Releases the semaphore of the tile after all threads have added.
  __device__ __forceinline__ void release(int32_t head, int32_t query_block) const {
    if (threadIdx.x == 0 && !adds_in_any_order()) OrderedBias<Traits>::release(params, work, head, query_block);
  }

  // Called after this warp has stored ds of the tile.
  __device__ __forceinline__ void finish_tile(int32_t head, int32_t query_block, const uint8_t* ds) const {
    if (params.bias_gradient_vectors) Bias<Traits>::store_vectors(params, work, head, query_block, ds);
  }

 private:
  __device__ __forceinline__ bool adds_in_any_order() const {
    return !bias_kernel_adds(Traits::kTile) && params.bias_gradient.mode == BiasGradientMode::kAdd;
  }
  template <int kPending>
  __device__ __forceinline__ void apply_all(int32_t head, int32_t query_block, const float* lse, const float* delta,
                                            const uint8_t* bias, uint8_t* ds, Accumulator& s, Accumulator& dp) {
    const AttentionBackwardParams& p = params.attention;
    float scale = p.softmax_scale * kLog2E;  // converts s to exponents of 2
    if (p.softcap > 0.f) {
      cap(ds, s);
      scale = 1.f;
    }
    if (p.bias.data != nullptr) {
      Bias<Traits>::template add<kPending>(params, work, head, query_block, bias, scale, s);
      scale = 1.f;
    }
    if (p.alibi_slopes != nullptr) {
      add_alibi(head, query_block, scale, s);
      scale = 1.f;
    }
    const bool partial = !work.interior.contains(query_block);
    const uint32_t keys = p.key_mask.data != nullptr ? KeyBits<Traits>::load(key_bits) : ~0u;
    if (partial || keys != ~0u) {
      Position::for_each([&](int mt, int nt, int e) { s[mt][nt][e] *= scale; });
      if (partial) Position::mask(work, query_block, -INFINITY, s);
      if (keys != ~0u) hide_keys(keys, s);
      scale = 1.f;
    }
    if (p.bias.data == nullptr && p.key_mask.data == nullptr) {
      p.dropout_p > 0.f ? finish<true, false>(lse, delta, scale, s, dp)
                        : finish<false, false>(lse, delta, scale, s, dp);
    } else {
      p.dropout_p > 0.f ? finish<true, true>(lse, delta, scale, s, dp) : finish<false, true>(lse, delta, scale, s, dp);
    }
    take_bias_gradient(head, query_block, dp);
    if (p.softcap > 0.f) multiply_by_cap_factor(ds, dp);
  }

  static __device__ __forceinline__ void hide_keys(uint32_t bits, Accumulator& s) {
    const uint32_t own = bits >> Traits::lane() / 4;  // bit n: the thread's first key + n
    Position::for_each([&](int mt, int nt, int e) {
      s[mt][nt][e] = (own >> Position::key(mt, e) & 1) != 0 ? s[mt][nt][e] : -INFINITY;
    });
  }

  // dp becomes ds.
  static __device__ __forceinline__ void finish_with_bias(const float* delta, const Accumulator& s, Accumulator& dp) {
    bool finite = true;
#pragma unroll
    for (int nt = 0; nt < Traits::kScoreTiles; ++nt) {
      const float2 row_delta = row_pair(delta, nt);
      finite = finite && fabsf(row_delta.x) < INFINITY && fabsf(row_delta.y) < INFINITY;
#pragma unroll
      for (int mt = 0; mt < Traits::kKeyTiles; ++mt) {
#pragma unroll
        for (int e = 0; e < 4; ++e) dp[mt][nt][e] = s[mt][nt][e] * (dp[mt][nt][e] - of_query(row_delta, e));
      }
    }
    if (finite) return;
    // If the bias hides a whole row, its probabilities are 0 and its delta may have any value.
    Position::for_each([&](int mt, int nt, int e) {
      if (!(s[mt][nt][e] > 0.f)) dp[mt][nt][e] = 0.f;
    });
  }
  static __device__ __forceinline__ float of_query(float2 pair, int e) { return e % 2 == 0 ? pair.x : pair.y; }
  static __device__ __forceinline__ float2 row_pair(const float* rows, int nt) {
    return *reinterpret_cast<const float2*>(rows + Position::first_column() + nt * 8);
  }

  // s becomes the capped score times log2(e). The factor 1 - tanh^2 of ds is stored, rounded to T, in this thread's
  // elements of the ds tile. On 9.0 another lane may overwrite them, so store_scores synchronizes the warp first.
  __device__ __forceinline__ void cap(uint8_t* ds, Accumulator& s) const {
    const float softcap = params.attention.softcap;
    const float to_cap = params.attention.softmax_scale / softcap, from_cap = softcap * kLog2E;
    for_each_pair([&](int mt, int nt, int h) {
      float* const x = s[mt][nt] + h * 2;
      const float t0 = hyperbolic_tangent<T>(x[0] * to_cap), t1 = hyperbolic_tangent<T>(x[1] * to_cap);
      x[0] = from_cap * t0;
      x[1] = from_cap * t1;
      store_pair(pair_address(ds, mt, nt, h), 1.f - t0 * t0, 1.f - t1 * t1);
    });
  }
  __device__ __forceinline__ void multiply_by_cap_factor(const uint8_t* ds, Accumulator& dp) const {
    for_each_pair([&](int mt, int nt, int h) {
      const float2 factor = load_pair(pair_address(ds, mt, nt, h));
      dp[mt][nt][h * 2] *= factor.x;
      dp[mt][nt][h * 2 + 1] *= factor.y;
    });
  }

  // Calls f(mt, nt, h) for each pair of elements with neighbouring queries.
  template <typename F>
  static __device__ __forceinline__ void for_each_pair(const F& f) {
    Position::for_each([&](int mt, int nt, int e) {
      if (e % 2 == 0) f(mt, nt, e / 2);
    });
  }
  static __device__ __forceinline__ uint32_t pair_address(const uint8_t* ds, int mt, int nt, int h) {
    const uint32_t row = (Traits::warp_n() * Traits::kKeyTiles + mt) * 16 + h * 8 + Traits::lane() / 4;
    const uint32_t byte = (Position::first_column() + nt * 8) * sizeof(T);
    return smem_address(ds) + VectorSwizzle<Traits::kScoreRowBytes, sizeof(T) == 4>::offset(row, byte / 16) + byte % 16;
  }
  static __device__ __forceinline__ void store_pair(uint32_t address, float x, float y) {
    if constexpr (sizeof(T) == 2) {
      store_shared_word(address, pack2<T>(x, y));
    } else {
      store_shared_word(address, __float_as_uint(x));
      store_shared_word(address + 4, __float_as_uint(y));
    }
  }
  static __device__ __forceinline__ float2 load_pair(uint32_t address) {
    if constexpr (sizeof(T) == 2) {
      return unpack2<T>(load_shared_word(address));
    } else {
      return make_float2(__uint_as_float(load_shared_word(address)), __uint_as_float(load_shared_word(address + 4)));
    }
  }

  __device__ __forceinline__ void add_alibi(int32_t head, int32_t query_block, float scale, Accumulator& s) const {
    const AttentionBackwardParams& p = params.attention;
    const float slope = -kLog2E * p.alibi_slopes[work.batch * p.alibi_batch_stride + head];
    const int32_t off = p.causal == CausalAlignment::kTopLeft ? 0 : work.sequence.seqlen_k - work.sequence.seqlen_q;
    const float distance = static_cast<float>(Position::first_query(query_block) + off - Position::first_key(work));
    Position::for_each([&](int mt, int nt, int e) {
      const float d = fabsf(distance + static_cast<float>(Position::query(nt, e) - Position::key(mt, e)));
      s[mt][nt][e] = fmaf(s[mt][nt][e], scale, slope * d);
    });
  }

  // kHides: a bias or a key mask may hide a whole row. Its probabilities are 0, and its delta may have any value.
  // With dropout, p is not multiplied by 1 / (1 - p); the main loop multiplies dv instead.
  template <bool kDropout, bool kHides>
  __device__ __forceinline__ void finish(const float* lse, const float* delta, float scale, Accumulator& s,
                                         Accumulator& dp) const {
#pragma unroll
    for (int nt = 0; nt < Traits::kScoreTiles; ++nt) {
      const float2 row_lse = row_pair(lse, nt);
      const float2 row_delta = row_pair(delta, nt);
#pragma unroll
      for (int mt = 0; mt < Traits::kKeyTiles; ++mt) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& p = s[mt][nt][e];
          float& ds = dp[mt][nt][e];
          p = exponential<T>(fmaf(p, scale, -of_query(row_lse, e)));
          const uint32_t keeps = kDropout ? mask.keeps(mt, nt, e) : 0;
          if (kDropout) multiply_by_zero_unless(keeps, ds);
          ds = p * (kDropout ? fmaf(ds, params.dropout_scale, -of_query(row_delta, e)) : ds - of_query(row_delta, e));
          if (kHides) ds = p > 0.f ? ds : 0.f;
          if (kDropout) multiply_by_zero_unless(keeps, p);
        }
      }
    }
  }

  __device__ __forceinline__ void take_bias_gradient(int32_t head, int32_t query_block, const Accumulator& ds) {
    const AttentionBackwardParams& p = params.attention;
    const BiasGradient& g = params.bias_gradient;
    switch (g.mode) {
      case BiasGradientMode::kNone:
        break;
      case BiasGradientMode::kStore:
        if (params.bias_gradient_vectors) break;  // finish_tile stores it
        if (g.dtype == DType::kFloat32) {
          Bias<Traits>::template write_elements<float>(params, work, head, query_block, p.seqlen_q, p.seqlen_k, ds,
                                                       [](float* element, float x) { *element = x; });
        } else {
          Bias<Traits>::template write_elements<T>(params, work, head, query_block, p.seqlen_q, p.seqlen_k, ds,
                                                   [](T* element, float x) { *element = from_float<T>(x); });
        }
        break;
      case BiasGradientMode::kAdd:
        Bias<Traits>::template write_elements<float>(params, work, head, query_block, work.visibility.seqlen_q,
                                                     work.visibility.seqlen_k, ds,
                                                     [](float* element, float x) { add_to_global(element, x); });
        break;
      case BiasGradientMode::kKeySums:
        Bias<Traits>::add_key_sums(params, work, head, ds);
        break;
      case BiasGradientMode::kRowSums:
        Bias<Traits>::store_row_sums(params, work, head, query_block, ds);
        break;
    }
  }
};

}  // namespace flashbwd::sm80

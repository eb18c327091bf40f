// Scores with bias, key mask and ALiBi, and the gradient of the bias. Each feature is a separate pass over the scores,
// so that an unused feature costs only one branch per step.
#pragma once

#include <cstdint>

#include "scores.cuh"

namespace flashbwd::short_sequences {

// Loads and stores of a thread's elements of a (query, key) plane in global memory.
template <typename Traits>
struct PlaneElements {
  int32_t rows, columns;  // how many exist from the thread's first query and key on

  __device__ __forceinline__ PlaneElements(int32_t rows, int32_t columns, int32_t step)
      : rows(rows - Position<Traits>::first_query()), columns(columns - Position<Traits>::first_key(step)) {}

  template <typename View>
  static __device__ __forceinline__ int64_t first(const View& view, int32_t batch, int32_t head, int32_t step) {
    return batch * view.batch_stride + head * view.head_stride + Position<Traits>::first_query() * view.row_stride +
           Position<Traits>::first_key(step) * view.col_stride;
  }

  // Calls f(t, r, offset of the pair, number of its elements that exist) for each pair of neighbouring keys.
  template <typename View, typename F>
  __device__ __forceinline__ void for_each_pair(const View& view, const F& f) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int t = 0; t < Traits::kScoreTiles; ++t) {
        const int32_t left = r * 8 < rows ? columns - t * 8 : 0;
        f(t, r, r * 8 * view.row_stride + t * 8 * view.col_stride, left);
      }
    }
  }

  // x = scale * x + factor * element. `pairs`: two columns are one aligned vector.
  template <typename Element>
  __device__ __forceinline__ void add(const BiasView& view, int64_t first, bool pairs, float scale, float factor,
                                      typename Traits::Scores& x) const {
    const Element* const data = static_cast<const Element*>(view.data) + first;
    for_each_pair(view, [&](int t, int r, int64_t offset, int32_t left) {
      float2 pair = make_float2(0.f, 0.f);
      if (pairs && left >= 2) {
        pair = load_pair(data + offset);
      } else {
        if (left >= 1) pair.x = to_float(data[offset]);
        if (left >= 2) pair.y = to_float(data[offset + view.col_stride]);
      }
      x[t][r * 2] = fmaf(x[t][r * 2], scale, pair.x * factor);
      x[t][r * 2 + 1] = fmaf(x[t][r * 2 + 1], scale, pair.y * factor);
    });
  }

  template <typename Element>
  __device__ __forceinline__ void store(const BiasGradient& view, int64_t first, bool pairs,
                                        const typename Traits::Scores& x) const {
    Element* const data = static_cast<Element*>(view.data) + first;
    for_each_pair(view, [&](int t, int r, int64_t offset, int32_t left) {
      const float low = x[t][r * 2], high = x[t][r * 2 + 1];
      if (pairs && left >= 2) {
        store_pair(data + offset, low, high);
      } else {
        if (left >= 1) data[offset] = from_float<Element>(low);
        if (left >= 2) data[offset + view.col_stride] = from_float<Element>(high);
      }
    });
  }

 private:
  template <typename Element>
  static __device__ __forceinline__ float2 load_pair(const Element* source) {
    if constexpr (sizeof(Element) == 4) {
      return *reinterpret_cast<const float2*>(source);
    } else {
      return unpack2<Element>(*reinterpret_cast<const uint32_t*>(source));
    }
  }
  template <typename Element>
  static __device__ __forceinline__ void store_pair(Element* destination, float low, float high) {
    if constexpr (sizeof(Element) == 4) {
      *reinterpret_cast<float2*>(destination) = make_float2(low, high);
    } else {
      *reinterpret_cast<uint32_t*>(destination) = pack2<Element>(low, high);
    }
  }
};

template <typename Traits>
struct Features {
  using T = typename Traits::T;
  using Scores = typename Traits::Scores;
  using SharedStorage = typename Traits::SharedStorage;

  const KernelParams& params;
  SharedStorage& smem;
  const Visibility& visibility;
  const int32_t batch, head;
  uint32_t shown[Traits::kSteps];  // the key mask: bit n of word i is key 32 i + n

  // Called by whole warps.
  __device__ __forceinline__ Features(const KernelParams& params, SharedStorage& smem, const Pair& pair, int32_t head)
      : params(params), smem(smem), visibility(pair.visibility), batch(pair.batch), head(head) {
    const KeyMaskView& mask = params.attention.key_mask;
    if (mask.data == nullptr) return;
#pragma unroll
    for (int i = 0; i < Traits::kSteps; ++i) {
      const int32_t key = i * 32 + Traits::lane();
      const bool shows =
          key < visibility.seqlen_k && mask.data[pair.batch * mask.batch_stride + key * mask.key_stride] != 0;
      shown[i] = __ballot_sync(0xffffffffu, shows);
    }
  }

  // Fills the regions of shared memory that hold a bias which all pairs of the CTA have, and the sums of its gradient.
  // Each thread reads only what it has written.
  static __device__ __forceinline__ void begin(const KernelParams& params, SharedStorage& smem) {
    const AttentionBackwardParams& p = params.attention;
    const int32_t head = blockIdx.x;
#pragma unroll 1
    for (int32_t step = 0; step < Traits::kSteps; ++step) {
      if (params.shared.bias > 0) {
        Scores bias = {};
        add_bias(params, PlaneElements<Traits>(p.seqlen_q, p.seqlen_k, step), 0, head, step, 1.f, 1.f, bias);
        keep_bias(params, smem, step, bias);
      }
      if (params.shared.bias_sums > 0) {
        const Scores zeros = {};
        store_vectors(Traits::region(smem, params.shared.bias_sums), step, zeros);
      }
    }
  }

  // Stores the CTA's sums of the gradient.
  static __device__ __forceinline__ void end(const KernelParams& params, SharedStorage& smem) {
    if (params.shared.bias_sums == 0) return;
    const int32_t cta = blockIdx.y * gridDim.x + blockIdx.x;
#pragma unroll 1
    for (int32_t step = 0; step < Traits::kSteps; ++step) {
      Scores sums;
      load_vectors(Traits::region(smem, params.shared.bias_sums), step, sums);
      store_gradient(params, cta / params.bias_planes, cta % params.bias_planes, step, sums);
    }
  }

  __device__ __forceinline__ void apply(int32_t step, const RowStatistics<Traits>& rows, Scores& s, Scores& dp) const {
    const AttentionBackwardParams& p = params.attention;
    float scale = p.softmax_scale * kLog2E;  // converts s to exponents of 2
    if (params.shared.bias > 0) {
      add_kept_bias(step, scale, s);
      scale = 1.f;
    } else if (p.bias.data != nullptr) {
      const PlaneElements<Traits> elements(visibility.seqlen_q, visibility.seqlen_k, step);
      add_bias(params, elements, batch, head, step, scale, kLog2E, s);
      scale = 1.f;
    }
    if (p.alibi_slopes != nullptr) {
      add_alibi(step, scale, s);
      scale = 1.f;
    }
    const uint32_t keys = p.key_mask.data != nullptr ? word_of(step) : ~0u;
    const bool partial = !Position<Traits>::interior(visibility, step);
    if (partial || keys != ~0u) {
      Position<Traits>::for_each([&](int t, int e) { s[t][e] *= scale; });
      if (partial) Position<Traits>::mask(visibility, step, -INFINITY, s);
      const uint32_t own = keys >> Traits::lane() % 4 * 2;
      Position<Traits>::for_each(
          [&](int t, int e) { s[t][e] = (own >> (t * 8 + e % 2) & 1) != 0 ? s[t][e] : -INFINITY; });
      scale = 1.f;
    }
    Position<Traits>::for_each([&](int t, int e) {
      s[t][e] = exp2_approximate(fmaf(s[t][e], scale, -rows.lse_log2[e / 2]));
      // If the bias hides a whole row, its probabilities are 0 and its delta may have any value.
      dp[t][e] = s[t][e] > 0.f ? s[t][e] * (dp[t][e] - rows.delta[e / 2]) : 0.f;
    });
    take_gradient(step, dp);
  }

  // The gradient is zero where no query sees a key.
  __device__ __forceinline__ void skip(int32_t step) const {
    if (params.bias_gradient.mode == BiasGradientMode::kNone || params.shared.bias_sums > 0) return;
    const Scores zeros = {};
    store_gradient(params, batch, head, step, zeros);
  }
  __device__ __forceinline__ int32_t steps() const {
    const bool stores = params.bias_gradient.mode != BiasGradientMode::kNone && params.shared.bias_sums == 0;
    return stores ? (params.attention.seqlen_k + Traits::kStepKeys - 1) / Traits::kStepKeys : 0;
  }

 private:
  // s = scale * s + factor * bias
  static __device__ __forceinline__ void add_bias(const KernelParams& params, const PlaneElements<Traits>& elements,
                                                  int32_t batch, int32_t head, int32_t step, float scale, float factor,
                                                  Scores& s) {
    const BiasView& view = params.attention.bias;
    const int64_t first = PlaneElements<Traits>::first(view, batch, head, step);
    if (view.dtype == DType::kFloat32) {
      elements.template add<float>(view, first, params.bias_pairs, scale, factor, s);
    } else {
      elements.template add<T>(view, first, params.bias_pairs, scale, factor, s);
    }
  }

  // The region holds the bias in its dtype.
  static __device__ __forceinline__ void keep_bias(const KernelParams& params, SharedStorage& smem, int32_t step,
                                                   const Scores& bias) {
    if (params.attention.bias.dtype == DType::kFloat32) {
      store_vectors(Traits::region(smem, params.shared.bias), step, bias);
      return;
    }
    uint2* const region = Traits::template region<uint2>(smem, params.shared.bias);
#pragma unroll
    for (int t = 0; t < Traits::kScoreTiles; ++t) {
      region[(step * Traits::kScoreTiles + t) * Traits::kThreads] =
          make_uint2(pack2<T>(bias[t][0], bias[t][1]), pack2<T>(bias[t][2], bias[t][3]));
    }
  }
  __device__ __forceinline__ void add_kept_bias(int32_t step, float scale, Scores& s) const {
    const bool fp32 = params.attention.bias.dtype == DType::kFloat32;
    const int32_t first = step * Traits::kScoreTiles * Traits::kThreads;
    const float4* const in_fp32 = Traits::region(smem, params.shared.bias) + first;
    const uint2* const in_16_bits = Traits::template region<uint2>(smem, params.shared.bias) + first;
    // The tile has rows past the end of a shorter sequence, where the bias may be NaN.
    const int32_t rows_left = visibility.seqlen_q - Position<Traits>::first_query();
#pragma unroll
    for (int t = 0; t < Traits::kScoreTiles; ++t) {
      float4 bias;
      if (fp32) {
        bias = in_fp32[t * Traits::kThreads];
      } else {
        const uint2 words = in_16_bits[t * Traits::kThreads];
        const float2 low = unpack2<T>(words.x), high = unpack2<T>(words.y);
        bias = make_float4(low.x, low.y, high.x, high.y);
      }
      s[t][0] = fmaf(s[t][0], scale, 0 < rows_left ? bias.x * kLog2E : 0.f);
      s[t][1] = fmaf(s[t][1], scale, 0 < rows_left ? bias.y * kLog2E : 0.f);
      s[t][2] = fmaf(s[t][2], scale, 8 < rows_left ? bias.z * kLog2E : 0.f);
      s[t][3] = fmaf(s[t][3], scale, 8 < rows_left ? bias.w * kLog2E : 0.f);
    }
  }

  static __device__ __forceinline__ void store_gradient(const KernelParams& params, int32_t batch, int32_t head,
                                                        int32_t step, const Scores& ds) {
    const BiasGradient& g = params.bias_gradient;
    const PlaneElements<Traits> elements(params.attention.seqlen_q, params.attention.seqlen_k, step);
    const int64_t first = PlaneElements<Traits>::first(g, batch, head, step);
    if (g.dtype == DType::kFloat32) {
      elements.template store<float>(g, first, params.bias_gradient_pairs, ds);
    } else {
      elements.template store<T>(g, first, params.bias_gradient_pairs, ds);
    }
  }

  __device__ __forceinline__ void take_gradient(int32_t step, const Scores& ds) const {
    if (params.shared.bias_sums > 0) {
      float4* const vectors = Traits::region(smem, params.shared.bias_sums);
      Scores sums;
      load_vectors(vectors, step, sums);
      Position<Traits>::for_each([&](int t, int e) { sums[t][e] += ds[t][e]; });
      store_vectors(vectors, step, sums);
    } else if (params.bias_gradient.mode != BiasGradientMode::kNone) {
      store_gradient(params, batch, head, step, ds);
    }
  }

  static __device__ __forceinline__ void load_vectors(const float4* region, int32_t step, Scores& x) {
#pragma unroll
    for (int t = 0; t < Traits::kScoreTiles; ++t) {
      const float4 vector = region[(step * Traits::kScoreTiles + t) * Traits::kThreads];
      x[t][0] = vector.x;
      x[t][1] = vector.y;
      x[t][2] = vector.z;
      x[t][3] = vector.w;
    }
  }
  static __device__ __forceinline__ void store_vectors(float4* region, int32_t step, const Scores& x) {
#pragma unroll
    for (int t = 0; t < Traits::kScoreTiles; ++t) {
      region[(step * Traits::kScoreTiles + t) * Traits::kThreads] = make_float4(x[t][0], x[t][1], x[t][2], x[t][3]);
    }
  }

  __device__ __forceinline__ uint32_t word_of(int32_t step) const {
    uint32_t word = shown[0];
#pragma unroll
    for (int i = 1; i < Traits::kSteps; ++i) word = step == i ? shown[i] : word;
    return word;
  }

  __device__ __forceinline__ void add_alibi(int32_t step, float scale, Scores& s) const {
    const AttentionBackwardParams& p = params.attention;
    const float slope = -kLog2E * p.alibi_slopes[batch * p.alibi_batch_stride + head];
    const int32_t off = p.causal == CausalAlignment::kTopLeft ? 0 : visibility.seqlen_k - visibility.seqlen_q;
    const auto distance = static_cast<float>(Position<Traits>::first_query() + off - Position<Traits>::first_key(step));
    Position<Traits>::for_each([&](int t, int e) {
      const float d = fabsf(distance + static_cast<float>(e / 2 * 8 - (t * 8 + e % 2)));
      s[t][e] = fmaf(s[t][e], scale, slope * d);
    });
  }
};

}  // namespace flashbwd::short_sequences

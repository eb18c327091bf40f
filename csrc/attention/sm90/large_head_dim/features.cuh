// Softcap, bias, ALiBi and dropout: turns S^T into P^T and sends the dS warpgroup what it needs. Each feature is a pass
// of its own over the tile: one loop with all run-time branches exceeds the instruction cache.
#pragma once

#include "../../../common/philox_fragments.cuh"
#include "../kernel_params.h"
#include "../tile_mask.cuh"

namespace flashbwd::sm90::large_head_dim {

// The number sent to the dS warpgroup: p times the derivative of the softcap, negative if dropout dropped it.
__device__ __forceinline__ float encode_probability(float p, bool kept) { return kept ? p : -p; }
__device__ __forceinline__ bool is_kept(float encoded) { return __float_as_int(encoded) >= 0; }

// The scores of a tile that one thread holds (../tile_mask.cuh): value v is query i0 + 8 (v / 4) + v % 2, key j0 + 8 (v
// % 4 / 2). Tiles begin at multiples of kBlockM and kBlockN.
template <typename Traits>
struct ScoreTile {
  using T = typename Traits::T;
  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kValues = kBlockM / 2;
  static constexpr bool kFewRegisters = Traits::kHeadDimV > 192;
  static_assert(kValues == 32, "dropout keeps a bit an element");

  const KernelParams& params;
  const typename Traits::WorkTile& work;
  int32_t head;
  int32_t i0, j0;

  // Sets what the product q k is added to: a bias that may come first, or zeros.
  __device__ __forceinline__ void start(float (&s)[kValues]) const {
#pragma unroll
    for (int v = 0; v < kValues; ++v) s[v] = 0.f;
    if (bias_comes_first()) add_bias(s, 1.f / params.attention.softmax_scale);
  }

  // S becomes P times the factor of dropout, the first operand of dv. `exchange` gets the numbers for the dS warpgroup,
  // one float4 every kWarpgroupThreads. `lse_log2` points at this thread's first query.
  __device__ __forceinline__ void probabilities(float (&s)[kValues], const float* lse_log2, uint32_t dropped,
                                                float4* exchange) const {
    const AttentionBackwardParams& p = params.attention;
    const bool capped = p.softcap > 0.f;
    float to_log2 = p.softmax_scale * kLog2E;
    if (capped) {
      cap(s, exchange);
      to_log2 = kLog2E;
    }
    if (p.bias.data != nullptr && !bias_comes_first()) {
      if (!capped) {  // with a softmax_scale of 0
#pragma unroll
        for (int v = 0; v < kValues; ++v) s[v] = 0.f;
        to_log2 = kLog2E;
      }
      add_bias(s, 1.f);
    }
    if (p.alibi_slopes != nullptr) {
      exponentiate_with_alibi(s, lse_log2, to_log2);
    } else {
      exponentiate(s, QueryValues<0>(lse_log2), to_log2);
    }
    if (!work.interior.contains(i0 / kBlockM)) mask<kBlockM>(s, TileVisibility(work.visibility, j0, i0), 0, 0);
    if (capped) {
      send_probabilities<true>(s, dropped, exchange);
    } else {
      send_probabilities<false>(s, dropped, exchange);
    }
  }

  // The bits are those of ../../../common/philox_fragments.cuh.
  __device__ __forceinline__ uint32_t dropped() const {
    const AttentionBackwardParams& p = params.attention;
    if (p.dropout_p == 0.f) return 0;
    const uint64_t seed = p.philox.current_seed(), offset = p.philox.current_offset();
    const uint64_t plane = static_cast<uint64_t>(work.batch) * p.heads + head;
    const int32_t lane = threadIdx.x % 32, first_query = i0 - lane % 4 * 2, first_key = j0 - lane / 4;
    if (p.dropout_layout == DropoutLayout::kFlash) {
      return draw_dropped_alone<!kFewRegisters>(seed, offset, plane, first_query, first_key,
                                                params.features.dropout_threshold, lane);
    }
    const WordNumbering numbering(offset, plane, p.seqlen_q, p.seqlen_k,
                                  p.dropout_layout == DropoutLayout::kEfficient32, work.visibility.seqlen_k);
    return draw_dropped_words<!kFewRegisters>(seed, numbering, first_query, first_key,
                                              params.features.dropout_threshold, lane);
  }

 private:
  __device__ __forceinline__ bool bias_comes_first() const {
    const AttentionBackwardParams& p = params.attention;
    return p.bias.data != nullptr && p.softcap == 0.f && p.softmax_scale != 0.f;
  }

  __device__ __forceinline__ void add_bias(float (&s)[kValues], float factor) const {
    if (params.attention.bias.dtype == DType::kFloat32) {
      add_bias_of<float>(s, factor);
    } else {
      add_bias_of<T>(s, factor);
    }
  }

  // As many loads are outstanding at once as registers allow.
  template <typename Element>
  __device__ __forceinline__ void add_bias_of(float (&s)[kValues], float factor) const {
    constexpr int kBatch = kFewRegisters ? 8 : kValues;
    const BiasView& b = params.attention.bias;
    const Element* row = static_cast<const Element*>(b.data) + work.batch * b.batch_stride + head * b.head_stride +
                         i0 * b.row_stride + j0 * b.col_stride;
    const int32_t queries = work.visibility.seqlen_q - i0, keys = work.visibility.seqlen_k - j0;
    const int64_t second_key = 8 * b.col_stride;
#pragma unroll
    for (int first = 0; first < kValues; first += kBatch) {
      Element values[kBatch];
#pragma unroll
      for (int v = 0; v < kBatch; v += 4) {
        const int i = (first + v) / 4 * 8;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          values[v + e] = Element(0.f);
          if (i + e % 2 < queries && e / 2 * 8 < keys) {
            values[v + e] = row[(e % 2 != 0 ? b.row_stride : 0) + (e / 2 != 0 ? second_key : 0)];
          }
        }
        row += 8 * b.row_stride;
      }
#pragma unroll
      for (int v = 0; v < kBatch; ++v) s[first + v] += to_float(values[v]) * factor;
    }
  }

  // S becomes softcap * tanh(scale * S / softcap). The derivative waits in `exchange` because registers are few.
  __device__ __forceinline__ void cap(float (&s)[kValues], float4* exchange) const {
    const float softcap = params.attention.softcap, factor = params.attention.softmax_scale / softcap;
#pragma unroll
    for (int c = 0; c < kValues; c += 4) {
      float t[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        t[e] = 1.f - tanh_complement(2.f * kLog2E * (s[c + e] * factor));
        s[c + e] = softcap * t[e];
      }
      exchange[c / 4 * kWarpgroupThreads] =
          make_float4(1.f - t[0] * t[0], 1.f - t[1] * t[1], 1.f - t[2] * t[2], 1.f - t[3] * t[3]);
    }
  }

  __device__ __forceinline__ void exponentiate_with_alibi(float (&s)[kValues], const float* lse_log2,
                                                          float to_log2) const {
    const AttentionBackwardParams& p = params.attention;
    const float slope_log2 = p.alibi_slopes[work.batch * p.alibi_batch_stride + head] * kLog2E;
    const float distance = static_cast<float>(i0 + work.diagonal(p) - j0);
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      const float alibi = slope_log2 * fabsf(distance + static_cast<float>(v / 4 * 8 + v % 2 - v % 4 / 2 * 8));
      s[v] = exp2_approximate(s[v] * to_log2 - lse_log2[v / 4 * 8 + v % 2] - alibi);
    }
  }

  // Sends P to the dS warpgroup through `exchange`, and multiplies s by the factor of dropout.
  template <bool kCapped>
  __device__ __forceinline__ void send_probabilities(float (&s)[kValues], uint32_t dropped, float4* exchange) const {
    const bool drops = params.attention.dropout_p > 0.f;
#pragma unroll
    for (int c = 0; c < kValues; c += 4) {
      float4& slot = exchange[c / 4 * kWarpgroupThreads];
      float4 sent = make_float4(s[c], s[c + 1], s[c + 2], s[c + 3]);
      if constexpr (kCapped) {
        const float4 derivative = kFewRegisters ? load_in_order(slot) : slot;
        sent = make_float4(sent.x * derivative.x, sent.y * derivative.y, sent.z * derivative.z, sent.w * derivative.w);
      }
      if (drops) {
        const auto kept = [&](int e) { return (dropped >> dropped_bit(c + e) & 1) == 0; };
        sent = make_float4(encode_probability(sent.x, kept(0)), encode_probability(sent.y, kept(1)),
                           encode_probability(sent.z, kept(2)), encode_probability(sent.w, kept(3)));
#pragma unroll
        for (int e = 0; e < 4; ++e) s[c + e] = kept(e) ? s[c + e] * params.features.dropout_scale : 0.f;
      }
      if constexpr (kFewRegisters) {
        store_in_order(slot, sent);
      } else {
        slot = sent;
      }
    }
  }
};

}  // namespace flashbwd::sm90::large_head_dim

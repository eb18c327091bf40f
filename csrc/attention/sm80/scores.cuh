// Between the products: scores and their gradients element by element, in registers.
//
// A warp holds s^T and dp^T of its keys and queries as MMA accumulators: element e of tile (mt, nt) is key
// first_key + 16 mt + 8 (e / 2), query first_query + 8 nt + e % 2.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../../common/philox.cuh"
#include "../row_statistics.h"
#include "scheduler.cuh"

namespace flashbwd::sm80 {

constexpr float kLog2E = 1.44269504088896340736f;

__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <typename T>
__device__ __forceinline__ float hyperbolic_tangent(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return tanhf(x);
  } else {
    return 1.f - __fdividef(2.f, 1.f + exp2_approximate(2.f * kLog2E * x));
  }
}

__device__ __forceinline__ float load_scalar(const void* data, int64_t index, DType dtype) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[index];
  if (dtype == DType::kBFloat16) return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
  return __half2float(static_cast<const __half*>(data)[index]);
}

__device__ __forceinline__ void store_scalar(void* data, int64_t index, DType dtype, float value) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(data)[index] = value;
  } else if (dtype == DType::kBFloat16) {
    static_cast<__nv_bfloat16*>(data)[index] = __float2bfloat16_rn(value);
  } else {
    static_cast<__half*>(data)[index] = __float2half_rn(value);
  }
}

template <typename Traits>
struct Scores {
  using T = typename Traits::T;
  static constexpr int kKeyTiles = Traits::kKeyTiles;
  static constexpr int kScoreTiles = Traits::kScoreTiles;
  static constexpr int kElements = kKeyTiles * kScoreTiles * 4;
  static_assert(kElements <= 64, "dropout keeps a bit an element");
  using Accumulator = float[kKeyTiles][kScoreTiles][4];
  using Mask = std::conditional_t<(kElements > 32), uint64_t, uint32_t>;  // a bit an element

  const KernelParams& params;
  const Work& work;
  int32_t first_key;
  float key_sums[kKeyTiles][2] = {};  // kKeySums: of the queries so far

  __device__ Scores(const KernelParams& params, const Work& work)
      : params(params),
        work(work),
        first_key(work.key_block * Traits::kBlockN + Traits::warp_n() * kKeyTiles * 16 + Traits::lane() / 4) {}

  static __device__ __forceinline__ int32_t first_query(int32_t query_block) {
    return query_block * Traits::kBlockM + Traits::warp_s() * kScoreTiles * 8 + Traits::lane() % 4 * 2;
  }

  // lse: (kBlockM,) times log2(e), delta: (kBlockM,), of the tile's queries in shared memory. On return s holds the
  // probabilities for dv and dp their gradients for dk and dq.
  __device__ __forceinline__ void apply(int32_t head, int32_t query_block, const float* lse, const float* delta,
                                        Accumulator& s, Accumulator& dp) {
    const int32_t column = Traits::warp_s() * kScoreTiles * 8 + Traits::lane() % 4 * 2;
    if constexpr (Traits::kFeatures) {
      apply_features(head, query_block, lse + column, delta + column, s, dp);
    } else if (work.interior.contains(query_block)) {
      apply_plain<false>(query_block, lse + column, delta + column, s, dp);
    } else {
      apply_plain<true>(query_block, lse + column, delta + column, s, dp);
    }
  }

  template <bool kMasked>
  __device__ __forceinline__ void apply_plain(int32_t query_block, const float* lse, const float* delta, Accumulator& s,
                                              Accumulator& dp) const {
    const float scale = params.attention.softmax_scale * kLog2E;
    const int32_t i0 = first_query(query_block);
#pragma unroll
    for (int nt = 0; nt < kScoreTiles; ++nt) {
      const float2 row_lse = *reinterpret_cast<const float2*>(lse + nt * 8);
      const float2 row_delta = *reinterpret_cast<const float2*>(delta + nt * 8);
#pragma unroll
      for (int mt = 0; mt < kKeyTiles; ++mt) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float x = fmaf(s[mt][nt][e], scale, -(e % 2 == 0 ? row_lse.x : row_lse.y));
          if (kMasked && !visible(i0 + nt * 8 + e % 2, first_key + mt * 16 + e / 2 * 8)) x = -INFINITY;
          const float p = exponential(x);
          s[mt][nt][e] = p;
          dp[mt][nt][e] = p * (dp[mt][nt][e] - (e % 2 == 0 ? row_delta.x : row_delta.y));
        }
      }
    }
  }

  // Whether the bias can be what the first product adds to: s = scale * (q k + bias / scale).
  __device__ bool bias_comes_first() const {
    const AttentionBackwardParams& p = params.attention;
    return p.bias.data != nullptr && p.softcap == 0.f && p.softmax_scale != 0.f;
  }

  // The accumulator before the product q k: zeros, or the bias where it can come first. All loads are on their way
  // before the first is waited for.
  __device__ __forceinline__ void start(int32_t head, int32_t query_block, Accumulator& s) const {
    const bool biased = Traits::kFeatures && bias_comes_first();
    const float unscale = biased ? 1.f / params.attention.softmax_scale : 0.f;
    const int32_t i0 = first_query(query_block);
#pragma unroll
    for (int mt = 0; mt < kKeyTiles; ++mt) {
#pragma unroll
      for (int nt = 0; nt < kScoreTiles; ++nt) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          s[mt][nt][e] = 0.f;
          if constexpr (Traits::kFeatures) {
            const int32_t i = i0 + nt * 8 + e % 2, j = first_key + mt * 16 + e / 2 * 8;
            if (biased && within(i, j)) s[mt][nt][e] = bias_at(head, i, j) * unscale;
          }
        }
      }
    }
  }

  // kKeySums: after the last tile of a head.
  __device__ __forceinline__ void finish_head(int32_t head) {
    if constexpr (Traits::kFeatures) {
      const BiasGradient& g = params.bias_gradient;
      if (g.mode != BiasGradientMode::kKeySums) return;
#pragma unroll
      for (int mt = 0; mt < kKeyTiles; ++mt) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float sum = key_sums[mt][h];
          key_sums[mt][h] = 0.f;
          sum += __shfl_xor_sync(0xffffffffu, sum, 1);
          sum += __shfl_xor_sync(0xffffffffu, sum, 2);
          const int32_t j = first_key + mt * 16 + h * 8;
          if (Traits::lane() % 4 == 0 && j < params.attention.seqlen_k) {
            static_cast<float*>(g.data)[work.batch * g.batch_stride + head * g.head_stride +
                                        Traits::warp_s() * g.slot_stride + j * g.col_stride] = sum;
          }
        }
      }
    }
  }

 private:
  static __device__ __forceinline__ float exponential(float x) {
    if constexpr (std::is_same_v<T, float>) {
      return exp2f(x);
    } else {
      return exp2_approximate(x);
    }
  }

  __device__ __forceinline__ bool within(int32_t i, int32_t j) const {
    return i < work.visibility.seqlen_q && j < work.visibility.seqlen_k;
  }

  // Queries past the end need no mask: their lse is +inf.
  __device__ __forceinline__ bool visible(int32_t i, int32_t j) const {
    const Visibility& v = work.visibility;
    return j - i >= v.lo && j - i < v.hi && j < v.seqlen_k;
  }

  __device__ __forceinline__ float bias_at(int32_t head, int32_t i, int32_t j) const {
    const BiasView& b = params.attention.bias;
    return load_scalar(b.data, work.batch * b.batch_stride + head * b.head_stride + i * b.row_stride + j * b.col_stride,
                       b.dtype);
  }

  // Bit (mt * kScoreTiles + nt) * 4 + e: the element is kept.
  __device__ Mask dropout_mask(int32_t head, int32_t i0) const {
    const AttentionBackwardParams& p = params.attention;
    const uint64_t seed = p.philox.seed_ptr != nullptr ? *p.philox.seed_ptr : p.philox.seed;
    const uint64_t offset = p.philox.offset_ptr != nullptr ? *p.philox.offset_ptr : p.philox.offset;
    const uint64_t plane = static_cast<uint64_t>(work.batch) * p.heads + head;
    Mask mask = 0;
    if (p.dropout_layout == DropoutLayout::kFlash) {
#pragma unroll 1
      for (int32_t nt = 0; nt < kScoreTiles; nt += 2) {
#pragma unroll
        for (int32_t mt = 0; mt < kKeyTiles; ++mt) {
#pragma unroll
          for (int32_t c = 0; c < 2; ++c) {
            const int32_t i = i0 + nt * 8 + c, j = first_key + mt * 16;
            const uint4 bytes = flash_bytes(seed, offset + plane * 32, i, j);
#pragma unroll
            for (int32_t k = 0; k < 4; ++k) {  // (query + 8, key + 8)
              const bool keep = flash_byte(bytes, i + k / 2 * 8, j + k % 2 * 8) <= params.dropout_threshold;
              mask |= Mask{keep} << ((mt * kScoreTiles + nt + k / 2) * 4 + k % 2 * 2 + c);
            }
          }
        }
      }
      return mask;
    }
    const bool wraps = p.dropout_layout == DropoutLayout::kEfficient32;
    const uint64_t plane_size = static_cast<uint64_t>(p.seqlen_q) * p.seqlen_k;
    const uint64_t first = offset + (wraps ? static_cast<uint32_t>(plane * plane_size) : plane * plane_size);
#pragma unroll 1
    for (int32_t tile = 0; tile < kKeyTiles * kScoreTiles; ++tile) {
#pragma unroll
      for (int32_t e = 0; e < 4; ++e) {
        const uint64_t i = i0 + tile % kScoreTiles * 8 + e % 2, j = first_key + tile / kScoreTiles * 16 + e / 2 * 8;
        const uint64_t within_plane = i * work.visibility.seqlen_k + j;
        const uint64_t n = first + (wraps ? static_cast<uint32_t>(within_plane) : within_plane);
        mask |= Mask{keep_efficient(seed, n, p.dropout_p)} << (tile * 4 + e);
      }
    }
    return mask;
  }

  __device__ __forceinline__ void apply_features(int32_t head, int32_t query_block, const float* lse,
                                                 const float* delta, Accumulator& s, Accumulator& dp) {
    const AttentionBackwardParams& p = params.attention;
    const BiasGradient& g = params.bias_gradient;
    const int32_t i0 = first_query(query_block);
    const bool bias_is_left = p.bias.data != nullptr && !bias_comes_first();
    const float softcap = p.softcap, per_softcap = softcap > 0.f ? 1.f / softcap : 0.f;
    const float slope = p.alibi_slopes != nullptr ? p.alibi_slopes[work.batch * p.alibi_batch_stride + head] : 0.f;
    const int32_t off = p.causal == CausalAlignment::kTopLeft ? 0 : work.sequence.seqlen_k - work.sequence.seqlen_q;
    const Mask kept = p.dropout_p > 0.f ? dropout_mask(head, i0) : ~Mask{0};
    const float kept_scale = params.dropout_scale;
    const int64_t gradient_plane = work.batch * g.batch_stride + head * g.head_stride;

#pragma unroll
    for (int nt = 0; nt < kScoreTiles; ++nt) {
      const float2 row_lse = *reinterpret_cast<const float2*>(lse + nt * 8);
      const float2 row_delta = *reinterpret_cast<const float2*>(delta + nt * 8);
      float row_sums[2] = {};
#pragma unroll
      for (int mt = 0; mt < kKeyTiles; ++mt) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int32_t i = i0 + nt * 8 + e % 2, j = first_key + mt * 16 + e / 2 * 8;
          const bool seen = visible(i, j) && i < work.visibility.seqlen_q;
          float x = s[mt][nt][e] * p.softmax_scale;
          float slope_of_cap = 1.f;
          if (softcap > 0.f) {
            const float t = hyperbolic_tangent<T>(x * per_softcap);
            x = softcap * t;
            slope_of_cap = 1.f - t * t;
          }
          if (bias_is_left && seen) x += bias_at(head, i, j);
          x -= slope * fabsf(static_cast<float>(i + off - j));
          const float probability = seen ? exponential(fmaf(x, kLog2E, -(e % 2 == 0 ? row_lse.x : row_lse.y))) : 0.f;
          const float z = kept >> ((mt * kScoreTiles + nt) * 4 + e) & 1 ? kept_scale : 0.f;
          // A row that its bias hides has probabilities of 0 and a delta that may be anything.
          const float inner = dp[mt][nt][e] * z - (e % 2 == 0 ? row_delta.x : row_delta.y);
          const float ds = probability > 0.f ? probability * inner : 0.f;
          s[mt][nt][e] = probability * z;
          dp[mt][nt][e] = ds * slope_of_cap;
          switch (g.mode) {
            case BiasGradientMode::kNone:
              break;
            case BiasGradientMode::kStore:
              if (i < p.seqlen_q && j < p.seqlen_k) {
                store_scalar(g.data, gradient_plane + i * g.row_stride + j * g.col_stride, g.dtype, ds);
              }
              break;
            case BiasGradientMode::kAdd:
              if (seen)
                atomicAdd(static_cast<float*>(g.data) + gradient_plane + i * g.row_stride + j * g.col_stride, ds);
              break;
            case BiasGradientMode::kKeySums:
              key_sums[mt][e / 2] += ds;
              break;
            case BiasGradientMode::kRowSums:
              row_sums[e % 2] += ds;
              break;
          }
        }
      }
      if (g.mode == BiasGradientMode::kRowSums) {
        const int32_t slot = work.key_block * Traits::kWarpsN + Traits::warp_n();
#pragma unroll
        for (int c = 0; c < 2; ++c) {
#pragma unroll
          for (int distance = 4; distance < 32; distance *= 2) {
            row_sums[c] += __shfl_xor_sync(0xffffffffu, row_sums[c], distance);
          }
          const int32_t i = i0 + nt * 8 + c;
          if (Traits::lane() < 4 && i < work.visibility.seqlen_q) {
            static_cast<float*>(g.data)[gradient_plane + slot * g.slot_stride + i * g.row_stride] = row_sums[c];
          }
        }
      }
    }
  }
};

}  // namespace flashbwd::sm80

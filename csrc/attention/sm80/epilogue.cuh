// Stores dk and dv from registers, and zeroes the bias gradient of query tiles that the query loop skipped.
#pragma once

#include "mainloop.cuh"
#include "store_tile.cuh"

namespace flashbwd::sm80 {

template <typename Traits>
struct Epilogue {
  using T = typename Traits::T;
  using Gradient = typename Mainloop<Traits>::Gradient;

  static __device__ __forceinline__ void store(const KernelParams& params, const WorkTile& work, const Gradient& dk,
                                               const Gradient& dv) {
    const int32_t first_column = Traits::warp_s() * Traits::kGradientTiles * 8;
    store_one<16>(params.dv, work, first_column, dv);
    store_one<16>(params.dk, work, first_column, dk);
  }

  // Zeroes the stored bias gradient of this key block in query tiles that do not see it.
  static __device__ void zero_bias_gradient(const KernelParams& params, const WorkTile& work) {
    const BiasGradient& g = params.bias_gradient;
    const AttentionBackwardParams& p = params.attention;
    if (g.mode != BiasGradientMode::kStore) return;
    const int32_t first_key = work.key_block * Traits::kBlockN;
    const int32_t keys = min(Traits::kBlockN, p.seqlen_k - first_key);
    const int32_t seen_from = work.query_range.empty() ? p.seqlen_q : work.query_range.begin * Traits::kBlockM;
    const int32_t seen_to = work.query_range.empty() ? p.seqlen_q : work.query_range.end * Traits::kBlockM;
    constexpr int kVectors = Traits::kBlockN / 8;
    for (int32_t head = 0; head < work.heads_per_kv; ++head) {
      if constexpr (Traits::kVariant == Variant::kSharedBias) {
        if (BiasOrder(params, work, work.head_kv * work.heads_per_kv + head).number > 0) continue;
      }
      const int64_t plane = work.batch * g.batch_stride + (work.head_kv * work.heads_per_kv + head) * g.head_stride;
      for (int32_t i = threadIdx.x; i < p.seqlen_q * kVectors; i += Traits::kThreads) {
        const int32_t row = i / kVectors, column = i % kVectors * 8, columns = min(keys - column, 8);
        if (row >= seen_from && row < seen_to) {
          // skip to this thread's last row that is seen
          i += (seen_to - row - 1) / (Traits::kThreads / kVectors) * Traits::kThreads;
          continue;
        }
        const int64_t offset = plane + row * g.row_stride + (first_key + column) * g.col_stride;
        if (params.bias_gradient_vectors && columns == 8) {
          *reinterpret_cast<uint4*>(static_cast<T*>(g.data) + offset) = make_uint4(0, 0, 0, 0);
        } else if (g.dtype == DType::kFloat32) {
          for (int32_t e = 0; e < columns; ++e) static_cast<float*>(g.data)[offset + e * g.col_stride] = 0.f;
        } else {
          for (int32_t e = 0; e < columns; ++e) static_cast<uint16_t*>(g.data)[offset + e * g.col_stride] = 0;
        }
      }
    }
  }

  // Stores this warp's columns: pairs of 8-column tiles, kPairColumns apart, from first_column on.
  template <int kPairColumns>
  static __device__ __forceinline__ void store_one(const GradientTarget& target, const WorkTile& work,
                                                   int32_t first_column, const Gradient& gradient) {
    if (work.split_cta >= 0) {
      store_partial<kPairColumns>(target, work, first_column, gradient);
      return;
    }
    const HeadsView& view = target.view;
    const int32_t first =
        work.key_block * Traits::kBlockN + Traits::warp_n() * Traits::kKeyTiles * 16 + Traits::lane() / 4;
    const int64_t offset = work.batch * view.batch_stride + work.head_kv * view.head_stride +
                           (work.sequence.begin_k + first) * view.seq_stride;
    StoreTile<T, Traits::kKeyTiles, Traits::kGradientTiles, kPairColumns>::store(
        target, offset, work.sequence.rows_k - first, first_column, gradient);
  }

 private:
  // Stores to the partial sums of a split work tile, which have all kBlockN rows and an even number of columns.
  template <int kPairColumns>
  static __device__ __forceinline__ void store_partial(const GradientTarget& target, const WorkTile& work,
                                                       int32_t first_column, const Gradient& gradient) {
    const int64_t row_stride = target.partial_row_stride;
    const int32_t row = Traits::warp_n() * Traits::kKeyTiles * 16 + Traits::lane() / 4;
    const int32_t column = first_column + Traits::lane() % 4 * 2;
    float* destination = target.partial_sums + (int64_t{work.split_cta} * Traits::kBlockN + row) * row_stride + column;
#pragma unroll
    for (int octet = 0; octet < 2 * Traits::kKeyTiles; ++octet, destination += 8 * row_stride) {
#pragma unroll
      for (int nt = 0; nt < Traits::kGradientTiles; ++nt) {
        const int32_t tile_column = nt / 2 * kPairColumns + nt % 2 * 8;
        const float* const pair = gradient[octet / 2][nt] + octet % 2 * 2;
        if (column + tile_column < target.columns) {
          *reinterpret_cast<float2*>(destination + tile_column) = make_float2(pair[0], pair[1]);
        }
      }
    }
  }
};

}  // namespace flashbwd::sm80

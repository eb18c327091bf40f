// dk and dv from accumulators to global memory; zeros in the gradient of the bias where no tile was walked.
#pragma once

#include "mainloop.cuh"

namespace flashbwd::sm80 {

template <typename Traits>
struct Epilogue {
  using T = typename Traits::T;
  using Gradient = typename Mainloop<Traits>::Gradient;

  static __device__ __forceinline__ void store(const KernelParams& params, const Work& work, const Gradient& dk,
                                               const Gradient& dv) {
    const int32_t first_column = Traits::warp_s() * Traits::kGradientTiles * 8;
    store_one<16>(params.dv, work, first_column, dv);
    store_one<16>(params.dk, work, first_column, dk);
  }

  // Query tiles that this key block does not see.
  static __device__ void zero_bias_gradient(const KernelParams& params, const Work& work) {
    const BiasGradient& g = params.bias_gradient;
    const AttentionBackwardParams& p = params.attention;
    if (g.mode != BiasGradientMode::kStore) return;
    const int32_t first_key = work.key_block * Traits::kBlockN;
    const int32_t keys = min(Traits::kBlockN, p.seqlen_k - first_key);
    const int32_t seen_from = work.query_range.empty() ? p.seqlen_q : work.query_range.begin * Traits::kBlockM;
    const int32_t seen_to = work.query_range.empty() ? p.seqlen_q : work.query_range.end * Traits::kBlockM;
    constexpr int kPieces = Traits::kBlockN / 8;
    for (int32_t head = 0; head < work.heads_per_kv; ++head) {
      const int64_t plane = work.batch * g.batch_stride + (work.head_kv * work.heads_per_kv + head) * g.head_stride;
      for (int32_t i = threadIdx.x; i < p.seqlen_q * kPieces; i += Traits::kThreads) {
        const int32_t row = i / kPieces, column = i % kPieces * 8, columns = min(keys - column, 8);
        if (row >= seen_from && row < seen_to) {
          i += (seen_to - row - 1) / (Traits::kThreads / kPieces) * Traits::kThreads;  // to the last such row
          continue;
        }
        const int64_t place = plane + row * g.row_stride + (first_key + column) * g.col_stride;
        if (params.bias_gradient_pieces && columns == 8) {
          *reinterpret_cast<uint4*>(static_cast<T*>(g.data) + place) = make_uint4(0, 0, 0, 0);
        } else if (g.dtype == DType::kFloat32) {
          for (int32_t e = 0; e < columns; ++e) static_cast<float*>(g.data)[place + e * g.col_stride] = 0.f;
        } else {
          for (int32_t e = 0; e < columns; ++e) static_cast<uint16_t*>(g.data)[place + e * g.col_stride] = 0;
        }
      }
    }
  }

  // The columns of this warp: pairs of tiles, kPairColumns apart, from first_column on.
  template <int kPairColumns>
  static __device__ __forceinline__ void store_one(const GradientTarget& target, const Work& work, int32_t first_column,
                                                   const Gradient& gradient) {
    if (work.part >= 0) {
      store_part<kPairColumns>(target, work, first_column, gradient);
      return;
    }
    if constexpr (sizeof(T) == 2) {
      if (target.pieces) {
        store_pieces<kPairColumns>(target, work, first_column, gradient);
        return;
      }
    }
    const HeadsView& view = target.view;
    const int32_t first =
        work.key_block * Traits::kBlockN + Traits::warp_n() * Traits::kKeyTiles * 16 + Traits::lane() / 4;
    const int32_t rows = work.sequence.rows_k - first;
    const int32_t column = first_column + Traits::lane() % 4 * 2;
    const int64_t offset = work.batch * view.batch_stride + work.head_kv * view.head_stride +
                           (work.sequence.begin_k + first) * view.seq_stride + column;
#pragma unroll
    for (int mt = 0; mt < Traits::kKeyTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t row = mt * 16 + half * 8;
        if (row >= rows) continue;
#pragma unroll
        for (int nt = 0; nt < Traits::kGradientTiles; ++nt) {
          const int32_t tile_column = nt / 2 * kPairColumns + nt % 2 * 8;
          const int64_t place = offset + row * view.seq_stride + tile_column;
          const float low = gradient[mt][nt][half * 2], high = gradient[mt][nt][half * 2 + 1];
          const int32_t left = target.columns - column - tile_column;
          if (target.dtype == DType::kFloat32) {
            store_pair(static_cast<float*>(view.data) + place, low, high, left, target.aligned);
          } else if constexpr (sizeof(T) == 2) {
            store_pair(static_cast<T*>(view.data) + place, low, high, left, target.aligned);
          }
        }
      }
    }
  }

 private:
  // A part has places for all rows of a key block, and columns in pairs.
  template <int kPairColumns>
  static __device__ __forceinline__ void store_part(const GradientTarget& target, const Work& work,
                                                    int32_t first_column, const Gradient& gradient) {
    const int64_t row_stride = target.part_row_stride;
    const int32_t row = Traits::warp_n() * Traits::kKeyTiles * 16 + Traits::lane() / 4;
    const int32_t column = first_column + Traits::lane() % 4 * 2;
    float* place = target.parts + (int64_t{work.part} * Traits::kBlockN + row) * row_stride + column;
#pragma unroll
    for (int octet = 0; octet < 2 * Traits::kKeyTiles; ++octet, place += 8 * row_stride) {
#pragma unroll
      for (int nt = 0; nt < Traits::kGradientTiles; ++nt) {
        const int32_t tile_column = nt / 2 * kPairColumns + nt % 2 * 8;
        const float* const pair = gradient[octet / 2][nt] + octet % 2 * 2;
        if (column + tile_column < target.columns) {
          *reinterpret_cast<float2*>(place + tile_column) = make_float2(pair[0], pair[1]);
        }
      }
    }
  }

  // Eight columns of a row at once: of four tiles (of the last two, where they make no four), a lane collects the one
  // that is as far in as the lane in its four.
  template <int kPairColumns>
  static __device__ __forceinline__ void store_pieces(const GradientTarget& target, const Work& work,
                                                      int32_t first_column, const Gradient& gradient) {
    const HeadsView& view = target.view;
    const int32_t lane = Traits::lane();
    const int32_t first = work.key_block * Traits::kBlockN + Traits::warp_n() * Traits::kKeyTiles * 16 + lane / 4;
    const int32_t rows = work.sequence.rows_k - first;
    const int32_t column = first_column + lane % 4 / 2 * kPairColumns + lane % 2 * 8;
    T* place = static_cast<T*>(view.data) + work.batch * view.batch_stride + work.head_kv * view.head_stride +
               (work.sequence.begin_k + first) * view.seq_stride + column;
#pragma unroll
    for (int row = 0; row < Traits::kKeyTiles * 16; row += 8, place += 8 * view.seq_stride) {
#pragma unroll
      for (int nt = 0; nt < Traits::kGradientTiles; nt += 4) {
        uint32_t words[4] = {};
#pragma unroll
        for (int i = 0; i < 4 && nt + i < Traits::kGradientTiles; ++i) {
          const float* const pair = gradient[row / 16][nt + i] + row % 16 / 4;
          words[i] = pack2<T>(pair[0], pair[1]);
        }
        transpose_in_fours(words);
        const int32_t tile_column = nt / 2 * kPairColumns;
        const bool exists = nt + 4 <= Traits::kGradientTiles || lane % 4 < 2;
        if (row < rows && exists && column + tile_column < target.columns) {
          *reinterpret_cast<uint4*>(place + tile_column) = make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
    }
  }

  // Word i of lane j goes to word j of lane i, of every four lanes.
  static __device__ __forceinline__ void transpose_in_fours(uint32_t (&words)[4]) {
    const bool upper = Traits::lane() & 2, odd = Traits::lane() & 1;
    const uint32_t a = __shfl_xor_sync(0xffffffffu, upper ? words[0] : words[2], 2);
    const uint32_t b = __shfl_xor_sync(0xffffffffu, upper ? words[1] : words[3], 2);
    (upper ? words[0] : words[2]) = a;
    (upper ? words[1] : words[3]) = b;
    const uint32_t c = __shfl_xor_sync(0xffffffffu, odd ? words[0] : words[1], 1);
    const uint32_t d = __shfl_xor_sync(0xffffffffu, odd ? words[2] : words[3], 1);
    (odd ? words[0] : words[1]) = c;
    (odd ? words[2] : words[3]) = d;
  }

  template <typename Out>
  static __device__ __forceinline__ void store_pair(Out* place, float low, float high, int32_t left, bool aligned) {
    if (aligned && left >= 2) {
      if constexpr (sizeof(Out) == 4) {
        *reinterpret_cast<float2*>(place) = make_float2(low, high);
      } else {
        *reinterpret_cast<uint32_t*>(place) = pack2<Out>(low, high);
      }
      return;
    }
    if (left >= 1) place[0] = from_float<Out>(low);
    if (left >= 2) place[1] = from_float<Out>(high);
  }
};

}  // namespace flashbwd::sm80

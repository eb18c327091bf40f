// The bias of a tile of scores, and its gradient.
//
// If 16-byte vectors can load a 16-bit bias, each warp copies its 8 x 8 blocks to the shared memory in which it stores
// the same blocks of p^T or ds^T later, so a warp waits for no other warp. Any other bias is loaded element by element,
// or once per key if all queries have the same bias (padding masks).
#pragma once

#include <cstdint>

#include "../../common/mma.cuh"
#include "dq.cuh"
#include "scores.cuh"

namespace flashbwd::sm80 {

template <typename Traits>
struct Bias {
  using T = typename Traits::T;
  using Position = ScorePosition<Traits>;
  using Accumulator = typename Position::Accumulator;
  using Swizzle = VectorSwizzle<Traits::kScoreRowBytes>;
  static constexpr bool kVectors = sizeof(T) == 2;
  static constexpr int kOctets = 2 * Traits::kKeyTiles;  // 8-key blocks of a warp
  // Whether the registers allow keeping values derived from the lane.
  static constexpr bool kKeepsLane = Traits::kVariant != Variant::kSharedBias;

  // In the p and ds tiles: the row of the warp's first key, and the 16-byte vector of its first 8 queries.
  static __device__ __forceinline__ int32_t warp_row() { return Traits::warp_n() * Traits::kKeyTiles * 16; }
  static __device__ __forceinline__ int32_t warp_vector() { return Traits::warp_s() * Traits::kScoreTiles; }

  // Rereads the lane, so that the compiler keeps no value derived from it in a register across iterations.
  static __device__ __forceinline__ int32_t lane_again() {
    int32_t lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
  }

  // Starts the copies of the bias to the warp's keys and queries of the tile, which no thread reads any more.
  static __device__ __forceinline__ void load(const KernelParams& params, const WorkTile& work, int32_t head,
                                              int32_t query_block, uint8_t* tile) {
    if constexpr (kVectors) {
      if (Traits::kVariant == Variant::kAllFeatures && !params.bias_vectors) return;
      const BiasView& b = params.attention.bias;
      const int32_t octet = Traits::lane() % kOctets, row = Traits::lane() / kOctets;
      const int32_t i0 = query_block * Traits::kBlockM + warp_vector() * 8 + row;
      const int32_t j = work.key_block * Traits::kBlockN + warp_row() + octet * 8;
      const int32_t bytes = max(min(work.visibility.seqlen_k - j, 8), 0) * 2;
      const T* const plane = static_cast<const T*>(b.data) + work.batch * b.batch_stride + head * b.head_stride;
      const T* source = plane + (bytes > 0 ? i0 * b.row_stride + j : 0);
      constexpr int kRows = 32 / kOctets;  // rows that a warp copies at once
#pragma unroll
      for (int first = 0; first < Traits::kScoreTiles * 8; first += kRows) {
        const bool exists = bytes > 0 && i0 + first < work.visibility.seqlen_q;
        const int32_t query = first + row;
        const uint32_t to = Swizzle::offset(warp_row() + octet * 8 + query % 8, warp_vector() + query / 8);
        copy_async_16(smem_address(tile) + to, exists ? source : plane, exists ? bytes : 0);
        source += kRows * b.row_stride;
      }
    }
  }

  // s = scale * s + log2(e) * bias. kPending: groups of copies started after load().
  template <int kPending>
  static __device__ __forceinline__ void add(const KernelParams& params, const WorkTile& work, int32_t head,
                                             int32_t query_block, const uint8_t* tile, float scale, Accumulator& s) {
    if constexpr (kVectors) {
      if (params.bias_vectors) {
        for_each_bias_pair<kPending>(tile, s, [&](float* x, int, float2 bias) {
          x[0] = fmaf(x[0], scale, bias.x * kLog2E);
          x[1] = fmaf(x[1], scale, bias.y * kLog2E);
        });
        return;
      }
    }
    if (params.attention.bias.dtype == DType::kFloat32) {
      add_elements<float>(params, work, head, query_block, scale, s);
    } else {
      add_elements<T>(params, work, head, query_block, scale, s);
    }
  }

  // Stores the gradient from the ds tile after the warp has written its scores: 16 bytes of a row per thread.
  static __device__ __forceinline__ void store_vectors(const KernelParams& params, const WorkTile& work, int32_t head,
                                                       int32_t query_block, const uint8_t* ds) {
    if constexpr (kVectors) {
      const BiasGradient& g = params.bias_gradient;
      const AttentionBackwardParams& p = params.attention;
      // 8-key blocks per row of queries: 4, or 2, so that four lanes store one row or two
      constexpr int kGroups = kOctets;
      constexpr int kSpan = 4 / kGroups;  // 8-query tiles stored at once
      const int32_t lane = kKeepsLane ? Traits::lane() : lane_again();
      // Lane 4 q + a gets keys 8 (a % kGroups) to 8 (a % kGroups) + 7 of query q: two of them from each 8 x 8 matrix.
      const int32_t from_a = lane % 8 / 2, key = from_a % kGroups * 8 + lane / 8 * 2 + lane % 2;
      const int32_t to_a = lane % 4;
      const int32_t i0 = query_block * Traits::kBlockM + (warp_vector() + to_a / kGroups) * 8 + lane / 4;
      const int32_t j = work.key_block * Traits::kBlockN + warp_row() + to_a % kGroups * 8;
      const int32_t columns = p.seqlen_k - j;
      T* destination =
          static_cast<T*>(g.data) + work.batch * g.batch_stride + head * g.head_stride + i0 * g.row_stride + j;
      const auto load_vector = [&](uint32_t (&r)[4], int nt) {
        load_matrix_x4_trans(
            r, smem_address(ds) + Swizzle::offset(warp_row() + key, warp_vector() + nt + from_a / kGroups));
      };
      __syncwarp();  // all lanes have written their scores to ds
      if ((query_block + 1) * Traits::kBlockM <= p.seqlen_q && (work.key_block + 1) * Traits::kBlockN <= p.seqlen_k) {
        alignas(16) uint32_t vectors[Traits::kScoreTiles / kSpan][4];  // all loads before the first store
#pragma unroll
        for (int i = 0; i < Traits::kScoreTiles / kSpan; ++i) load_vector(vectors[i], i * kSpan);
#pragma unroll
        for (int i = 0; i < Traits::kScoreTiles / kSpan; ++i, destination += kSpan * 8 * g.row_stride) {
          // The compiler would split an assignment of a uint4 into four stores here.
          __stcg(reinterpret_cast<uint4*>(destination),
                 make_uint4(vectors[i][0], vectors[i][1], vectors[i][2], vectors[i][3]));
        }
        return;
      }
#pragma unroll
      for (int nt = 0; nt < Traits::kScoreTiles; nt += kSpan) {
        alignas(16) uint32_t r[4];
        load_vector(r, nt);
        if (i0 + nt * 8 < p.seqlen_q) {
          if (columns >= 8) {
            __stcg(reinterpret_cast<uint4*>(destination), make_uint4(r[0], r[1], r[2], r[3]));
          } else {
#pragma unroll
            for (int e = 0; e < 8; ++e) {
              if (e < columns) destination[e] = reinterpret_cast<const T*>(r)[e];
            }
          }
        }
        destination += kSpan * 8 * g.row_stride;
      }
    }
  }

  // Calls write(pointer, ds) for each element of the tile within the first `rows` rows and `columns` columns of the
  // gradient.
  template <typename Out, typename Write>
  static __device__ __forceinline__ void write_elements(const KernelParams& params, const WorkTile& work, int32_t head,
                                                        int32_t query_block, int32_t rows, int32_t columns,
                                                        const Accumulator& ds, const Write& write) {
    const BiasGradient& g = params.bias_gradient;
    const int32_t i0 = Position::first_query(query_block), j0 = Position::first_key(work);
    const int64_t col_stride =
        Traits::kVariant == Variant::kAllFeatures ? g.col_stride : 1;  // see variant_of in launch.cu
    Out* row = static_cast<Out*>(g.data) + work.batch * g.batch_stride + head * g.head_stride + i0 * g.row_stride +
               j0 * col_stride;
    rows -= i0;
    columns -= j0;
    for_each_query([&](int nt, int c) {
      Out* element = row;
      for_each_octet([&](int mt, int h) {
        if (nt * 8 + c < rows && mt * 16 + h * 8 < columns) write(element, ds[mt][nt][h * 2 + c]);
        element += 8 * col_stride;
      });
      row += (c == 0 ? 1 : 7) * g.row_stride;
    });
  }

  // Sums ds over this warp's queries and adds the sums to the warp's slot, to which no other warp adds.
  static __device__ __forceinline__ void add_key_sums(const KernelParams& params, const WorkTile& work, int32_t head,
                                                      const Accumulator& ds) {
    const BiasGradient& g = params.bias_gradient;
    const int32_t j0 = Position::first_key(work);
    float* const row = static_cast<float*>(g.data) + work.batch * g.batch_stride + head * g.head_stride +
                       Traits::warp_s() * g.slot_stride + j0 * g.col_stride;
    for_each_octet([&](int mt, int h) {
      float sum = 0.f;
#pragma unroll
      for (int nt = 0; nt < Traits::kScoreTiles; ++nt) sum += ds[mt][nt][h * 2] + ds[mt][nt][h * 2 + 1];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const int32_t j = mt * 16 + h * 8;
      if (Traits::lane() % 4 == 0 && j0 + j < params.attention.seqlen_k) add_to_global(row + j * g.col_stride, sum);
    });
  }

  // Sums ds over this warp's keys and stores the sums to the slot of these keys.
  static __device__ __forceinline__ void store_row_sums(const KernelParams& params, const WorkTile& work, int32_t head,
                                                        int32_t query_block, const Accumulator& ds) {
    const BiasGradient& g = params.bias_gradient;
    const int32_t i0 = Position::first_query(query_block);
    const int32_t slot = work.key_block * Traits::kWarpsN + Traits::warp_n();
    float* const plane = static_cast<float*>(g.data) + work.batch * g.batch_stride + head * g.head_stride +
                         slot * g.slot_stride + i0 * g.row_stride;
#pragma unroll
    for (int nt = 0; nt < Traits::kScoreTiles; ++nt) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float sum = 0.f;
#pragma unroll
        for (int mt = 0; mt < Traits::kKeyTiles; ++mt) sum += ds[mt][nt][c] + ds[mt][nt][c + 2];
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        if (Traits::lane() < 4 && i0 + nt * 8 + c < work.visibility.seqlen_q) plane[(nt * 8 + c) * g.row_stride] = sum;
      }
    }
  }

  // s becomes the probabilities 2^(scale * s + log2(e) * bias - lse), for a bias of 16-byte vectors. `lse`: (kBlockM,)
  // times log2(e).
  template <int kPending>
  static __device__ __forceinline__ void probabilities(const uint8_t* tile, const float* lse, float scale,
                                                       Accumulator& s) {
    for_each_bias_pair<kPending>(tile, s, [&](float* x, int nt, float2 bias) {
      const float2 row_lse = *reinterpret_cast<const float2*>(lse + Position::first_column() + nt * 8);
      x[0] = exponential<T>(fmaf(x[0], scale, fmaf(bias.x, kLog2E, -row_lse.x)));
      x[1] = exponential<T>(fmaf(x[1], scale, fmaf(bias.y, kLog2E, -row_lse.y)));
    });
  }

  // Adds ds to the fp32 gradient of a bias that is broadcast over batch or heads, with col_stride 1.
  static __device__ __forceinline__ void add_gradient(const KernelParams& params, const WorkTile& work, int32_t head,
                                                      int32_t query_block, const Accumulator& ds) {
    const BiasGradient& g = params.bias_gradient;
    const int32_t i0 = Position::first_query(query_block), j0 = Position::first_key(work);
    if ((query_block + 1) * Traits::kBlockM > work.visibility.seqlen_q ||
        (work.key_block + 1) * Traits::kBlockN > work.visibility.seqlen_k) {
      write_elements<float>(params, work, head, query_block, work.visibility.seqlen_q, work.visibility.seqlen_k, ds,
                            [](float* element, float x) { add_to_global(element, x); });
      return;
    }
    float* row =
        static_cast<float*>(g.data) + work.batch * g.batch_stride + head * g.head_stride + i0 * g.row_stride + j0;
    for_each_query([&](int nt, int c) {
      for_each_octet([&](int mt, int h) { add_to_global(row + mt * 16 + h * 8, ds[mt][nt][h * 2 + c]); });
      row += (c == 0 ? 1 : 7) * g.row_stride;
    });
  }

 private:
  // Calls f(two elements of s, their 8-query tile, their bias).
  template <int kPending, typename F>
  static __device__ __forceinline__ void for_each_bias_pair(const uint8_t* tile, Accumulator& s, const F& f) {
    copy_async_wait<kPending>();
    __syncwarp();  // the copies of all lanes are complete
    const LaneAddress<Traits::kScoreRowBytes, Traits::kScoreTiles> blocks(
        smem_address(tile), warp_row() + Traits::lane() % 16, Traits::lane() / 16, warp_vector());
#pragma unroll
    for (int nt = 0; nt < Traits::kScoreTiles; nt += 2) {
#pragma unroll
      for (int mt = 0; mt < Traits::kKeyTiles; ++mt) {
        uint32_t r[4];  // tile nt: the two 8-key blocks of mt; then tile nt + 1
        load_matrix_x4_trans(r, blocks.at(mt * 16, nt));
#pragma unroll
        for (int k = 0; k < 4; ++k) f(s[mt][nt + k / 2] + k % 2 * 2, nt + k / 2, unpack2<T>(r[k]));
      }
    }
    __syncwarp();  // all lanes have read the warp's block of the tile, so it may be overwritten
  }

  template <typename Element>
  static __device__ __forceinline__ void add_elements(const KernelParams& params, const WorkTile& work, int32_t head,
                                                      int32_t query_block, float scale, Accumulator& s) {
    const BiasView& b = params.attention.bias;
    const int32_t i0 = Position::first_query(query_block), j0 = Position::first_key(work);
    const int32_t rows = work.visibility.seqlen_q - i0, columns = work.visibility.seqlen_k - j0;
    const Element* row = static_cast<const Element*>(b.data) + work.batch * b.batch_stride + head * b.head_stride +
                         i0 * b.row_stride + j0 * b.col_stride;
    if (sizeof(T) == 2 && b.row_stride == 0) {  // for fp32 this would spill registers
      float of_keys[kOctets];
      for_each_octet([&](int mt, int h) {
        const int key = mt * 16 + h * 8;
        of_keys[mt * 2 + h] = key < columns ? to_float(row[key * b.col_stride]) * kLog2E : 0.f;
      });
      Position::for_each(
          [&](int mt, int nt, int e) { s[mt][nt][e] = fmaf(s[mt][nt][e], scale, of_keys[mt * 2 + e / 2]); });
      return;
    }
    for_each_query([&](int nt, int c) {
      const Element* element = row;
      if (nt * 8 + c < rows) {  // rows past the end have probabilities of 0 whatever their scores are
        for_each_octet([&](int mt, int h) {
          float bias = 0.f;
          if (mt * 16 + h * 8 < columns) bias = to_float(*element);
          float& x = s[mt][nt][h * 2 + c];
          x = fmaf(x, scale, bias * kLog2E);
          element += 8 * b.col_stride;
        });
      }
      row += (c == 0 ? 1 : 7) * b.row_stride;
    });
  }

  // The loops below advance pointers from element to element. Computing all 64-bit offsets would need too many
  // registers.
  template <typename F>
  static __device__ __forceinline__ void for_each_query(const F& f) {
#pragma unroll
    for (int nt = 0; nt < Traits::kScoreTiles; ++nt) {
#pragma unroll
      for (int c = 0; c < 2; ++c) f(nt, c);
    }
  }
  template <typename F>
  static __device__ __forceinline__ void for_each_octet(const F& f) {
#pragma unroll
    for (int mt = 0; mt < Traits::kKeyTiles; ++mt) {
#pragma unroll
      for (int h = 0; h < 2; ++h) f(mt, h);
    }
  }
};

}  // namespace flashbwd::sm80

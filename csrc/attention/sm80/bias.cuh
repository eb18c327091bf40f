// The bias of a tile of scores, and its gradient.
//
// A 16-bit bias whose rows can be copied 16 bytes at a time goes through the part of the p or ds tile that the same
// warp writes later, so a warp waits for no other warp: each 8 x 8 block of the bias uses the place of that block of
// p^T or ds^T. Any other bias is loaded element by element, or once per key if all queries have the same bias (padding
// masks).
#pragma once

#include <cstdint>

#include "../../common/mma.cuh"
#include "dq.cuh"
#include "scores.cuh"

namespace flashbwd::sm80 {

template <typename Traits>
struct Bias {
  using T = typename Traits::T;
  using Place = ScorePosition<Traits>;
  using Accumulator = typename Place::Accumulator;
  using Swizzle = PieceSwizzle<Traits::kScoreRowBytes>;
  static constexpr bool kPieces = sizeof(T) == 2;
  static constexpr int kOctets = 2 * Traits::kKeyTiles;  // 8-key blocks of a warp
  // Whether the registers allow keeping values derived from the lane.
  static constexpr bool kKeepsLane = Traits::kExtras != Extras::kSharedBias;

  // In the p and ds tiles: the warp's first key, and the 16-byte piece of its first 8 queries.
  static __device__ __forceinline__ int32_t warp_row() { return Traits::warp_n() * Traits::kKeyTiles * 16; }
  static __device__ __forceinline__ int32_t warp_piece() { return Traits::warp_s() * Traits::kScoreTiles; }

  // Rereads the lane, so that the compiler keeps no value derived from it in a register across steps.
  static __device__ __forceinline__ int32_t lane_again() {
    int32_t lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
  }

  // Starts the copies of the bias to the warp's part of the tile, which no thread reads any more.
  static __device__ __forceinline__ void load(const KernelParams& params, const WorkTile& work, int32_t head,
                                              int32_t query_block, uint8_t* tile) {
    if constexpr (kPieces) {
      if (Traits::kExtras == Extras::kAll && !params.bias_pieces) return;
      const BiasView& b = params.attention.bias;
      const int32_t octet = Traits::lane() % kOctets, row = Traits::lane() / kOctets;
      const int32_t i0 = query_block * Traits::kBlockM + warp_piece() * 8 + row;
      const int32_t j = work.key_block * Traits::kBlockN + warp_row() + octet * 8;
      const int32_t bytes = max(min(work.visibility.seqlen_k - j, 8), 0) * 2;
      const T* const plane = static_cast<const T*>(b.data) + work.batch * b.batch_stride + head * b.head_stride;
      const T* source = plane + (bytes > 0 ? i0 * b.row_stride + j : 0);
      constexpr int kRows = 32 / kOctets;  // rows that a warp copies at once
#pragma unroll
      for (int first = 0; first < Traits::kScoreTiles * 8; first += kRows) {
        const bool exists = bytes > 0 && i0 + first < work.visibility.seqlen_q;
        const int32_t query = first + row;
        const uint32_t to = Swizzle::offset(warp_row() + octet * 8 + query % 8, warp_piece() + query / 8);
        copy_async_16(smem_address(tile) + to, exists ? source : plane, exists ? bytes : 0);
        source += kRows * b.row_stride;
      }
    }
  }

  // s = scale * s + log2(e) * bias. kPending: groups of copies started after load().
  template <int kPending>
  static __device__ __forceinline__ void add(const KernelParams& params, const WorkTile& work, int32_t head,
                                             int32_t query_block, const uint8_t* tile, float scale, Accumulator& s) {
    if constexpr (kPieces) {
      if (params.bias_pieces) {
        for_each_piece<kPending>(tile, s, [&](float* x, int, float2 bias) {
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

  // Stores the gradient from the ds tile after the warp has written its part: 16 bytes of a row per thread.
  static __device__ __forceinline__ void store_pieces(const KernelParams& params, const WorkTile& work, int32_t head,
                                                      int32_t query_block, const uint8_t* ds) {
    if constexpr (kPieces) {
      const BiasGradient& g = params.bias_gradient;
      const AttentionBackwardParams& p = params.attention;
      // 8-key blocks per row of queries: 4, or 2, so that four lanes store one row or two
      constexpr int kGroups = kOctets;
      constexpr int kSpan = 4 / kGroups;  // 8-query tiles stored at once
      const int32_t lane = kKeepsLane ? Traits::lane() : lane_again();
      // Lane 4 q + a gets keys 8 (a % kGroups) to 8 (a % kGroups) + 7 of query q: two of them from each 8 x 8 matrix.
      const int32_t from_a = lane % 8 / 2, key = from_a % kGroups * 8 + lane / 8 * 2 + lane % 2;
      const int32_t to_a = lane % 4;
      const int32_t i0 = query_block * Traits::kBlockM + (warp_piece() + to_a / kGroups) * 8 + lane / 4;
      const int32_t j = work.key_block * Traits::kBlockN + warp_row() + to_a % kGroups * 8;
      const int32_t columns = p.seqlen_k - j;
      T* place = static_cast<T*>(g.data) + work.batch * g.batch_stride + head * g.head_stride + i0 * g.row_stride + j;
      const auto load_piece = [&](uint32_t (&r)[4], int nt) {
        load_matrix_x4_trans(
            r, smem_address(ds) + Swizzle::offset(warp_row() + key, warp_piece() + nt + from_a / kGroups));
      };
      __syncwarp();  // the warp has written its part of ds
      if ((query_block + 1) * Traits::kBlockM <= p.seqlen_q && (work.key_block + 1) * Traits::kBlockN <= p.seqlen_k) {
        alignas(16) uint32_t pieces[Traits::kScoreTiles / kSpan][4];  // all loads before the first store
#pragma unroll
        for (int i = 0; i < Traits::kScoreTiles / kSpan; ++i) load_piece(pieces[i], i * kSpan);
#pragma unroll
        for (int i = 0; i < Traits::kScoreTiles / kSpan; ++i, place += kSpan * 8 * g.row_stride) {
          // The compiler would split an assignment of a uint4 into four stores here.
          __stcg(reinterpret_cast<uint4*>(place), make_uint4(pieces[i][0], pieces[i][1], pieces[i][2], pieces[i][3]));
        }
        return;
      }
#pragma unroll
      for (int nt = 0; nt < Traits::kScoreTiles; nt += kSpan) {
        alignas(16) uint32_t r[4];
        load_piece(r, nt);
        if (i0 + nt * 8 < p.seqlen_q) {
          if (columns >= 8) {
            __stcg(reinterpret_cast<uint4*>(place), make_uint4(r[0], r[1], r[2], r[3]));
          } else {
#pragma unroll
            for (int e = 0; e < 8; ++e) {
              if (e < columns) place[e] = reinterpret_cast<const T*>(r)[e];
            }
          }
        }
        place += kSpan * 8 * g.row_stride;
      }
    }
  }

  // Calls write(place, ds) for each element of the tile within the first `rows` rows and `columns` columns of the
  // gradient.
  template <typename Out, typename Write>
  static __device__ __forceinline__ void write_elements(const KernelParams& params, const WorkTile& work, int32_t head,
                                                        int32_t query_block, int32_t rows, int32_t columns,
                                                        const Accumulator& ds, const Write& write) {
    const BiasGradient& g = params.bias_gradient;
    const int32_t i0 = Place::first_query(query_block), j0 = Place::first_key(work);
    const int64_t col_stride = Traits::kExtras == Extras::kAll ? g.col_stride : 1;  // see extras_of in launch.cu
    Out* row = static_cast<Out*>(g.data) + work.batch * g.batch_stride + head * g.head_stride + i0 * g.row_stride +
               j0 * col_stride;
    rows -= i0;
    columns -= j0;
    for_each_query([&](int nt, int c) {
      Out* place = row;
      for_each_octet([&](int mt, int h) {
        if (nt * 8 + c < rows && mt * 16 + h * 8 < columns) write(place, ds[mt][nt][h * 2 + c]);
        place += 8 * col_stride;
      });
      row += (c == 0 ? 1 : 7) * g.row_stride;
    });
  }

  // Sums ds over this warp's queries, and adds to its slot, to which no other warp adds.
  static __device__ __forceinline__ void add_key_sums(const KernelParams& params, const WorkTile& work, int32_t head,
                                                      const Accumulator& ds) {
    const BiasGradient& g = params.bias_gradient;
    const int32_t j0 = Place::first_key(work);
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

  // Sums ds over this warp's keys, and stores to the slot of these keys.
  static __device__ __forceinline__ void store_row_sums(const KernelParams& params, const WorkTile& work, int32_t head,
                                                        int32_t query_block, const Accumulator& ds) {
    const BiasGradient& g = params.bias_gradient;
    const int32_t i0 = Place::first_query(query_block);
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

  // s becomes the probabilities 2^(scale * s + log2(e) * bias - lse), for a bias in 16-byte pieces. `lse`: (kBlockM,)
  // times log2(e).
  template <int kPending>
  static __device__ __forceinline__ void probabilities(const uint8_t* tile, const float* lse, float scale,
                                                       Accumulator& s) {
    for_each_piece<kPending>(tile, s, [&](float* x, int nt, float2 bias) {
      const float2 row_lse = *reinterpret_cast<const float2*>(lse + Place::first_column() + nt * 8);
      x[0] = exponential<T>(fmaf(x[0], scale, fmaf(bias.x, kLog2E, -row_lse.x)));
      x[1] = exponential<T>(fmaf(x[1], scale, fmaf(bias.y, kLog2E, -row_lse.y)));
    });
  }

  // Adds ds to the fp32 gradient of a bias that is broadcast over batch or heads, with col_stride 1.
  static __device__ __forceinline__ void add_gradient(const KernelParams& params, const WorkTile& work, int32_t head,
                                                      int32_t query_block, const Accumulator& ds) {
    const BiasGradient& g = params.bias_gradient;
    const int32_t i0 = Place::first_query(query_block), j0 = Place::first_key(work);
    if ((query_block + 1) * Traits::kBlockM > work.visibility.seqlen_q ||
        (work.key_block + 1) * Traits::kBlockN > work.visibility.seqlen_k) {
      write_elements<float>(params, work, head, query_block, work.visibility.seqlen_q, work.visibility.seqlen_k, ds,
                            [](float* place, float x) { add_to_global(place, x); });
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
  static __device__ __forceinline__ void for_each_piece(const uint8_t* tile, Accumulator& s, const F& f) {
    copy_async_wait<kPending>();
    __syncwarp();  // the copies of all lanes are complete
    const LaneAddress<Traits::kScoreRowBytes, Traits::kScoreTiles> blocks(
        smem_address(tile), warp_row() + Traits::lane() % 16, Traits::lane() / 16, warp_piece());
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
    __syncwarp();  // all lanes have read their part of the tile, so it may be overwritten
  }

  template <typename Element>
  static __device__ __forceinline__ void add_elements(const KernelParams& params, const WorkTile& work, int32_t head,
                                                      int32_t query_block, float scale, Accumulator& s) {
    const BiasView& b = params.attention.bias;
    const int32_t i0 = Place::first_query(query_block), j0 = Place::first_key(work);
    const int32_t rows = work.visibility.seqlen_q - i0, columns = work.visibility.seqlen_k - j0;
    const Element* row = static_cast<const Element*>(b.data) + work.batch * b.batch_stride + head * b.head_stride +
                         i0 * b.row_stride + j0 * b.col_stride;
    if (sizeof(T) == 2 && b.row_stride == 0) {  // for fp32 this would spill registers
      float of_keys[kOctets];
      for_each_octet([&](int mt, int h) {
        const int key = mt * 16 + h * 8;
        of_keys[mt * 2 + h] = key < columns ? to_float(row[key * b.col_stride]) * kLog2E : 0.f;
      });
      Place::for_each(
          [&](int mt, int nt, int e) { s[mt][nt][e] = fmaf(s[mt][nt][e], scale, of_keys[mt * 2 + e / 2]); });
      return;
    }
    for_each_query([&](int nt, int c) {
      const Element* place = row;
      if (nt * 8 + c < rows) {  // rows past the end have probabilities of 0 whatever their scores are
        for_each_octet([&](int mt, int h) {
          float bias = 0.f;
          if (mt * 16 + h * 8 < columns) bias = to_float(*place);
          float& x = s[mt][nt][h * 2 + c];
          x = fmaf(x, scale, bias * kLog2E);
          place += 8 * b.col_stride;
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

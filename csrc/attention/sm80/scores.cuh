// The element-wise code between the matrix products: probabilities and ds, in registers.
//
// A warp has s^T and dp^T of its keys and queries as MMA accumulators. Element e of tile (mt, nt) is
//   key first_key + 16 mt + 8 (e / 2), query first_query + 8 nt + e % 2.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../../common/numeric.cuh"
#include "../pre_post/lse_delta.h"
#include "scheduler.cuh"

namespace flashbwd::sm80 {

// 2^x. For 16-bit T the approximate instruction is accurate enough.
template <typename T>
__device__ __forceinline__ float exponential(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return exp2f(x);
  } else {
    return exp2_approximate(x);
  }
}

// The positions of a thread's elements.
template <typename Traits>
struct ScorePosition {
  static constexpr int kKeyTiles = Traits::kKeyTiles;
  static constexpr int kScoreTiles = Traits::kScoreTiles;
  using Accumulator = float[kKeyTiles][kScoreTiles][4];

  static __device__ __forceinline__ int32_t first_key(const WorkTile& work) {
    return work.key_block * Traits::kBlockN + Traits::warp_n() * kKeyTiles * 16 + Traits::lane() / 4;
  }
  // The thread's first query, relative to the tile.
  static __device__ __forceinline__ int32_t first_column() {
    return Traits::warp_s() * kScoreTiles * 8 + Traits::lane() % 4 * 2;
  }
  static __device__ __forceinline__ int32_t first_query(int32_t query_block) {
    return query_block * Traits::kBlockM + first_column();
  }
  // The query and the key of element e of tile (mt, nt), relative to the thread's first ones.
  static constexpr __device__ __forceinline__ int32_t query(int nt, int e) { return nt * 8 + e % 2; }
  static constexpr __device__ __forceinline__ int32_t key(int mt, int e) { return mt * 16 + e / 2 * 8; }

  // Calls f(mt, nt, e) for every element, with queries in the outer loop.
  template <typename F>
  static __device__ __forceinline__ void for_each(const F& f) {
#pragma unroll
    for (int nt = 0; nt < kScoreTiles; ++nt) {
#pragma unroll
      for (int mt = 0; mt < kKeyTiles; ++mt) {
#pragma unroll
        for (int e = 0; e < 4; ++e) f(mt, nt, e);
      }
    }
  }

  // Sets s = hidden for pairs that are not visible.
  static __device__ __forceinline__ void mask(const WorkTile& work, int32_t query_block, float hidden, Accumulator& s) {
    const Visibility& v = work.visibility;
    const int32_t difference = first_key(work) - first_query(query_block);
    const int32_t keys = v.seqlen_k - first_key(work), queries = v.seqlen_q - first_query(query_block);
    const int32_t lo = v.lo - difference, hi = v.hi - difference;
    for_each([&](int mt, int nt, int e) {
      const int32_t d = key(mt, e) - query(nt, e);
      const bool visible = (d >= lo) & (d < hi) & (key(mt, e) < keys) & (query(nt, e) < queries);
      s[mt][nt][e] = visible ? s[mt][nt][e] : hidden;
    });
  }
};

// Computes scores without bias, ALiBi, softcap and dropout.
template <typename Traits>
struct Scores {
  using Position = ScorePosition<Traits>;
  using Accumulator = typename Position::Accumulator;

  const KernelParams& params;
  const WorkTile& work;

  __device__ __forceinline__ Scores(const KernelParams& params, const WorkTile& work) : params(params), work(work) {}

  // On entry s and dp are the products; on return s has the probabilities for dv, and dp their gradients for dk and dq.
  // `lse`: (kBlockM,) times log2(e), `delta`: (kBlockM,), of the tile's queries.
  __device__ __forceinline__ void apply(int32_t query_block, const float* lse, const float* delta, Accumulator& s,
                                        Accumulator& dp) const {
    const float scale = params.attention.softmax_scale * kLog2E;
    for_each_query_tile(lse, [&](int nt, float2 row_lse) {
#pragma unroll
      for (int mt = 0; mt < Traits::kKeyTiles; ++mt) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          s[mt][nt][e] =
              exponential<typename Traits::T>(fmaf(s[mt][nt][e], scale, -(e % 2 == 0 ? row_lse.x : row_lse.y)));
        }
      }
    });
    if (!work.interior.contains(query_block)) Position::mask(work, query_block, 0.f, s);
    for_each_query_tile(delta, [&](int nt, float2 row_delta) {
#pragma unroll
      for (int mt = 0; mt < Traits::kKeyTiles; ++mt) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          dp[mt][nt][e] = s[mt][nt][e] * (dp[mt][nt][e] - (e % 2 == 0 ? row_delta.x : row_delta.y));
        }
      }
    });
  }

 private:
  // Calls f(nt, the values of this thread's two queries).
  template <typename F>
  static __device__ __forceinline__ void for_each_query_tile(const float* rows, const F& f) {
#pragma unroll
    for (int nt = 0; nt < Traits::kScoreTiles; ++nt) {
      f(nt, *reinterpret_cast<const float2*>(rows + Position::first_column() + nt * 8));
    }
  }
};

}  // namespace flashbwd::sm80

// From S to P and from dP to dS, in the registers of a warpgroup (../../../common/wgmma_fragments.cuh). The rows of the
// tile are the kept rows of the work tile, its columns the rows of a streamed block.
#pragma once

#include "../tile_mask.cuh"
#include "traits.cuh"

namespace flashbwd::sm90::head_dim_512 {

// lse or delta of value v of a thread, if the columns of the tile are queries; in shared memory from this thread's
// first column on.
struct ValuesOfColumns {
  const float* first;
  __device__ __forceinline__ float operator[](int v) const { return first[v / 4 * 8 + v % 2]; }
};

// The same if its rows are queries; of this thread's two rows.
struct ValuesOfRows {
  float values[2];
  __device__ __forceinline__ float operator[](int v) const { return values[v % 4 / 2]; }
};

// A thread's place in a tile.
struct ThreadPlace {
  int32_t thread = threadIdx.x % kWarpgroupThreads;
  int32_t warp = thread / 32;
  int32_t lane = thread % 32;
  int32_t row = warp * 16 + lane / 4;  // and row + 8
  int32_t column = lane % 4 * 2;       // and column + 1, of each 8 columns
};

// S becomes P. With a softcap, `derivative` becomes its derivative.
template <typename Values>
__device__ __forceinline__ void probabilities(const AttentionBackwardParams& p, const WorkTile& work, int32_t block,
                                              const ThreadPlace& place, const Values& lse_log2, float (&s)[kScores],
                                              float (&derivative)[kScores]) {
  if (p.softcap > 0.f) {
    const float factor = 2.f * kLog2E * p.softmax_scale / p.softcap, softcap_log2 = p.softcap * kLog2E;
#pragma unroll
    for (int v = 0; v < kScores; ++v) {
      const float r = tanh_complement(s[v] * factor);
      derivative[v] = r * (2.f - r);
      s[v] = exp2_approximate(softcap_log2 * (1.f - r) - lse_log2[v]);
    }
  } else {
    const float scale_log2 = p.softmax_scale * kLog2E;
#pragma unroll
    for (int v = 0; v < kScores; ++v) s[v] = exp2_approximate(s[v] * scale_log2 - lse_log2[v]);
  }
  if (!work.interior.contains(block)) {
    mask<kRows>(s, TileVisibility(work.visibility, work.first_row, block * kRows), place.row, place.column);
  }
}

// P becomes dS = P (dP - delta), times the derivative of a softcap. dP is in this thread's slots of `exchange`.
template <typename Exchange, typename Values>
__device__ __forceinline__ void score_gradients(const AttentionBackwardParams& p, const Exchange& exchange,
                                                int32_t thread, const Values& delta, float (&s)[kScores],
                                                const float (&derivative)[kScores]) {
  if (p.softcap > 0.f) {
#pragma unroll
    for (int v = 0; v < kScores; ++v) s[v] *= derivative[v];
  }
#pragma unroll
  for (int j = 0; j < kScores / 4; ++j) {
    const float4 dp = load_in_order(exchange[j][thread]);
    s[4 * j] *= dp.x - delta[4 * j];
    s[4 * j + 1] *= dp.y - delta[4 * j + 1];
    s[4 * j + 2] *= dp.z - delta[4 * j + 2];
    s[4 * j + 3] *= dp.w - delta[4 * j + 3];
  }
}

}  // namespace flashbwd::sm90::head_dim_512

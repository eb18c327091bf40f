// Constants of a tile and a dtype: the arrangement of the warps, and the layout of shared memory.
#pragma once

#include <cstdint>

#include "../../common/mma_fp32.cuh"
#include "config.h"
#include "kernel_params.h"

namespace flashbwd::short_sequences {

template <typename T_, int kTileIndex, bool kFeatures_>
struct Traits {
  using T = T_;
  using M = Mma<T>;
  static constexpr Tile kTile = kTiles[kTileIndex];
  static constexpr bool kFeatures = kFeatures_;
  static constexpr int kHeadDim = kTile.head_dim;
  static constexpr int kRows = kTile.rows;
  static constexpr int kThreads = kTile.threads();
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kCtasPerSm = kTile.ctas_per_sm(kFeatures);
  static constexpr int kRowBytes = kHeadDim * 2;
  static constexpr int kScoreRowBytes = kKeyBlock * 2;
  static constexpr int kColumnTiles = kHeadDim / 8;  // of dq, dk, dv: 8 columns each
  // A warp computes the scores of its 16 queries in steps of 32 keys, which keeps registers free for dq.
  static constexpr int kStepKeys = 32;
  static constexpr int kBlockSteps = kKeyBlock / kStepKeys;
  static constexpr int kSteps = kRows / kStepKeys;
  static constexpr int kScoreTiles = kStepKeys / 8;
  using Scores = float[kScoreTiles][4];        // element e of tile t: see scores.cuh
  using Gradient = float[1][kColumnTiles][4];  // 16 rows of dq, dk or dv

  static __device__ __forceinline__ int32_t lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int32_t warp() { return threadIdx.x / 32; }

  struct SharedStorage {
    alignas(128) uint8_t q[kRows * kRowBytes];
    alignas(128) uint8_t k[kRows * kRowBytes];
    alignas(128) uint8_t v[kRows * kRowBytes];
    alignas(128) uint8_t dout[kRows * kRowBytes];
    alignas(128) uint8_t p[kRows * kScoreRowBytes];   // (queries, keys of a block)
    alignas(128) uint8_t ds[kRows * kScoreRowBytes];  // the same
  };
  static_assert(sizeof(SharedStorage) == kTile.shared_bytes(), "the tile table counts differently");

  // An optional region of shared memory: vectors of four elements, of which vector i of all threads is contiguous.
  template <typename Vector = float4>
  static __device__ __forceinline__ Vector* region(SharedStorage& smem, int32_t offset) {
    return reinterpret_cast<Vector*>(reinterpret_cast<uint8_t*>(&smem) + offset) + threadIdx.x;
  }
};

// Returns x. The compiler takes the result for a new value, so it does not keep what it derives from x in registers
// from pair to pair.
__device__ __forceinline__ int32_t renew(int32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

}  // namespace flashbwd::short_sequences

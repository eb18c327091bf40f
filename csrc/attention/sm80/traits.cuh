// Constants of a tile and a dtype: the arrangement of the warps, and the layout of shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../../common/mma_fp32.cuh"
#include "config.h"
#include "dq.cuh"
#include "listed_loop.cuh"
#include "loads.cuh"
#include "split_barrier.cuh"

namespace flashbwd::sm80 {

template <typename T_, int kTileIndex, Variant kVariant_, typename M_ = Mma<T_>>
struct Traits {
  using T = T_;
  using M = M_;
  static constexpr Tile kTile = kTiles[kTileIndex];
  static constexpr Variant kVariant = kVariant_;
  static constexpr bool kWholeHeads = kVariant == Variant::kWholeHeads;
  static constexpr bool kBiasAlone = kVariant == Variant::kBias || kVariant == Variant::kSharedBias;
  static constexpr bool kFeatures = kBiasAlone || kVariant == Variant::kAllFeatures;
  static constexpr bool kGenerated = kVariant == Variant::kGenerated;
  static constexpr bool kListed = kGenerated || kVariant == Variant::kBlockMask;  // a block mask lists the query loop
  // The products for s and dp. With lists, TF32 products are those of PyTorch's FlexAttention forward, so that
  // probabilities belong to its LSE, and dp to delta.
  using OneAsTriton = MmaFp32<Fp32Products::kOneAsTriton>;
  static constexpr bool kAsTriton = kListed && std::is_same_v<M, MmaFp32<Fp32Products::kOne>>;
  using ScoreMma = std::conditional_t<kAsTriton, OneAsTriton, typename M::Scores>;
  using DpMma = std::conditional_t<kAsTriton, OneAsTriton, M>;
  using WorkTile = std::conditional_t<kListed, ListedWorkTile, sm80::WorkTile>;
  using QueryIteration = std::conditional_t<kListed, ListedIteration, sm80::QueryIteration>;
  static constexpr int kHeadDim = kTile.head_dim;
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kWarpsN = kTile.warps_n;
  static constexpr int kWarpsS = kTile.warps_s;
  static constexpr int kWarpsQ = kTile.warps_q;
  static constexpr int kWarpsD = kTile.warps() / kWarpsQ;
  static constexpr int kThreads = kTile.threads();
  static constexpr int kStages = kTile.stages;
  static constexpr int kRowBytes = kTile.row_bytes();
  static constexpr int kScoreRowBytes = kBlockM * static_cast<int>(sizeof(T));
  static constexpr bool kLoadsAhead = loads_ahead(kTile, kVariant);
  static constexpr bool kRefills = refills(kTile, kVariant);
  static constexpr bool kFirstStores = kVariant == Variant::kFirstStores;
  static constexpr bool kKeepsRows = keeps_rows(kTile, kVariant);
  static constexpr bool kExchange = kWarpsS > 1;  // several warps share keys and exchange p and ds

  static constexpr int kKeyTiles = kBlockN / kWarpsN / 16;       // of s, dk, dv: 16 keys each
  static constexpr int kScoreTiles = kBlockM / kWarpsS / 8;      // of s: 8 queries each
  static constexpr int kGradientTiles = kHeadDim / kWarpsS / 8;  // of dk, dv: 8 columns each
  static constexpr int kQueryTiles = kBlockM / kWarpsQ / 16;     // of dq: 16 queries each
  // dq is computed in passes over its columns if dk, dv and dq of all columns would need too many registers.
  static constexpr int kDqPasses = (2 * kBlockN + kBlockM) * kHeadDim / kThreads >= 192 ? 2 : 1;
  static constexpr int kColumnTiles = kHeadDim / kWarpsD / 8 / kDqPasses;  // of dq: 8 columns each
  static_assert(kTile.element_bytes == sizeof(T), "the tile is for elements of another size");
  static_assert(kKeyTiles * kWarpsN * 16 == kBlockN && kQueryTiles * kWarpsQ * 16 == kBlockM, "whole rows of tiles");
  static_assert(kScoreTiles % 2 == 0 && kScoreTiles * kWarpsS * 8 == kBlockM, "queries in pairs of 8");
  static_assert(kGradientTiles % 2 == 0 && kGradientTiles * kWarpsS * 8 == kHeadDim, "columns in pairs of 8");
  static_assert(kColumnTiles % 2 == 0 && kColumnTiles * kWarpsD * 8 * kDqPasses == kHeadDim, "columns in pairs of 8");
  static_assert(kRowPadding % kBlockM == 0, "lse and delta of a tile are contiguous and aligned");

  static __device__ __forceinline__ int32_t lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int32_t warp() { return threadIdx.x / 32; }
  static __device__ __forceinline__ int32_t warp_n() { return warp() / kWarpsS; }
  static __device__ __forceinline__ int32_t warp_s() { return warp() % kWarpsS; }
  static __device__ __forceinline__ int32_t warp_q() { return warp() / kWarpsD; }
  static __device__ __forceinline__ int32_t warp_d() { return warp() % kWarpsD; }

  struct SharedStorage {
    alignas(1024) uint8_t k[kBlockN * kRowBytes];
    alignas(1024) uint8_t v[kBlockN * kRowBytes];
    alignas(1024) uint8_t q[kStages][kBlockM * kRowBytes];
    alignas(1024) uint8_t dout[kStages][kBlockM * kRowBytes];
    alignas(1024) uint8_t ds[kBlockN * kScoreRowBytes];                  // (kBlockN, kBlockM)
    alignas(1024) uint8_t p[kExchange ? kBlockN * kScoreRowBytes : 16];  // (kBlockN, kBlockM)
    alignas(16) float lse[kStages][kBlockM];
    alignas(16) float delta[kStages][kBlockM];
    // State that threads read from shared memory when they need it, to keep registers free for accumulators.
    WorkTile work, next_work;
    QueryIteration iterations[2];  // the current iteration and the next one, alternating
    Source<T> source;
    FirstAdd first_add;  // of the current iteration
    // Two stages: the stage of the work tile's first iteration: the number of earlier iterations of the CTA, modulo 2.
    int32_t first_stage;
    // kLoadsAhead: the byte offset of this work tile's keys and values from `k` and `v`, 0 or sizeof(SharedStorage).
    int32_t keys_offset;
    // Two stages. Each barrier completes once per iteration, when all threads have arrived. A thread arrives when its
    // copies have landed, when it has stored ds (and p), and when it is done with the tiles and ds of the iteration.
    SplitBarrier tiles_loaded, scores_stored, done;
    uint32_t key_bits[kVariant == Variant::kAllFeatures ? kThreads / 32 : 1];  // see KeyBits
  };
};

}  // namespace flashbwd::sm80

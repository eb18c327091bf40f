// Tiles of the sm_90a attention kernel, by head dimension. Host code includes this too: no CUDA here.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "../../common/warpgroup.h"

namespace flashbwd::sm90 {

// One producer warpgroup and two consumer warpgroups. 65536 registers for 3 warpgroups are 512 per lane, allocated in
// steps of 8: 24 + 2 * 240 = 504.
constexpr int kConsumerWarpgroups = 2;
constexpr int kConsumerThreads = kConsumerWarpgroups * kWarpgroupThreads;
constexpr int kThreads = kConsumerThreads + kWarpgroupThreads;
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;

// Large head dimensions: a producer warpgroup, and one each for P and dv, for dS and dk, and for dq. Their registers
// sum to 512 per lane.
constexpr int kLargeThreads = 4 * kWarpgroupThreads;
struct RoleRegisters {
  int producer, probabilities, score_gradients, dq;
};

// What a kernel computes besides masks.
enum class Feature : int8_t {
  kNone,
  kAny,               // any combination: softcap, bias with its gradient, ALiBi, dropout (large_head_dim/)
  kFlashDropout,      // the mask of FlashAttention-2 (score_mod/dropout.cuh)
  kEfficientDropout,  // the mask of PyTorch's memory-efficient forward
  kBias,              // with or without its gradient (score_mod/bias.cuh)
  kScores,            // softcap, ALiBi, a bias per key without its gradient, in any combination (score_mod/scores.cuh)
  kShiftsAndFlashDropout,
  kShiftsAndEfficientDropout,  // ALiBi, a bias per key, and dropout
  kBiasAndEfficientDropout,
  kBlockMask,           // the query loops of a block mask
  kBlockMaskAndScores,  // the same with softcap and ALiBi
};

struct Tile {
  int32_t head_dim;    // of q and k in shared memory; TMA pads smaller ones with zeros
  int32_t head_dim_v;  // of v and dout
  int32_t block_m;     // queries
  int32_t block_n;     // keys of a work tile
  int32_t stages;      // of q
  int32_t dout_stages;
  int32_t ctas = 1;         // per cluster; each has an equal part of the keys
  bool by_queries = false;  // a consumer warpgroup has half of the queries and all keys, not half of the keys
  Feature feature = Feature::kNone;
};

// The tile table, with accumulator registers per thread (dk and dv + s and dp + dq) and shared memory beside each row.
//
// 128 keys per CTA (Traits): each of two consumer warpgroups has 64 keys. Their dk and dv take (head_dim + head_dim_v)
// / 2 registers, or twice that with by_queries; s and dp take block_m; dq takes 32 at most. What is left of 240 decides
// block_m. Shared memory (227 KB) decides the number of stages; tiles are whole swizzle atoms of columns (row_bytes),
// so head dimension 80 takes as much as 128.
//
// 64 keys per CTA (large_head_dim::Traits): dv lies in one warpgroup and dk in another, half of their head dimension in
// registers, s or dp in 32. Shared memory decides the number of stages.
constexpr Tile kTiles[] = {
    {32, 32, 128, 128, 4, 3, 1, true},  // 64 + 128 + 16 registers, 173 KB
    {32, 32, 128, 128, 2, 2},           // 32 + 128 + 16 registers, 179 KB; short query loops
    {64, 64, 128, 128, 2, 2},           // 64 + 128 + 32 registers, 227 KB
    {80, 80, 64, 128, 2, 2},            // 80 + 64 + 32 registers, 226 KB
    {96, 96, 64, 128, 2, 2},            // 96 + 64 + 32 registers, 194 KB
    {128, 128, 64, 128, 2, 2},          // 128 + 64 + 32 registers, 226 KB; a third stage of q would take 16 more
    {192, 128, 64, 128, 2, 2, 2},       // 96 + 32 registers, 218 KB
    {192, 192, 64, 128, 2, 2, 2},       // 96 + 32 registers, 226 KB
    {256, 256, 64, 128, 2, 1, 2},       // 128 + 32 registers, 226 KB
    // 64 + 128 + 32 registers, 227 KB; 128 + 64 + 32 registers, 226 KB
    {64, 64, 128, 128, 2, 2, 1, false, Feature::kFlashDropout},
    {128, 128, 64, 128, 2, 2, 1, false, Feature::kFlashDropout},
    {64, 64, 128, 128, 2, 2, 1, false, Feature::kEfficientDropout},
    {128, 128, 64, 128, 2, 2, 1, false, Feature::kEfficientDropout},
    {64, 64, 128, 128, 2, 2, 1, false, Feature::kBias},
    {128, 128, 64, 128, 2, 2, 1, false, Feature::kBias},
    {64, 64, 128, 128, 2, 2, 1, false, Feature::kScores},
    {128, 128, 64, 128, 2, 2, 1, false, Feature::kScores},
    {64, 64, 128, 128, 2, 2, 1, false, Feature::kShiftsAndFlashDropout},
    {128, 128, 64, 128, 2, 2, 1, false, Feature::kShiftsAndFlashDropout},
    {64, 64, 128, 128, 2, 2, 1, false, Feature::kShiftsAndEfficientDropout},
    {128, 128, 64, 128, 2, 2, 1, false, Feature::kShiftsAndEfficientDropout},
    {64, 64, 128, 128, 2, 2, 1, false, Feature::kBiasAndEfficientDropout},
    {128, 128, 64, 128, 2, 2, 1, false, Feature::kBiasAndEfficientDropout},
    {64, 64, 128, 128, 2, 2, 1, false, Feature::kBlockMask},
    {128, 128, 64, 128, 2, 2, 1, false, Feature::kBlockMask},
    {64, 64, 128, 128, 2, 2, 1, false, Feature::kBlockMaskAndScores},
    {128, 128, 64, 128, 2, 2, 1, false, Feature::kBlockMaskAndScores},
    {128, 128, 64, 64, 2, 2, 1, false, Feature::kAny},   // 64 + 32 registers, 186 KB; smaller head dimensions too
    {192, 192, 64, 128, 2, 2, 2, false, Feature::kAny},  // 96 + 32 registers, 226 KB
    {256, 256, 64, 128, 2, 1, 2, false, Feature::kAny},  // 128 + 32 registers, 226 KB
};
constexpr int kNumTiles = sizeof(kTiles) / sizeof(kTiles[0]);

constexpr bool shifts_scores(Feature feature) {
  return feature == Feature::kShiftsAndFlashDropout || feature == Feature::kShiftsAndEfficientDropout;
}
constexpr bool drops_as_flash(Feature feature) {
  return feature == Feature::kFlashDropout || feature == Feature::kShiftsAndFlashDropout;
}
constexpr bool drops_as_efficient(Feature feature) {
  return feature == Feature::kEfficientDropout || feature == Feature::kShiftsAndEfficientDropout ||
         feature == Feature::kBiasAndEfficientDropout;
}
constexpr bool has_block_mask(Feature feature) {
  return feature == Feature::kBlockMask || feature == Feature::kBlockMaskAndScores;
}
constexpr bool changes_scores(Feature feature) {
  return feature == Feature::kScores || feature == Feature::kBlockMaskAndScores;
}
constexpr bool copies_bias(Feature feature) {
  return feature == Feature::kBias || feature == Feature::kBiasAndEfficientDropout;
}
// True if the kernel in large_head_dim/ computes the tile.
constexpr bool is_large(const Tile& tile) { return tile.block_n == 64 * tile.ctas; }

constexpr RoleRegisters role_registers(const Tile& tile) {
  if (tile.head_dim > 192) return {32, 208, 208, 64};
  const bool plain = tile.feature == Feature::kNone;
  return tile.head_dim_v == 192 && plain ? RoleRegisters{40, 200, 200, 72} : RoleRegisters{40, 192, 208, 72};
}

// True if the tile has a kernel whose last add to a dq tile can write dq (dq_semaphores.cuh).
constexpr bool last_writes_dq(const Tile& tile) {
  return !is_large(tile) && tile.feature == Feature::kNone && (tile.head_dim == 64 || tile.head_dim == 128);
}

// True if the kernel with heads outermost always counts adds.
constexpr bool by_heads_in_turn_only(const Tile& tile) { return last_writes_dq(tile) && tile.head_dim == 128; }

// Parts of a dq tile that are added independently of one another.
constexpr int semaphores_of_tile(const Tile& tile) { return is_large(tile) ? tile.ctas : 1; }

// Bytes of a row of a swizzle atom of q, k, v or dout in shared memory: 64 columns, or 32 if these need no padding. At
// head dimension 80, which both pad, 64 columns were 1 % faster.
constexpr int row_bytes(const Tile& tile) { return tile.head_dim % 64 == 32 ? 64 : 128; }

// Whether key blocks of full masks start at query blocks of their own. With one stage of dout and one buffer of dq, key
// blocks that add to the same dq tile at the same time delay one another: 2 to 5 % at head dimension 256.
constexpr bool staggers_start(const Tile& tile) {
  return is_large(tile) && tile.dout_stages == 1 && tile.feature == Feature::kNone;
}

// Threads that add dq of a work tile. Two per CTA take every other iteration each: one waits until its adds are
// complete while the other adds.
constexpr int kDqAdders = 2;
constexpr int dq_adders(const Tile& tile) { return is_large(tile) ? tile.ctas * kDqAdders : kConsumerWarpgroups; }

// Iterations before its last one at which a CTA takes its next work tile: finding it takes as long as two iterations.
constexpr int early_steps(const Tile& tile) { return !is_large(tile) && tile.head_dim >= 64 ? 2 : 0; }

// Development builds may hold only some head dimensions.
constexpr bool is_built(int32_t head_dim) {
#ifdef FLASHBWD_BUILT_HEAD_DIMS
  for (const int32_t built : {FLASHBWD_BUILT_HEAD_DIMS}) {
    if (built == head_dim) return true;
  }
  return false;
#else
  return head_dim > 0;
#endif
}

// True if the kernel with features writes the gradient of a bias. Above head dimension 192, dk leaves no registers for
// it.
constexpr bool has_bias_gradient(const Tile& tile) { return tile.head_dim <= 192; }

// The first row of kTiles that holds these head dimensions and computes this feature, or -1. `by_queries`: a tile with
// Tile::by_queries will do. A feature without a tile of its own goes to a tile for any feature.
constexpr int find_tile(int64_t head_dim, int64_t head_dim_v, Feature feature, bool by_queries) {
  for (int i = 0; i < kNumTiles; ++i) {
    const Tile& tile = kTiles[i];
    const bool holds = head_dim <= tile.head_dim && head_dim_v <= tile.head_dim_v && (by_queries || !tile.by_queries);
    if (is_built(tile.head_dim) && holds && tile.feature == feature) return i;
  }
  const bool has_other = feature != Feature::kNone && feature != Feature::kAny && !has_block_mask(feature);
  return has_other ? find_tile(head_dim, head_dim_v, Feature::kAny, by_queries) : -1;
}

}  // namespace flashbwd::sm90

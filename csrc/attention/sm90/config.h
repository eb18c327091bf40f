// Tiles of the sm_90a attention kernel, by head dimension. Host code includes this too: no CUDA here.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace flashbwd::sm90 {

constexpr int kWarpgroupThreads = 128;

// Two consumer warpgroups behind one producer warpgroup. 65536 registers over 3 warpgroups, in steps of 8:
// 24 + 2 * 240 = 504 <= 512 a lane.
constexpr int kConsumerWarpgroups = 2;
constexpr int kThreads = (kConsumerWarpgroups + 1) * kWarpgroupThreads;
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;

// Wide tiles: a producer warpgroup and one each for P and dv, for dS and dk, for dq. Registers sum to 512 a lane.
constexpr int kWideThreads = 4 * kWarpgroupThreads;
struct WideRegisters {
  int producer, probabilities, score_gradients, dq;
};

// What a kernel takes besides masks. Those of wide tiles with features take everything, in any combination.
enum class Feature : int8_t {
  kNone,
  kFlashDropout,      // FlashAttention-2's (dropout.cuh)
  kEfficientDropout,  // that of PyTorch's memory-efficient forward
  kBias,              // with its gradient or without (bias.cuh)
  kScores,            // softcap, ALiBi, a bias of keys without its gradient, in any combination (scores.cuh)
  kShiftsAndFlashDropout,
  kShiftsAndEfficientDropout,  // the latter two, and dropout
  kBiasAndEfficientDropout,
};

struct Tile {
  int32_t head_dim;    // of q and k in shared memory: smaller ones are padded by the copy engine
  int32_t head_dim_v;  // of v and dout, likewise
  int32_t block_m;     // queries
  int32_t block_n;     // keys of a job
  int32_t stages;      // of q
  int32_t dout_stages;
  int32_t ctas = 1;         // of a cluster, which have the keys in equal parts
  bool by_queries = false;  // a consumer warpgroup has half of the queries and all keys, instead of half of the keys
  Feature feature = Feature::kNone;
};

// Of 128 keys a CTA (Traits): each of two consumer warpgroups has 64. dk and dv of those take (head_dim + head_dim_v) /
// 2 registers a thread, or twice that where they have half of the queries each instead, s and dp block_m, dq 32 at
// most. What is left of 240 decides block_m; shared memory (227 KB) then takes two stages of everything. It holds whole
// chunks of columns (row_bytes), so 80 takes as much as 128. Of 64 keys a CTA (wide::Traits): dv in one warpgroup and
// dk in another, half of their head dimension in registers a thread, s or dp 32. Shared memory decides the stages.
constexpr Tile kTiles[] = {
    {32, 32, 128, 128, 4, 3, 1, true},  // 64 + 128 + 16 registers, 173 KB
    {32, 32, 128, 128, 2, 2},           // 32 + 128 + 16 registers, 179 KB; short jobs
    {64, 64, 128, 128, 2, 2},           // 64 + 128 + 32 registers, 227 KB
    {80, 80, 64, 128, 2, 2},            // 80 + 64 + 32 registers, 226 KB
    {96, 96, 64, 128, 2, 2},            // 96 + 64 + 32 registers, 194 KB
    {128, 128, 64, 128, 2, 2},          // 128 + 64 + 32 registers, 226 KB
    {128, 128, 64, 64, 2, 2},           // 64 + 32 registers, 186 KB; for features, smaller head dimensions too
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
constexpr bool copies_bias(Feature feature) {
  return feature == Feature::kBias || feature == Feature::kBiasAndEfficientDropout;
}
constexpr bool is_wide(const Tile& tile) { return tile.block_n == 64 * tile.ctas; }

constexpr WideRegisters wide_registers(const Tile& tile, bool features) {
  if (tile.head_dim > 192) return {32, 208, 208, 64};
  return tile.head_dim_v == 192 && !features ? WideRegisters{40, 200, 200, 72} : WideRegisters{40, 192, 208, 72};
}

// Whether who is last in turn to add to a dq tile may write dq instead, so that nothing is left to convert (turns.cuh).
constexpr bool last_writes_dq(const Tile& tile) {
  return !is_wide(tile) && tile.feature == Feature::kNone && (tile.head_dim == 64 || tile.head_dim == 128);
}

// Whether those kernels that go by heads (Step) are of that kind alone. At 64 wide windows gain nothing by it.
constexpr bool by_heads_in_turn_only(const Tile& tile) { return last_writes_dq(tile) && tile.head_dim == 128; }

// Of a dq tile: parts that are added, and in deterministic mode take turns, on their own.
constexpr int semaphores_of_tile(const Tile& tile) { return is_wide(tile) ? tile.ctas : 1; }

// Bytes of a row of a chunk of q, k, v or dout in shared memory: of 64 columns, or of 32 where these leave no zeros. At
// head dimension 80, which either pads, 64 were 1 % faster.
constexpr int row_bytes(const Tile& tile) { return tile.head_dim % 64 == 32 ? 64 : 128; }

// Whether key blocks of full masks start at query blocks of their own. With one stage of dout and one buffer of dq, key
// blocks that add to the same dq tile at the same time delay one another: 2 to 5 % at head dimension 256.
constexpr bool staggers_start(const Tile& tile) { return is_wide(tile) && tile.dout_stages == 1; }

// Threads that add dq of a key block. In wide tiles two of a CTA, in turn a step each: one waits until its adds are
// complete while the other adds.
constexpr int kWideAdders = 2;
constexpr int dq_adders(const Tile& tile) { return is_wide(tile) ? tile.ctas * kWideAdders : kConsumerWarpgroups; }

// Iterations before its last one at which a CTA takes its next work tile: finding it takes as long as two iterations.
constexpr int early_steps(const Tile& tile) { return !is_wide(tile) && tile.head_dim >= 64 ? 2 : 0; }

// Development builds may hold some of the head dimensions only.
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

// Kernels that a tile has: without features, with them.
constexpr bool has_kernel(const Tile& tile, bool features) {
  if (tile.feature != Feature::kNone) return features;
  return features ? is_wide(tile) && tile.head_dim == tile.head_dim_v : !is_wide(tile) || tile.head_dim > 128;
}

// Whether its kernel with features writes the gradient of a bias too: above that, dk leaves it no registers.
constexpr bool has_bias_gradient(const Tile& tile) { return tile.head_dim <= 192; }

// Row of kTiles for these head dimensions, or -1. `by_queries`: whether a tile's may be so. `only`: the one feature.
constexpr int tile_for(int64_t head_dim, int64_t head_dim_v, bool features, bool by_queries,
                       Feature only = Feature::kNone) {
  for (int i = 0; i < kNumTiles; ++i) {
    const Tile& tile = kTiles[i];
    const bool holds = head_dim <= tile.head_dim && head_dim_v <= tile.head_dim_v && (by_queries || !tile.by_queries);
    if (is_built(tile.head_dim) && has_kernel(tile, features) && holds && tile.feature == only) return i;
  }
  return only != Feature::kNone ? tile_for(head_dim, head_dim_v, features, by_queries) : -1;
}

}  // namespace flashbwd::sm90

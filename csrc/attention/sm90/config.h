// Tiles of the sm_90a attention kernel, by head dimension. Host code includes this too: no CUDA here.
#pragma once

#include <cstdint>

#include "../../common/warpgroup.h"
#include "../built_head_dims.h"

namespace flashbwd::sm90 {

// One producer warpgroup and two consumer warpgroups. 65536 registers for 3 warpgroups are 512 per lane, allocated in
// steps of 8: 24 + 2 * 240 = 504.
constexpr int kConsumerWarpgroups = 2;
constexpr int kConsumerThreads = kConsumerWarpgroups * kWarpgroupThreads;
constexpr int kThreads = kConsumerThreads + kWarpgroupThreads;
constexpr int kSharedMemoryBytes = 227 * 1024;  // most that a CTA can have
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;

// Large head dimensions: a producer warpgroup, and one each for P and dv, for dS and dk, and for dq. Their registers
// sum to 512 per lane.
constexpr int kLargeThreads = 4 * kWarpgroupThreads;
struct RoleRegisters {
  int producer, probabilities, score_gradients, dq;
};

// What a kernel computes besides bands of visible keys; a set of bits. New bits go below kBlockMask, so that kAny has
// them.
namespace feature {
constexpr uint32_t kSoftcap = 1;
constexpr uint32_t kShifts = 2;             // ALiBi, and a bias per key without its gradient (score_mod/scores.cuh)
constexpr uint32_t kBias = 4;               // a bias that TMA can load, and its gradient (score_mod/bias.cuh)
constexpr uint32_t kOtherBias = 8;          // any other bias
constexpr uint32_t kFlashDropout = 16;      // the mask of FlashAttention-2 (score_mod/dropout.cuh)
constexpr uint32_t kEfficientDropout = 32;  // the mask of PyTorch's memory-efficient forward
constexpr uint32_t kBlockMask = 64;         // query loops and bits of a block mask (tile_mask.cuh)
constexpr uint32_t kAny = kBlockMask - 1;   // all bits below, by run-time branches (large_head_dim/)
constexpr uint32_t kGenerated = 128;        // a score_mod that is compiled at run time (score_mod/generated.cuh)
}  // namespace feature

struct Tile {
  int32_t head_dim;    // of q and k in shared memory; TMA pads smaller ones with zeros
  int32_t head_dim_v;  // of v and dout
  int32_t block_m;     // queries
  int32_t block_n;     // keys of a work tile
  int32_t stages;      // of q
  int32_t dout_stages;
  int32_t ctas = 1;           // per cluster; each has an equal share of the keys
  bool by_queries = false;    // a consumer warpgroup has half of the queries and all keys, not half of the keys
  uint32_t features = 0;      // that the kernel can compute
  int32_t batch_entries = 1;  // of a work tile, which share a bias: the sum of their gradients is added once
};

// The tile table, with accumulator registers per thread (dk and dv + s and dp + dq) and shared memory beside each row.
// Registers decide block_m, and shared memory (227 KB) the number of stages: docs/kernels/attention_sm90.md,
// "Registers and shared memory".
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
    // Features: registers and shared memory of the rows above
    {64, 64, 128, 128, 2, 2, 1, false, feature::kFlashDropout},
    {128, 128, 64, 128, 2, 2, 1, false, feature::kFlashDropout},
    {64, 64, 128, 128, 2, 2, 1, false, feature::kEfficientDropout},
    {128, 128, 64, 128, 2, 2, 1, false, feature::kEfficientDropout},
    {32, 32, 64, 128, 2, 2, 1, false, feature::kBias, 2},  // 64 + 128 + 16 registers, 193 KB; batches share a bias
    {32, 32, 128, 128, 2, 2, 1, false, feature::kBias},
    {64, 64, 128, 128, 2, 2, 1, false, feature::kBias},
    {128, 128, 64, 128, 2, 2, 1, false, feature::kBias},
    {64, 64, 128, 128, 2, 2, 1, false, feature::kSoftcap | feature::kShifts},
    {128, 128, 64, 128, 2, 2, 1, false, feature::kSoftcap | feature::kShifts},
    {64, 64, 128, 128, 2, 2, 1, false, feature::kShifts | feature::kFlashDropout},
    {128, 128, 64, 128, 2, 2, 1, false, feature::kShifts | feature::kFlashDropout},
    {64, 64, 128, 128, 2, 2, 1, false, feature::kShifts | feature::kEfficientDropout},
    {128, 128, 64, 128, 2, 2, 1, false, feature::kShifts | feature::kEfficientDropout},
    {64, 64, 128, 128, 2, 2, 1, false, feature::kBias | feature::kEfficientDropout},
    {128, 128, 64, 128, 2, 2, 1, false, feature::kBias | feature::kEfficientDropout},
    {64, 64, 128, 128, 2, 2, 1, false, feature::kBlockMask},
    {128, 128, 64, 128, 2, 2, 1, false, feature::kBlockMask},
    {64, 64, 128, 128, 2, 2, 1, false, feature::kBlockMask | feature::kSoftcap | feature::kShifts},
    {128, 128, 64, 128, 2, 2, 1, false, feature::kBlockMask | feature::kSoftcap | feature::kShifts},
    {64, 64, 128, 128, 2, 2, 1, false, feature::kBlockMask | feature::kGenerated},
    {128, 128, 64, 128, 2, 2, 1, false, feature::kBlockMask | feature::kGenerated},
    {192, 192, 64, 128, 2, 2, 2, false, feature::kBlockMask},
    {256, 256, 64, 128, 2, 1, 2, false, feature::kBlockMask},
    {192, 192, 64, 128, 2, 2, 2, false, feature::kBlockMask | feature::kSoftcap | feature::kShifts},
    {256, 256, 64, 128, 2, 1, 2, false, feature::kBlockMask | feature::kSoftcap | feature::kShifts},
    {192, 192, 64, 128, 2, 2, 2, false, feature::kBlockMask | feature::kGenerated},
    {256, 256, 64, 128, 2, 1, 2, false, feature::kBlockMask | feature::kGenerated},
    {128, 128, 64, 64, 2, 2, 1, false, feature::kAny},   // 64 + 32 registers, 186 KB; smaller head dimensions too
    {192, 192, 64, 128, 2, 2, 2, false, feature::kAny},  // 96 + 32 registers, 226 KB
    {256, 256, 64, 128, 2, 1, 2, false, feature::kAny},  // 128 + 32 registers, 226 KB
};
constexpr int kNumTiles = sizeof(kTiles) / sizeof(kTiles[0]);

constexpr bool has(const Tile& tile, uint32_t features) { return (tile.features & features) != 0; }
// True if the kernel in large_head_dim/ computes the tile.
constexpr bool is_large(const Tile& tile) { return tile.block_n == 64 * tile.ctas; }

constexpr int threads_of(const Tile& tile) { return is_large(tile) ? kLargeThreads : kThreads; }

// True if the kernel computes scores as softmax_scale * q k^T.
constexpr bool has_plain_scores(const Tile& tile) { return !has(tile, feature::kAny | feature::kGenerated); }

// True if TMA loads tiles of a bias and stores tiles of its gradient.
constexpr bool copies_bias(const Tile& tile) { return has(tile, feature::kBias) && !is_large(tile); }

// With a generated score_mod, the warpgroups of P and dS need equal numbers: both may call the same function, and ptxas
// ignores all numbers if roles with different ones do (C7507).
constexpr RoleRegisters role_registers(const Tile& tile) {
  if (tile.head_dim > 192) return {32, 208, 208, 64};
  const bool branches = (tile.features & feature::kAny) == feature::kAny;
  return tile.head_dim_v == 192 && !branches ? RoleRegisters{40, 200, 200, 72} : RoleRegisters{40, 192, 208, 72};
}

// True if the tile has a kernel whose last add to a dq tile can write dq (dq_semaphores.cuh).
constexpr bool last_writes_dq(const Tile& tile) {
  return !is_large(tile) && (tile.features & ~feature::kBlockMask) == 0 &&
         (tile.head_dim == 64 || tile.head_dim == 128);
}

// True if the kernel with heads outermost always counts adds.
constexpr bool by_heads_counts_adds(const Tile& tile) { return last_writes_dq(tile) && tile.head_dim == 128; }

// Semaphores per dq tile: each CTA of a cluster adds its own columns.
constexpr int semaphores_of_tile(const Tile& tile) { return is_large(tile) ? tile.ctas : 1; }

// Bytes of a row of a swizzle atom of q, k, v or dout in shared memory: 64 columns, or 32 if these need no padding. At
// head dimension 80, which both pad, 64 columns were 1 % faster.
constexpr int row_bytes(const Tile& tile) { return tile.head_dim % 64 == 32 ? 64 : 128; }

// True if full masks use a staggered start. With one stage of dout and one buffer of dq, key blocks that add to the
// same dq tile at the same time delay one another: 2 to 5 % at head dimension 256.
constexpr bool staggers_start(const Tile& t) { return is_large(t) && t.dout_stages == 1 && t.features == 0; }

// Threads that add dq of a work tile. Two per CTA take every other iteration each: one waits until its adds are
// complete while the other adds.
constexpr int kDqAdders = 2;
constexpr int dq_adders(const Tile& tile) { return tile.ctas * kDqAdders; }

// Iterations before its last one at which a CTA takes its next work tile: finding it takes as long as two iterations.
constexpr int early_iterations(const Tile& tile) { return !is_large(tile) && tile.head_dim >= 64 ? 2 : 0; }

// True if the kernel with features writes the gradient of a bias; above head dimension 192, dk leaves too few
// registers.
constexpr bool has_bias_gradient(const Tile& tile) { return tile.head_dim <= 192; }

// The first row of kTiles that fits these head dimensions and computes all of these features, or -1. Rows with fewer
// features come first. A kernel for block masks or a generated score_mod computes no call without. `by_queries`: a tile
// with Tile::by_queries will do. `batch_entries`: the most that may share a work tile.
constexpr int find_tile(int64_t head_dim, int64_t head_dim_v, uint32_t features, bool by_queries,
                        int32_t batch_entries = 1) {
  for (int i = 0; i < kNumTiles; ++i) {
    const Tile& tile = kTiles[i];
    const bool holds = head_dim <= tile.head_dim && head_dim_v <= tile.head_dim_v && (by_queries || !tile.by_queries);
    if (tile.batch_entries > batch_entries) continue;
    if (((features ^ tile.features) & (feature::kBlockMask | feature::kGenerated)) != 0) continue;
    if (is_built(tile.head_dim) && holds && (features & ~tile.features) == 0) return i;
  }
  return -1;
}

}  // namespace flashbwd::sm90

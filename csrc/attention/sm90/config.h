// Tiles of the sm_90a attention kernel, by head dimension. Host code includes this too: no CUDA here.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace flashbwd::sm90 {

constexpr int kConsumerWarpgroups = 2;
constexpr int kWarpgroupThreads = 128;
constexpr int kThreads = (kConsumerWarpgroups + 1) * kWarpgroupThreads;  // one producer warpgroup

// 65536 registers over 3 warpgroups, in steps of 8: 24 + 2 * 240 = 504 <= 512 a lane.
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;

// Words of the workspace's zeroed region: the counter of jobs taken, then a count for each of batch * heads_kv heads,
// padded; then the semaphores of dq tiles.
constexpr int64_t counter_words(int64_t heads) { return (1 + heads + 3) / 4 * 4; }

struct Tile {
  int32_t head_dim;  // of q, k and v in shared memory: smaller ones are padded by the copy engine
  int32_t block_m;   // queries
  int32_t block_n;   // keys: 64 for each consumer warpgroup
  int32_t stages;    // of q and dout
};

// dk and dv of a consumer warpgroup (64 keys) take head_dim registers a thread, s and dp block_m, dq 32. What is left
// of 240 decides block_m; shared memory (227 KB) then takes two stages of everything.
constexpr Tile kTiles[] = {
    {64, 128, 128, 2},  // 64 + 128 + 32 registers, 194 KB
    {128, 64, 128, 2},  // 128 + 64 + 32 registers, 193 KB
};
constexpr int kNumTiles = sizeof(kTiles) / sizeof(kTiles[0]);

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

// Row of kTiles for these head dimensions, or -1.
constexpr int tile_for(int64_t head_dim, int64_t head_dim_v) {
  const int64_t wider = head_dim > head_dim_v ? head_dim : head_dim_v;
  for (int i = 0; i < kNumTiles; ++i) {
    if (is_built(kTiles[i].head_dim) && wider <= kTiles[i].head_dim) return i;
  }
  return -1;
}

}  // namespace flashbwd::sm90

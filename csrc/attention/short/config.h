// The tile table of the kernel for short sequences. Host code includes this file: no CUDA here.
#pragma once

#include <cstdint>

#include "../built_head_dims.h"

namespace flashbwd::short_sequences {

constexpr int32_t kKeyBlock = 64;  // keys of the p and ds tiles in shared memory
constexpr int32_t kWarpRows = 16;  // queries of a warp

// One CTA processes all queries and keys of a (sequence, KV head) at once.
struct Tile {
  int32_t head_dim;       // columns in shared memory, padded with zeros
  int32_t rows;           // most queries, and most keys
  int32_t ctas_plain;     // per SM; limits the registers of the variant without features
  int32_t ctas_features;  // the same with features

  constexpr int32_t threads() const { return rows / kWarpRows * 32; }
  constexpr int32_t ctas_per_sm(bool features) const { return features ? ctas_features : ctas_plain; }
  // q, k, v, dout; then p and ds of one key block
  constexpr int32_t shared_bytes() const { return 4 * rows * head_dim * 2 + 2 * rows * kKeyBlock * 2; }
  // Optional regions, in the order of the threads' registers; fp32, except for a bias in 16 bits.
  constexpr int32_t key_sums_bytes() const { return 2 * rows * head_dim * 4; }  // dk and dv over the heads of a group
  constexpr int32_t scores_bytes(int32_t element_bytes) const { return rows * rows * element_bytes; }
};

constexpr Tile kTiles[] = {
    {32, 64, 5, 4},   // 32 KB
    {32, 128, 3, 2},  // 64 KB
    {64, 64, 4, 3},   // 48 KB
    {64, 128, 2, 2},  // 96 KB
    {80, 64, 4, 3},   // 56 KB
    {80, 128, 2, 2},  // 112 KB
    {96, 64, 3, 3},   // 64 KB
    {96, 128, 1, 1},  // 128 KB
};
constexpr int kNumTiles = sizeof(kTiles) / sizeof(kTiles[0]);
constexpr int32_t kMaxRows = 128;

// Returns the first row of kTiles that holds `rows` and `head_dim`, or -1.
constexpr int tile_for(int64_t head_dim, int64_t rows) {
  for (int i = 0; i < kNumTiles; ++i) {
    if (head_dim <= kTiles[i].head_dim && rows <= kTiles[i].rows && is_built(kTiles[i].head_dim)) return i;
  }
  return -1;
}

}  // namespace flashbwd::short_sequences

#include "plan.h"

#include <algorithm>

namespace flashbwd {
namespace {

constexpr int64_t kChunk = 16;  // keys of a warp's stage
constexpr int64_t kWarps = 4;
constexpr int64_t kOverhead = 16;  // what starting and ending a thread block costs, in chunks
constexpr int64_t kMostSplits = 512;

}  // namespace

DecodingTile decoding_tile(int64_t head_dim, int64_t head_dim_v, int64_t rows) {
  const int64_t larger = std::max(head_dim, head_dim_v);
  // A lane keeps rows * head_dim / 32 / 4 floats of the output and half as many registers of Q: at most 128 + 64.
  DecodingTile tile;
  if (larger <= 64)
    tile = {64, rows <= 16 ? 16 : 32};
  else if (larger <= 128)
    tile = {128, rows <= 16 ? 16 : 32};
  else if (larger <= 256)
    tile = {256, 16};
  return tile;
}

int32_t decoding_splits(int64_t units, int64_t seqlen_k, DecodingTile tile, int32_t sm_count, int64_t smem_per_block) {
  const int64_t blocks_per_sm = tile.head_dim <= 128 && smem_per_block >= 200 * 1024 ? 2 : 1;
  const int64_t slots = std::max<int64_t>(1, sm_count * blocks_per_sm);
  const int64_t chunks = (seqlen_k + kChunk - 1) / kChunk;
  const int64_t most = std::clamp<int64_t>(chunks / (2 * kWarps), 1, kMostSplits);
  int64_t best = 1;
  int64_t best_time = INT64_MAX;
  for (int64_t splits = 1; splits <= most; ++splits) {
    const int64_t waves = (units * splits + slots - 1) / slots;
    const int64_t time = waves * ((chunks + splits - 1) / splits + kOverhead);
    if (time < best_time) {
      best = splits;
      best_time = time;
    }
  }
  return static_cast<int32_t>(best);
}

}  // namespace flashbwd

#include "plan.h"

#include <algorithm>

#include "backward_params.h"

namespace flashbwd {
namespace {

constexpr int64_t kOverhead = 16;  // prologue and epilogue of a forward CTA, in units of the time of one key tile
constexpr int64_t kBackwardOverhead = 2;  // prologue and epilogue of a backward CTA, in the same units
constexpr int64_t kBackwardCtas = 2;      // CTAs of the backward kernel per SM, limited by registers
constexpr int64_t kMostSplits = 512;
constexpr int64_t kMostSlotBytes = int64_t{1} << 30;

int64_t row_tiles(const DecodingShape& shape, DecodingTile tile) { return (shape.rows + tile.rows - 1) / tile.rows; }

// CTAs per KV split: one per row tile of each KV head.
int64_t ctas_per_split(const DecodingShape& shape, DecodingTile tile) {
  return shape.batch * shape.heads_kv * row_tiles(shape, tile);
}

// The number of splits for CTAs of 8 warps, one per SM, if a single wave of them occupies at least 90 % of the SMs.
// Returns 0 if CTAs of 4 warps, two per SM, are better.
int64_t splits_of_one_wave(int64_t ctas, const DeviceInfo& info) {
  const int64_t splits = info.sm_count / ctas;
  return ctas * splits * 10 >= info.sm_count * int64_t{9} ? splits : 0;
}

// The number of splits, at most `most`, that minimizes waves * (key tiles per CTA + overhead). `ctas`: CTAs per split;
// `concurrent`: CTAs that run at the same time.
int64_t splits_of_least_time(int64_t ctas, int64_t key_tiles, int64_t overhead, int64_t concurrent, int64_t most) {
  int64_t best = 1, best_time = INT64_MAX;
  for (int64_t splits = 1; splits <= most; ++splits) {
    const int64_t waves = (ctas * splits + concurrent - 1) / concurrent;
    const int64_t time = waves * ((key_tiles + splits - 1) / splits + overhead);
    if (time < best_time) {
      best = splits;
      best_time = time;
    }
  }
  return best;
}

bool has_clusters(const DeviceInfo& info) { return info.cc_major >= 9; }

}  // namespace

int32_t padded_head_dim(int64_t head_dim, int64_t head_dim_v) {
  const int64_t larger = std::max(head_dim, head_dim_v);
  if (larger > 256) return 0;
  return larger <= 64 ? 64 : larger <= 128 ? 128 : 256;
}

DecodingTile decoding_tile(const DecodingShape& shape, const DeviceInfo& info) {
  DecodingTile tile;
  tile.head_dim = padded_head_dim(shape.head_dim, shape.head_dim_v);
  if (tile.head_dim == 0) return {};
  // A lane needs rows * head_dim / 32 registers for the output accumulators, and half as many for Q if Q is in
  // registers. This limits rows * head_dim to 4096.
  tile.rows = shape.rows <= 16 || tile.head_dim == 256 || shape.element_bytes == 4 ? 16 : 32;
  tile.warps = 4;
  const auto fits = [&] {
    return shared_bytes(tile.head_dim, tile.rows, tile.warps, static_cast<int>(shape.element_bytes)) <=
           info.smem_per_block;
  };
  if (!fits()) tile.rows = 16;
  if (!fits()) tile.warps = 2;
  const int wide = shared_bytes(tile.head_dim, tile.rows, 8, static_cast<int>(shape.element_bytes));
  if (wide <= info.smem_per_block && splits_of_one_wave(ctas_per_split(shape, tile), info) > 0) tile.warps = 8;
  return tile;
}

DecodingSplits decoding_splits(const DecodingShape& shape, DecodingTile tile, const DeviceInfo& info,
                               int64_t requested) {
  const int64_t keys = keys_of(static_cast<int>(shape.element_bytes));
  const int64_t key_tiles = (shape.seqlen_k + keys - 1) / keys;
  const int64_t ctas = ctas_per_split(shape, tile);
  const int64_t most = std::clamp<int64_t>(key_tiles / (2 * tile.warps), 1, kMostSplits);
  DecodingSplits best;
  if (requested > 0) {
    best.splits = static_cast<int32_t>(std::min<int64_t>(requested, 65535));
  } else if (tile.warps == 8) {
    best.splits = static_cast<int32_t>(std::min(splits_of_one_wave(ctas, info), most));
  }
  if (requested > 0 || tile.warps == 8) {
    // Two splits merge in a cluster. Larger clusters leave SMs idle and were measured to be 15 to 40 % slower.
    if (has_clusters(info) && best.splits == 2) best.cluster = 2;
    return best;
  }
  const int64_t block = shared_bytes(tile.head_dim, tile.rows, tile.warps, static_cast<int>(shape.element_bytes));
  const int64_t concurrent = std::max<int64_t>(1, info.sm_count * (2 * block <= info.smem_per_block ? 2 : 1));
  best.splits = static_cast<int32_t>(splits_of_least_time(ctas, key_tiles, kOverhead, concurrent, most));
  return best;
}

int32_t decoding_backward_splits(const DecodingShape& shape, int64_t batch_kv, int32_t head_dim,
                                 const DeviceInfo& info) {
  const int64_t keys = backward_keys(head_dim, static_cast<int>(shape.element_bytes));
  const int64_t key_tiles = (shape.seqlen_k + keys - 1) / keys;
  const int64_t ctas = batch_kv * shape.heads_kv;  // per split
  const int64_t slot_bytes = shape.batch * shape.heads_kv * shape.rows * (shape.head_dim + 1) / 2 * 2 * 4;
  const int64_t most = std::min({key_tiles, kMostSplits, std::max<int64_t>(1, kMostSlotBytes / slot_bytes)});
  return static_cast<int32_t>(
      splits_of_least_time(ctas, key_tiles, kBackwardOverhead, info.sm_count * kBackwardCtas, most));
}

}  // namespace flashbwd

#include <cstdint>
#include <limits>
#include <string>

#include "../families.h"
#include "../pre_post/lse_delta.h"
#include "config.h"
#include "layout.h"

namespace flashbwd::sm80 {
namespace {

int tile_of(const AttentionProblem& problem, const DeviceInfo& device) {
  return tile_for(size_of(problem.dtype), problem.head_dim, problem.head_dim_v, device.smem_per_block);
}

CallSizes sizes_of(const AttentionProblem& problem) {
  CallSizes sizes;
  sizes.packed_q = sizes.packed_k = problem.varlen;
  sizes.batch = problem.batch;
  sizes.heads = problem.heads;
  sizes.heads_kv = problem.heads_kv;
  sizes.seqlen_q = problem.seqlen_q;
  sizes.seqlen_k = problem.seqlen_k;
  sizes.total_q = problem.total_q;
  sizes.total_k = problem.total_k;
  sizes.head_dim = problem.head_dim;
  sizes.head_dim_v = problem.head_dim_v;
  sizes.window_left = problem.window_left;
  sizes.window_right = problem.window_right;
  sizes.causal = problem.causal;
  sizes.deterministic = problem.deterministic;
  sizes.seqused = problem.has_seqused;
  sizes.has_features = problem.has_bias || problem.has_alibi || problem.softcap > 0 || problem.dropout_p > 0;
  sizes.bias_gradient = problem.need_dbias;
  sizes.bias_alone = !problem.has_alibi && problem.softcap <= 0 && problem.dropout_p <= 0;
  sizes.bias_broadcast = {problem.bias_broadcast_batch, problem.bias_broadcast_head, problem.bias_broadcast_row,
                          problem.bias_broadcast_col};
  return sizes;
}

std::string refusal(const AttentionProblem& problem, const DeviceInfo& device) {
  const auto number = [](int64_t value) { return std::to_string(value); };
  if (device.cc_major < 8) {
    return "it needs compute capability 8.0, the device has " + number(device.cc_major) + "." + number(device.cc_minor);
  }
  if (!is_16bit(problem.dtype) && problem.dtype != DType::kFloat32) {
    return std::string("it takes float16, bfloat16 and float32, got ") + name_of(problem.dtype);
  }
  if (problem.batch == 0 || problem.heads == 0) return "there is nothing to launch for an empty batch";
  if (problem.has_block_mask) return "it takes no block mask";
  const int tile_index = tile_of(problem, device);
  if (tile_index < 0) {
    return "it has no tile with these features for head dimensions " + number(problem.head_dim) + " and " +
           number(problem.head_dim_v) + " of " + name_of(problem.dtype) + " in " + number(device.smem_per_block) +
           " bytes of shared memory per block";
  }
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const CallSizes sizes = sizes_of(problem);
  const int64_t rows = problem.batch * problem.heads * LseDelta::padded(problem.seqlen_q);
  if (count_work_tiles(sizes, kTiles[tile_index]) > kMost || rows > kMost) {
    return "batch * heads * rows is too large for one launch";
  }
  return "";
}

std::string schedule_of(const AttentionProblem& problem, const Tile& tile, const CallSizes& sizes) {
  std::string schedule =
      tile.large          ? "persistent CTAs, one key block at a time, dk and dv in global memory by blocks of columns"
      : sizes.whole_heads ? "one CTA per KV head, its key blocks in order"
                          : "one CTA per key block";
  if (sizes.split_tiles.count > 0) {
    schedule += ", queries of the last " + std::to_string(sizes.split_tiles.count) + " split over " +
                std::to_string(sizes.split_tiles.splits) + " CTAs each";
  }
  if (sizes.whole_heads) {
    schedule += ", dq accumulated by that CTA";
  } else if (sizes.first_stores) {
    schedule += ", dq stored by the first key block, added by atomics from the others";
  } else {
    schedule += problem.deterministic ? ", dq added in order of the key blocks" : ", dq added by atomics";
  }
  return schedule + (problem.tf32 ? ", products in TF32" : "");
}

void plan(const AttentionProblem& problem, const DeviceInfo& device, AttentionPlan* plan) {
  const int tile_index = tile_of(problem, device);
  const Tile& tile = kTiles[tile_index];
  plan->block_m = tile.block_m;
  plan->block_n = tile.block_n;
  plan->config = tile_index;
  plan->deterministic = problem.deterministic;
  CallSizes sizes = sizes_of(problem);
  sizes.whole_heads = whole_heads(sizes, tile, device.sm_count, device.l2_bytes);
  if (!sizes.whole_heads) sizes.split_tiles = choose_split_tiles(sizes, tile, device.sm_count);
  sizes.first_stores = first_stores(sizes, tile);
  sizes.ordered_bias_gradient = ordered_bias_gradient(sizes, tile);
  plan->splits = sizes.split_tiles.splits;
  plan->schedule = schedule_of(problem, tile, sizes);
  WorkspaceRequest request;
  request.accumulator = !sizes.whole_heads;
  request.dq_blocks = true;
  request.zero_accumulator = !sizes.first_stores;
  request.semaphore_bytes = zeroed_region(sizes, tile).bytes;
  // lse * log2(e) and delta
  request.delta_rows =
      2 * LseDelta::rows(problem.varlen, problem.batch, problem.heads, problem.seqlen_q, problem.total_q);
  request.partial_bytes = partial_region(sizes, tile, device.sm_count).bytes;
  plan->workspace = plan_workspace(problem, request);
}

}  // namespace

const AttentionFamily kFamily = {"sm80", refusal, plan};

}  // namespace flashbwd::sm80

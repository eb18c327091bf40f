#include <cstdint>
#include <limits>
#include <string>

#include "../block_mask_checks.h"
#include "../families.h"
#include "../pre_post/lse_delta.h"
#include "config.h"
#include "layout.h"
#include "schedule.h"

namespace flashbwd::sm80 {
namespace {

int tile_of(const AttentionProblem& problem, const DeviceInfo& device) {
  return tile_for(size_of(problem.dtype), problem.head_dim, problem.head_dim_v, device.smem_per_block,
                  problem.has_block_mask);
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
  if (problem.has_block_mask) {
    if (problem.has_score_mod && (problem.softcap > 0.0 || problem.has_alibi)) {
      return "it takes no softcap or ALiBi with a score_mod that is compiled at run time";
    }
    if (problem.dropout_p > 0.0) return "it takes no dropout with a block mask";
    if (problem.has_bias) return "it takes no attn_bias with a block mask";
  }
  const int tile_index = tile_of(problem, device);
  if (tile_index < 0) {
    return "it has no tile with these features for head dimensions " + number(problem.head_dim) + " and " +
           number(problem.head_dim_v) + " of " + name_of(problem.dtype) + " in " + number(device.smem_per_block) +
           " bytes of shared memory per block";
  }
  const std::string tile_refusal = refuse_block_tile(problem, kTiles[tile_index].block_m, kTiles[tile_index].block_n);
  if (!tile_refusal.empty()) return tile_refusal;
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const int64_t rows = problem.batch * problem.heads * LseDelta::padded(problem.seqlen_q);
  if (count_work_tiles(problem, kTiles[tile_index]) > kMost || rows > kMost) {
    return "batch * heads * rows is too large for one launch";
  }
  return "";
}

std::string in_words(const AttentionProblem& problem, const Tile& tile, const Schedule& schedule) {
  std::string words =
      tile.large ? "persistent CTAs, one key block at a time, dk and dv in global memory by blocks of columns"
      : schedule.whole_heads ? "persistent CTAs, each one KV head at a time with its key blocks in order"
                             : "persistent CTAs, each one key block at a time";
  if (problem.has_block_mask) words += ", query loops of a block mask";
  if (schedule.split_tiles.count > 0) {
    words += ", queries of the last " + std::to_string(schedule.split_tiles.count) + " split over " +
             std::to_string(schedule.split_tiles.splits) + " CTAs each";
  }
  if (schedule.whole_heads) {
    words += ", dq accumulated by that CTA";
  } else if (schedule.first_stores) {
    words += ", dq stored by the first key block, added by atomics from the others";
  } else {
    words += schedule.ordered_dq ? ", dq added in order of the key blocks" : ", dq added by atomics";
  }
  return words + (problem.tf32 ? ", products in TF32" : "");
}

KernelPlan plan_kernel(const AttentionProblem& problem, const Tile& tile, const DeviceInfo& device) {
  KernelPlan kernel;
  kernel.schedule = choose_schedule(problem, tile, device);
  kernel.bias_gradient = bias_gradient_of(problem, tile, kernel.schedule.ordered_bias_gradient);
  kernel.unordered_bias_gradient = bias_gradient_of(problem, tile, false);
  kernel.bias_sharers = static_cast<int32_t>(bias_sharers(problem));
  kernel.zeroed = zeroed_region(problem, tile, kernel.schedule, kernel.bias_gradient);
  kernel.partial = partial_region(problem, tile, kernel.schedule, kernel.bias_gradient);
  return kernel;
}

void plan(const AttentionProblem& problem, const DeviceInfo& device, AttentionPlan* plan) {
  const int tile_index = tile_of(problem, device);
  const Tile& tile = kTiles[tile_index];
  plan->sm80 = plan_kernel(problem, tile, device);
  const KernelPlan& kernel = plan->sm80;
  const Schedule& schedule = kernel.schedule;
  plan->block_m = tile.block_m;
  plan->block_n = tile.block_n;
  plan->config = tile_index;
  plan->deterministic = problem.deterministic;
  plan->splits = schedule.split_tiles.splits;
  plan->schedule = in_words(problem, tile, schedule);
  WorkspaceRequest request;
  request.accumulator = !schedule.whole_heads;
  request.dq_blocks = true;
  request.zero_accumulator = !schedule.first_stores;
  request.semaphore_bytes = kernel.zeroed.bytes;
  // lse * log2(e) and delta
  request.delta_rows =
      2 * LseDelta::rows(problem.varlen, problem.batch, problem.heads, problem.seqlen_q, problem.total_q);
  request.partial_bytes = kernel.partial.bytes;
  plan->workspace = plan_workspace(problem, request);
}

}  // namespace

const AttentionFamily kFamily = {"sm80", refusal, plan};

}  // namespace flashbwd::sm80

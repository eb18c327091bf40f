#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "../families.h"
#include "config.h"
#include "layout.h"
#include "schedule.h"

namespace flashbwd::short_sequences {
namespace {

std::string number(int64_t value) { return std::to_string(value); }

int tile_of(const AttentionProblem& problem) {
  return tile_for(std::max(problem.head_dim, problem.head_dim_v), std::max(problem.seqlen_q, problem.seqlen_k));
}

std::string refused_feature(const AttentionProblem& problem) {
  if (problem.has_block_mask) return "it takes no block mask";
  if (problem.has_score_mod) return "it takes no score_mod";
  if (problem.dropout_p > 0.0) return "it takes no dropout";
  if (problem.softcap > 0.0) return "it takes no softcap";
  if (problem.has_sink) return "it takes no sink";
  if (!problem.need_dbias) return "";
  if (problem.bias_broadcast_row || problem.bias_broadcast_col) {
    return "it does not sum the gradient of attn_bias over queries or keys";
  }
  if (problem.bias_broadcast_head && !problem.bias_broadcast_batch && problem.batch > 1) {
    return "it does not sum the gradient of attn_bias over the heads of each sequence";
  }
  if (problem.bias_broadcast_batch && !problem.bias_broadcast_head && problem.heads != problem.heads_kv) {
    return "it does not sum the gradient of attn_bias over batches with grouped-query attention";
  }
  return "";
}

std::string refusal(const AttentionProblem& problem, const DeviceInfo& device) {
  if (device.cc_major < 8) {
    return "it needs compute capability 8.0, the device has " + number(device.cc_major) + "." + number(device.cc_minor);
  }
  if (!is_16bit(problem.dtype)) return std::string("it takes float16 and bfloat16, got ") + name_of(problem.dtype);
  if (problem.batch == 0 || problem.heads == 0) return "there is nothing to launch for an empty batch";
  if (problem.seqlen_q > kMaxRows || problem.seqlen_k > kMaxRows) {
    return "it takes at most " + number(kMaxRows) + " queries and keys, got " + number(problem.seqlen_q) + " and " +
           number(problem.seqlen_k);
  }
  const std::string feature = refused_feature(problem);
  if (!feature.empty()) return feature;
  const int tile_index = tile_of(problem);
  if (tile_index < 0) {
    return "it has no tile for head dimensions " + number(problem.head_dim) + " and " + number(problem.head_dim_v);
  }
  if (!problem.aligned_16 || problem.head_dim % 8 != 0 || problem.head_dim_v % 8 != 0) {
    return "it needs pointers, strides and rows of q, k, v, out and dout that are multiples of 16 bytes";
  }
  const int64_t shared_bytes = shared_regions(problem, kTiles[tile_index], device).bytes;
  if (shared_bytes > device.smem_per_block) {
    return "it needs " + number(shared_bytes) + " bytes of shared memory per block, the device has " +
           number(device.smem_per_block);
  }
  if (problem.batch * problem.heads_kv > std::numeric_limits<int32_t>::max() / 2) {
    return "batch * heads is too large for one launch";
  }
  return "";
}

// One CTA computes all query heads of a KV head, so few KV heads leave most SMs without work.
std::string slower(const AttentionProblem& problem) {
  constexpr int64_t kFewKvHeads = 128;  // about the number of SMs
  if (problem.heads == problem.heads_kv || problem.batch * problem.heads_kv >= kFewKvHeads) return "";
  return "the others are faster with grouped-query attention if batch * heads_kv is below " + number(kFewKvHeads);
}

std::string in_words(const KernelPlan& kernel) {
  std::string words = "each CTA computes one KV head of one sequence at a time, in one pass";
  if (kernel.bias_slots > 0) {
    words += ", gradient of the bias summed over the sequences of a CTA, then over " + number(kernel.bias_slots) +
             " CTAs per plane";
  }
  return words;
}

void plan(const AttentionProblem& problem, const DeviceInfo& device, AttentionPlan* plan) {
  const int tile_index = tile_of(problem);
  const Tile& tile = kTiles[tile_index];
  KernelPlan& kernel = plan->short_sequences;
  kernel = plan_kernel(problem, tile, device);
  plan->block_m = plan->block_n = tile.rows;
  plan->config = tile_index;
  plan->deterministic = true;
  plan->schedule = in_words(kernel);
  WorkspaceRequest request;
  request.partial_bytes = kernel.bias_gradient.bytes();
  plan->workspace = plan_workspace(problem, request);
}

}  // namespace

const AttentionFamily kFamily = {"short", refusal, plan, slower};

}  // namespace flashbwd::short_sequences

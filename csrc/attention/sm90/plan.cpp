#include "head_dim_512/plan.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "../block_mask_checks.h"
#include "../families.h"
#include "../index/tile_order.h"
#include "../pre_post/lse_delta.h"
#include "../pre_post/rows_ready.h"
#include "config.h"
#include "layout.h"
#include "schedule.h"

namespace flashbwd::sm90 {
namespace {

// True if each warpgroup takes half of the queries. At head dimension 32 this is 5 % faster with 8 iterations of 128
// queries per work tile, and 4 to 9 % slower with 4.
bool splits_queries(const AttentionProblem& problem) { return queries_seen(problem) >= 1024; }

// True if head dimensions 80 and 96 take the tile of 128. Under a causal mask it is 4 to 16 % faster at S 256 and 512,
// 0 to 5 % at 1024, and 5 % slower at 1536. Without a mask it is slower.
bool pads_to_128(const AttentionProblem& problem) {
  constexpr int64_t kQueries = 512;  // per key block, on average
  const int64_t head_dim = std::max(problem.head_dim, problem.head_dim_v);
  const bool causal = problem.window_left < 0 && problem.window_right >= 0;
  const int64_t heads = problem.heads / std::max<int64_t>(problem.heads_kv, 1);
  return is_built(128) && 64 < head_dim && head_dim < 128 && causal && queries_seen(problem) * heads <= kQueries;
}

// True if TMA can load the bias.
bool can_copy_bias(const AttentionProblem& problem) {
  return !problem.varlen && !problem.has_seqused && problem.bias_has_rows;
}

uint32_t features_of(const AttentionProblem& problem) {
  const bool biases_keys = problem.bias_of_keys && !problem.need_dbias;
  uint32_t features = problem.has_block_mask ? feature::kBlockMask : 0;
  if (problem.has_score_mod) features |= feature::kGenerated;
  if (problem.softcap > 0.0) features |= feature::kSoftcap;
  if (problem.has_alibi) features |= feature::kShifts;
  if (problem.has_bias) {
    features |= biases_keys ? feature::kShifts : can_copy_bias(problem) ? feature::kBias : feature::kOtherBias;
  }
  if (problem.dropout_p > 0.0) {
    const bool flash = problem.dropout_layout == DropoutLayout::kFlash;
    features |= flash ? feature::kFlashDropout : feature::kEfficientDropout;
  }
  return features;
}

// Batch entries of a work tile: two if they share the bias, so that the sum of their gradients is added once.
int32_t batch_entries_of(const AttentionProblem& problem) {
  return problem.bias_broadcast_batch && problem.heads == problem.heads_kv ? 2 : 1;
}

int tile_of(const AttentionProblem& problem) {
  const int64_t head_dim = pads_to_128(problem) ? 128 : problem.head_dim;
  return find_tile(head_dim, problem.head_dim_v, features_of(problem), splits_queries(problem),
                   batch_entries_of(problem));
}

int64_t most_work_tiles(const AttentionProblem& p, const Tile& tile) {
  if (p.varlen) return varlen_work_tiles(p.total_k, p.batch, p.heads_kv, tile.block_n);
  return p.batch * p.heads_kv * ceil_div(p.seqlen_k, tile.block_n);
}

std::string refusal(const AttentionProblem& problem, const DeviceInfo& device) {
  const auto number = [](int64_t value) { return std::to_string(value); };
  if (device.cc_major != 9 || device.cc_minor != 0) {
    return "it needs compute capability 9.0, the device has " + number(device.cc_major) + "." + number(device.cc_minor);
  }
  if (device.smem_per_block < kSharedMemoryBytes) {
    return "it needs " + number(kSharedMemoryBytes) + " bytes of shared memory per block, the device has " +
           number(device.smem_per_block);
  }
  if (!is_16bit(problem.dtype)) return std::string("it takes float16 and bfloat16, got ") + name_of(problem.dtype);
  if (problem.batch == 0 || problem.heads == 0) return "there is nothing to launch for an empty batch";
  if (head_dim_512::is_for(problem)) return head_dim_512::refusal(problem);
  if (problem.need_dbias && problem.softcap > 0.0)
    return "it does not compute the gradient of attn_bias together with softcap";
  if (problem.dropout_p > 0.0 && problem.dropout_layout == DropoutLayout::kEfficient32 &&
      problem.seqlen_q * problem.seqlen_k > int64_t{1} << 32) {
    return "PyTorch's 32-bit dropout counter wraps around, because seqlen_q * seqlen_k is above 2**32";
  }
  if (problem.has_block_mask) {
    if (problem.dropout_p > 0.0) return "it takes no dropout with a block mask";
    if (problem.has_bias) return "it takes no attn_bias with a block mask";
  }
  const int tile_index = tile_of(problem);
  if (tile_index < 0) {
    return "it has no tile with these features for head dimensions " + number(problem.head_dim) + " and " +
           number(problem.head_dim_v);
  }
  const bool whole_vectors = problem.head_dim % 8 == 0 && problem.head_dim_v % 8 == 0;
  if (problem.has_block_mask && !is_large(kTiles[tile_index]) && !whole_vectors) {
    return "with a block mask, TMA stores dk and dv, which needs head dimensions that are multiples of 8";
  }
  if (problem.has_key_mask && !copies_bias(kTiles[tile_index])) {
    return "it takes key_mask only beside an attn_bias that TMA can load, at head dimensions up to 128";
  }
  const std::string tile_refusal = refuse_block_tile(problem, kTiles[tile_index].block_m, kTiles[tile_index].block_n);
  if (!tile_refusal.empty()) return tile_refusal;
  if (problem.need_dbias && !has_bias_gradient(kTiles[tile_index])) {
    return "it does not take the gradient of attn_bias at head dimensions above 192";
  }
  if (!problem.aligned_16) {
    return "TMA needs pointers and strides of q, k, v, out and dout that are multiples of 16 bytes";
  }
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const int64_t rows = problem.batch * problem.heads * LseDelta::padded(problem.seqlen_q);
  if (most_work_tiles(problem, kTiles[tile_index]) > kMost / 2 || rows > kMost / 2 ||
      problem.heads * problem.total_q > kMost) {
    return "batch * heads * rows is too large for one launch";
  }
  return "";
}

// As measured: docs/lab/2026-11.md, "Which family takes a call with several features".
std::string slower(const AttentionProblem& problem) {
  const int64_t head_dim = std::max(problem.head_dim, problem.head_dim_v);
  const bool draws_words = problem.dropout_p > 0.0 && problem.dropout_layout != DropoutLayout::kFlash;
  if (problem.has_bias && draws_words && 128 < head_dim && head_dim <= 192) {
    return "sm80 is faster with attn_bias and PyTorch's memory-efficient dropout at this head dimension";
  }
  if (head_dim > 128 || kTiles[tile_of(problem)].features != feature::kAny) return "";
  if (problem.has_bias) {
    const bool shared = problem.bias_broadcast_batch || problem.bias_broadcast_head;
    if (problem.need_dbias && problem.bias_dtype == DType::kFloat32 && !shared) return "";
    return "sm80 is faster with attn_bias at head dimensions up to 128, unless TMA loads the bias, alone or with "
           "PyTorch's memory-efficient dropout, or its gradient is float32 for each batch and head";
  }
  return "sm80 is faster with softcap and dropout at this head dimension";
}

void plan(const AttentionProblem& problem, const DeviceInfo& device, AttentionPlan* plan) {
  if (head_dim_512::is_for(problem)) return head_dim_512::plan(problem, plan);
  const int tile_index = tile_of(problem);
  const Tile& tile = kTiles[tile_index];
  KernelPlan& kernel = plan->sm90;
  kernel.schedule = choose_schedule(problem, tile, device.sm_count);
  kernel.zeroed = zeroed_region(problem, tile);
  kernel.has_semaphores = has_semaphores(problem);
  kernel.bias_gradient = bias_gradient_of(problem, tile);
  kernel.orders_bias_adds = orders_bias_adds(problem, tile);

  plan->block_m = tile.block_m;
  plan->block_n = tile.block_n;
  plan->config = tile_index;
  plan->deterministic = problem.deterministic;
  plan->cooperative = kernel.schedule.dispatch == Dispatch::kStatic;
  plan->sm_count = device.sm_count;
  plan->splits = kernel.schedule.gqa_splits;
  plan->schedule = in_words(kernel.schedule, tile);

  WorkspaceRequest request;
  request.accumulator = true;
  request.dq_permuted = true;
  request.zero_accumulator = adds_into_zeros(problem);
  request.semaphore_bytes = kernel.zeroed.bytes;
  const int64_t bias_bytes = bias_scratch_bytes(problem, tile);
  request.partial_bytes = bias_bytes + partial_elements(problem, kernel.schedule) * static_cast<int64_t>(sizeof(float));
  // lse * log2(e), delta, and the flags of an overlapped preprocess
  request.delta_rows =
      2 * LseDelta::rows(problem.varlen, problem.batch, problem.heads, problem.seqlen_q, problem.total_q) +
      rows_ready_words(problem.varlen, problem.batch, problem.heads, problem.seqlen_q);
  plan->workspace = plan_workspace(problem, request);
  kernel.partial_sums_offset = plan->workspace.partial_offset + bias_bytes;
}

}  // namespace

const AttentionFamily kFamily = {"sm90", refusal, plan, slower};

}  // namespace flashbwd::sm90

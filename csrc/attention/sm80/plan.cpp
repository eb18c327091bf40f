#include "plan.h"

#include <cstdint>
#include <limits>
#include <string>

#include "../row_statistics.h"
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
  sizes.deterministic = problem.deterministic;
  sizes.bias_gradient = problem.need_dbias;
  sizes.bias_broadcast = {problem.bias_broadcast_batch, problem.bias_broadcast_head, problem.bias_broadcast_row,
                          problem.bias_broadcast_col};
  return sizes;
}

// CTAs of a tile that the device runs at a time: shared memory and registers (255 a thread) say how many.
int64_t ctas_at_once(const Tile& tile, const DeviceInfo& device) {
  constexpr int64_t kReservedBytes = 1024;  // of each CTA, beside what it asks for; a multiprocessor has one more
  const int64_t by_memory =
      (device.smem_per_block + kReservedBytes) / (tile.shared_bytes() + kAlignmentBytes + kReservedBytes);
  return at_least(device.sm_count, 1) * at_least(at_most(by_memory, 65536 / (tile.threads() * 256)), 1);
}

// Packed lengths may be far from the longest, which is all that is known; and a bias gradient has places for one CTA a
// key block.
int32_t splits_of(const AttentionProblem& problem, const DeviceInfo& device, const Tile& tile, const CallSizes& sizes) {
  if (problem.varlen || problem.need_dbias || problem.seqlen_k == 0) return 1;
  const Visibility visibility =
      make_visibility(static_cast<int32_t>(problem.seqlen_q), static_cast<int32_t>(problem.seqlen_k),
                      problem.window_left, problem.window_right, problem.causal);
  const auto steps = [&](int64_t key_block) {
    return query_blocks(visibility, static_cast<int32_t>(key_block), tile.block_m, tile.block_n).size() *
           (problem.heads / problem.heads_kv);
  };
  // The queries that see a key block grow, stay the same or shrink along the keys.
  const int64_t last = ceil_div(problem.seqlen_k, tile.block_n) - 1, middle = steps(last / 2);
  const int64_t longest = at_least(at_least(steps(0), steps(last)), middle);
  return split_count(job_count(sizes, tile), middle, longest, ctas_at_once(tile, device));
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
  const int tile_index = tile_of(problem, device);
  if (tile_index < 0) {
    return "it holds no tile for head dimensions " + number(problem.head_dim) + " and " + number(problem.head_dim_v) +
           " of " + name_of(problem.dtype) + " in " + number(device.smem_per_block) + " bytes of shared memory a block";
  }
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const CallSizes sizes = sizes_of(problem);
  const int64_t rows = problem.batch * problem.heads * RowStatistics::padded(problem.seqlen_q);
  if (job_count(sizes, kTiles[tile_index]) > kMost || rows > kMost) {
    return "batch * heads * rows is too large for one launch";
  }
  return "";
}

void plan(const AttentionProblem& problem, const DeviceInfo& device, AttentionPlan* plan) {
  const int tile_index = tile_of(problem, device);
  const Tile& tile = kTiles[tile_index];
  plan->block_m = tile.block_m;
  plan->block_n = tile.block_n;
  plan->config = tile_index;
  plan->deterministic = problem.deterministic;
  CallSizes sizes = sizes_of(problem);
  sizes.splits = splits_of(problem, device, tile, sizes);
  plan->splits = sizes.splits;
  plan->schedule =
      std::string(tile.wide ? "persistent CTAs, a key block at a time, dk and dv in global memory by blocks of columns"
                            : "one CTA a key block") +
      (sizes.splits > 1 ? ", its queries shared by " + std::to_string(sizes.splits) + " CTAs" : std::string()) +
      (problem.deterministic ? ", dq added in order of the key blocks" : ", dq added by atomics") +
      (problem.tf32 ? ", products in TF32" : "");
  WorkspaceRequest request;
  request.dq_mode = problem.deterministic ? DqMode::kOrdered : DqMode::kAtomic;
  request.block_n = tile.block_n;
  request.dq_blocks = true;
  request.semaphore_bytes = zeroed_region(sizes, tile).bytes;
  // lse * log2(e) and delta
  request.delta_rows =
      2 * RowStatistics::rows(problem.varlen, problem.batch, problem.heads, problem.seqlen_q, problem.total_q);
  request.partial_bytes = partial_region(sizes, tile, device.sm_count).bytes;
  plan->workspace = plan_workspace(problem, request);
}

}  // namespace

const AttentionFamily kFamily = {"sm80", refusal, plan};

}  // namespace flashbwd::sm80

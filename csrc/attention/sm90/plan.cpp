#include "plan.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "../row_statistics.h"
#include "../schedule.h"
#include "config.h"
#include "grouped.h"

namespace flashbwd::sm90 {
namespace {

constexpr int64_t kSharedMemoryBytes = 227 * 1024;

int64_t jobs(const AttentionProblem& problem, const Tile& tile) {
  if (problem.varlen) return varlen_jobs(problem.total_k, problem.batch, problem.heads_kv, tile.block_n);
  return problem.batch * problem.heads_kv * ceil_div(problem.seqlen_k, tile.block_n);
}

std::string refusal(const AttentionProblem& problem, const DeviceInfo& device) {
  const auto number = [](int64_t value) { return std::to_string(value); };
  if (device.cc_major != 9 || device.cc_minor != 0) {
    return "it needs compute capability 9.0, the device has " + number(device.cc_major) + "." + number(device.cc_minor);
  }
  if (device.smem_per_block < kSharedMemoryBytes) {
    return "it needs " + number(kSharedMemoryBytes) + " bytes of shared memory a block, the device gives " +
           number(device.smem_per_block);
  }
  if (!is_16bit(problem.dtype)) return std::string("it takes float16 and bfloat16, got ") + name_of(problem.dtype);
  if (problem.batch == 0 || problem.heads == 0) return "there is nothing to launch for an empty batch";
  if (problem.has_bias) return "it does not take attn_bias";
  if (problem.has_alibi) return "it does not take alibi_slopes";
  if (problem.has_sink) return "it does not compute the gradient of sink";
  if (problem.dropout_p > 0.0) return "it does not take dropout";
  if (problem.softcap > 0.0) return "it does not take softcap";
  const int tile_index = tile_for(problem.head_dim, problem.head_dim_v);
  if (tile_index < 0) {
    return "it holds no tile for head dimensions " + number(problem.head_dim) + " and " + number(problem.head_dim_v);
  }
  if (!problem.aligned_16) {
    return "its copies need q, k, v, out and dout with pointers and strides that are multiples of 16 bytes";
  }
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const int64_t rows = problem.batch * problem.heads * RowStatistics::padded(problem.seqlen_q);
  if (jobs(problem, kTiles[tile_index]) > kMost / 2 || rows > kMost || problem.heads * problem.total_q > kMost) {
    return "batch * heads * rows is too large for one launch";
  }
  return "";
}

void plan(const AttentionProblem& problem, const DeviceInfo& device, AttentionPlan* plan) {
  const int tile_index = tile_for(problem.head_dim, problem.head_dim_v);
  const Tile& tile = kTiles[tile_index];
  plan->block_m = tile.block_m;
  plan->block_n = tile.block_n;
  plan->config = tile_index;
  plan->deterministic = problem.deterministic;
  plan->sm_count = device.sm_count;
  const GroupedSizes sizes = grouped_sizes(problem, problem.varlen, tile.block_m, tile.block_n);
  const GroupedJobs grouped = grouped_jobs(sizes, device.sm_count);
  plan->schedule = grouped.pairs ? "pairs of key blocks from a counter" : "key blocks from a counter";
  plan->splits = grouped.splits;
  if (grouped.splits > 1) plan->schedule += ", query heads in " + std::to_string(grouped.splits) + " parts";
  plan->schedule += problem.deterministic ? ", dq added in order of the key blocks" : ", dq added by bulk reductions";
  WorkspaceRequest request;
  request.dq_mode = problem.deterministic ? DqMode::kOrdered : DqMode::kAtomic;
  request.block_n = tile.block_n;
  request.sm_count = device.sm_count;
  int64_t words = counter_words(problem.batch * problem.heads_kv);
  // Packed: the rows behind a sequence's last tile are another head's, whose sums a store would overwrite.
  request.adds_into_zeros = problem.varlen;
  if (problem.deterministic || !request.adds_into_zeros) {
    words += problem.batch * problem.heads * ceil_div(problem.seqlen_q, tile.block_m) * kConsumerWarpgroups;
  }
  request.semaphore_bytes = words * static_cast<int64_t>(sizeof(int32_t));
  if (grouped.splits > 1) {
    request.partial_bytes = grouped.splits * partial_elements(sizes) * static_cast<int64_t>(sizeof(float));
  }
  // lse * log2(e) and delta
  request.delta_rows =
      2 * RowStatistics::rows(problem.varlen, problem.batch, problem.heads, problem.seqlen_q, problem.total_q);
  plan->workspace = plan_workspace(problem, request);
}

}  // namespace

const AttentionFamily kFamily = {"sm90", refusal, plan};

}  // namespace flashbwd::sm90

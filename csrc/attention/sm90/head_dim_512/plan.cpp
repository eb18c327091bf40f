#include "plan.h"

#include <algorithm>
#include <limits>

#include "../../plan.h"
#include "../../pre_post/lse_delta.h"
#include "../config.h"
#include "config.h"

namespace flashbwd::sm90::head_dim_512 {
namespace {

constexpr int64_t kLargestOfOthers = 256;

int64_t head_dim_of(const AttentionProblem& problem) { return std::max(problem.head_dim, problem.head_dim_v); }

std::string refused_feature(const AttentionProblem& problem) {
  if (problem.has_block_mask) return "no block mask";
  if (problem.has_score_mod) return "no score_mod";
  if (problem.has_bias) return "no attn_bias";
  if (problem.has_key_mask) return "no key_mask";
  if (problem.has_alibi) return "no ALiBi";
  if (problem.dropout_p > 0.0) return "no dropout";
  return "";
}

}  // namespace

bool is_for(const AttentionProblem& problem) { return head_dim_of(problem) > kLargestOfOthers; }

std::string refusal(const AttentionProblem& problem) {
  if (find_head_dim(head_dim_of(problem)) < 0) {
    return "it has no tile with these features for head dimensions " + std::to_string(problem.head_dim) + " and " +
           std::to_string(problem.head_dim_v);
  }
  const std::string feature = refused_feature(problem);
  if (!feature.empty()) return "it takes " + feature + " at head dimensions above 256";
  if (!problem.aligned_16) {
    return "TMA needs pointers and strides of q, k, v, out and dout that are multiples of 16 bytes";
  }
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const int64_t rows = problem.batch * problem.heads * LseDelta::padded(problem.seqlen_q);
  if (work_tiles(problem.varlen, problem.batch, problem.heads_kv, problem.seqlen_k, problem.total_k) > kMost / 2 ||
      work_tiles(problem.varlen, problem.batch, problem.heads, problem.seqlen_q, problem.total_q) > kMost / 2 ||
      rows > kMost / 2 || problem.heads * problem.total_q > kMost || problem.total_k > kMost) {
    return "batch * heads * rows is too large for one launch";
  }
  return "";
}

void plan(const AttentionProblem& problem, AttentionPlan* plan) {
  plan->config = kNumTiles + find_head_dim(head_dim_of(problem));
  plan->block_m = plan->block_n = kRows;
  plan->deterministic = true;
  plan->schedule = "a kernel for dk and dv, two CTAs per key block; then a kernel for dq, one CTA per query block";
  WorkspaceRequest request;
  request.semaphore_bytes = 16;  // unused, but tensor maps of empty tensors need an address (encode_heads)
  request.delta_rows =
      2 * LseDelta::rows(problem.varlen, problem.batch, problem.heads, problem.seqlen_q, problem.total_q);
  plan->workspace = plan_workspace(problem, request);
}

}  // namespace flashbwd::sm90::head_dim_512

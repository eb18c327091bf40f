// Which backend runs an attention backward, how, and with how much scratch.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "../common/types.h"
#include "problem.h"
#include "workspace.h"

namespace flashbwd {

struct AttentionPlan {
  std::string backend;   // "sm90", "sm80", "reference"
  int32_t block_m = 0;   // tile: queries; 0 for the reference
  int32_t block_n = 0;   // tile: keys
  int32_t splits = 1;    // CTAs that share the work on one block of keys, where any do
  int32_t config = 0;    // the family's own row number in its config table
  std::string schedule;  // in words: "one CTA a key block", ...
  bool deterministic = false;
  bool cooperative = false;  // the launch needs all of its CTAs resident at once, which not every context grants
  int32_t sm_count = 0;      // of the device planned for; slots of persistent plans depend on it
  WorkspaceLayout workspace;
  std::vector<std::pair<std::string, std::string>> refusals;  // backend not chosen -> why
  std::string refusal;                                        // why the backend that was forced cannot run this
};

// Where a backend was forced and refuses, the plan holds its reason and nothing that could run.
AttentionPlan try_plan_attention(const AttentionProblem& problem, const DeviceInfo& device);

// Throws that reason as std::invalid_argument.
AttentionPlan plan_attention(const AttentionProblem& problem, const DeviceInfo& device);

// As JSON, for the Python Plan.
std::string to_json(const AttentionPlan& plan);

}  // namespace flashbwd

// Which backend runs an attention backward, with which schedule, and how much scratch memory it needs.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "../common/types.h"
#include "problem.h"
#include "short/layout.h"
#include "sm80/layout.h"
#include "sm90/layout.h"
#include "workspace.h"

namespace flashbwd {

struct AttentionPlan {
  std::string backend;   // "sm90", "sm80", "short", "reference"
  int32_t block_m = 0;   // queries per tile; 0 for the reference
  int32_t block_n = 0;   // keys per tile
  int32_t splits = 1;    // CTAs that share one block of keys
  int32_t config = 0;    // row of the family's config table
  std::string schedule;  // in words: "one CTA per key block", ...
  bool deterministic = false;
  bool cooperative = false;  // cooperative launch: all CTAs must be resident at once, which not every context allows
  int32_t sm_count = 0;      // of the device that the plan is for
  WorkspaceLayout workspace;
  sm90::KernelPlan sm90;                                      // if sm90 is the backend
  sm80::KernelPlan sm80;                                      // if sm80 is the backend
  short_sequences::KernelPlan short_sequences;                // if short is the backend
  std::vector<std::pair<std::string, std::string>> refusals;  // for each backend not chosen, the reason
  std::string refusal;                                        // why the requested backend cannot run this problem
};

// If `refusal` is not empty, the requested backend cannot run the problem, and the plan must not be run.
AttentionPlan try_plan_attention(const AttentionProblem& problem, const DeviceInfo& device);

// Throws `refusal` as std::invalid_argument.
AttentionPlan plan_attention(const AttentionProblem& problem, const DeviceInfo& device);

// JSON for the Python class Plan.
std::string to_json(const AttentionPlan& plan);

}  // namespace flashbwd

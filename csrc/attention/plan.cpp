#include "plan.h"

#include <algorithm>
#include <sstream>

#include "../common/check.h"
#include "families.h"

namespace flashbwd {
namespace {

// The kernel families in order of preference.
struct Candidate {
  const char* name;
  const AttentionFamily* family;
  bool DeviceInfo::* built;
};

const Candidate kCandidates[] = {
    {"short", &short_sequences::kFamily, &DeviceInfo::has_attention_short},
    {"sm90", &sm90::kFamily, &DeviceInfo::has_attention_sm90},
    {"sm80", &sm80::kFamily, &DeviceInfo::has_attention_sm80},
};

std::string refusal_of(const Candidate& candidate, const AttentionProblem& problem, const DeviceInfo& device) {
  if (problem.device.type == DeviceType::kCPU) return "q is on the CPU";
  if (!device.usable) return device.why_not;
  if (!(device.*candidate.built)) {
    return std::string("this build holds no ") + candidate.name + " attention kernels";
  }
  return candidate.family->refusal(problem, device);
}

constexpr const char* kReference = "reference";

void append_quoted(std::ostringstream& json, const std::string& text) {
  json << '"';
  for (const char c : text) {
    if (c == '"' || c == '\\') json << '\\';
    json << c;
  }
  json << '"';
}

}  // namespace

AttentionPlan try_plan_attention(const AttentionProblem& problem, const DeviceInfo& device) {
  AttentionPlan plan;
  plan.sm_count = device.sm_count;
  const bool any = problem.backend == "auto";
  const AttentionFamily* chosen = nullptr;
  const AttentionFamily* spare = nullptr;  // supports the problem but expects a later family to be faster
  bool known = any || problem.backend == kReference;
  for (const Candidate& candidate : kCandidates) {
    const bool forced = problem.backend == candidate.name;
    known = known || forced;
    std::string reason;
    if (chosen != nullptr) {
      reason = std::string(chosen->name) + " is preferred";
    } else if (!any && !forced) {
      reason = "backend " + problem.backend + " was requested";
    } else {
      reason = refusal_of(candidate, problem, device);
      if (reason.empty()) {
        if (any && candidate.family->slower != nullptr) reason = candidate.family->slower(problem);
        if (reason.empty()) {
          chosen = candidate.family;
          continue;
        }
        if (spare == nullptr) spare = candidate.family;
      }
      if (forced) plan.refusal = "backend \"" + problem.backend + "\" cannot run this: " + reason;
    }
    plan.refusals.emplace_back(candidate.name, reason);
  }
  if (!known) {
    plan.refusal =
        "backend is \"" + problem.backend + "\", expected \"auto\", \"sm90\", \"sm80\", \"short\" or \"reference\"";
    return plan;
  }
  if (chosen == nullptr && spare != nullptr) {
    chosen = spare;
    const auto is_spare = [&](const auto& refusal) { return refusal.first == spare->name; };
    plan.refusals.erase(std::find_if(plan.refusals.begin(), plan.refusals.end(), is_spare));
  }
  if (chosen != nullptr) {
    plan.backend = chosen->name;
    plan.refusals.emplace_back(kReference, std::string(chosen->name) + " is faster");
    chosen->plan(problem, device, &plan);
    return plan;
  }
  if (problem.has_block_mask) {
    plan.refusal = "no kernel takes this call with a block mask";
    for (const auto& [backend, reason] : plan.refusals) plan.refusal += "; " + backend + ": " + reason;
    return plan;
  }
  plan.backend = kReference;
  plan.schedule = "blockwise matrix products, one batch of heads at a time";
  plan.deterministic = true;
  return plan;
}

AttentionPlan plan_attention(const AttentionProblem& problem, const DeviceInfo& device) {
  AttentionPlan plan = try_plan_attention(problem, device);
  check(plan.refusal.empty(), plan.refusal);
  return plan;
}

std::string to_json(const AttentionPlan& plan) {
  std::ostringstream json;
  json << "{\"backend\": ";
  append_quoted(json, plan.backend);
  json << ", \"tile\": ";
  if (plan.block_m > 0) {
    json << '[' << plan.block_m << ", " << plan.block_n << ']';
  } else {
    json << "null";
  }
  json << ", \"config\": " << plan.config << ", \"splits\": " << plan.splits << ", \"schedule\": ";
  append_quoted(json, plan.schedule);
  json << ", \"workspace_bytes\": " << plan.workspace.bytes
       << ", \"accumulator_bytes\": " << plan.workspace.accumulator_bytes
       << ", \"deterministic\": " << (plan.deterministic ? "true" : "false")
       << ", \"cooperative\": " << (plan.cooperative ? "true" : "false") << ", \"sm_count\": " << plan.sm_count
       << ", \"refusals\": {";
  bool first = true;
  for (const auto& [backend, reason] : plan.refusals) {
    if (!first) json << ", ";
    first = false;
    append_quoted(json, backend);
    json << ": ";
    append_quoted(json, reason);
  }
  json << "}}";
  return json.str();
}

}  // namespace flashbwd

// What an attention kernel family offers. The host half (refusal, plan) is compiled into _C and tested without a
// GPU; the launcher is installed by _C_cuda when it loads.
#pragma once

#include <string>

#include "../common/types.h"
#include "params.h"
#include "plan.h"
#include "problem.h"

namespace flashbwd {

struct AttentionFamily {
  const char* name;  // "sm90", "sm80": also the name of the backend in a Plan
  // Empty when the family takes the problem on this device, else the reason in words.
  std::string (*refusal)(const AttentionProblem&, const DeviceInfo&);
  // Fills tile, schedule, workspace layout. Called only where refusal() is empty.
  void (*plan)(const AttentionProblem&, const DeviceInfo&, AttentionPlan*);
  // Null, or: empty where the family is the faster one, else in words why one behind it goes first if it takes the
  // problem. Called only where refusal() is empty.
  std::string (*slower)(const AttentionProblem&) = nullptr;
};

// Launches on `stream`; returns null, or a message that lives until the next call on this thread.
using AttentionLauncher = const char* (*)(const AttentionBackwardParams&, const AttentionPlan&, void* stream);

}  // namespace flashbwd

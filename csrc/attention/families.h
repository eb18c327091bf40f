// The attention kernel families and their interface. The host half (refusal, plan) is compiled into _C and tested
// without a GPU. _C_cuda installs the launcher when it is loaded.
#pragma once

#include <string>

#include "../common/types.h"
#include "generated_params.h"
#include "params.h"
#include "plan.h"
#include "problem.h"

namespace flashbwd {

struct AttentionFamily {
  const char* name;  // "sm90", "sm80", "short"; also the backend's name in a Plan
  // Returns an empty string if the family supports the problem on this device, otherwise the reason why not.
  std::string (*refusal)(const AttentionProblem&, const DeviceInfo&);
  // Fills in the tile, the schedule and the workspace layout. Called only if refusal() is empty.
  void (*plan)(const AttentionProblem&, const DeviceInfo&, AttentionPlan*);
  // Optional. Returns an empty string if no other family is faster. Otherwise returns the reason why a later family is
  // faster: that family is used if it supports the problem. Called only if refusal() is empty.
  std::string (*slower)(const AttentionProblem&) = nullptr;
};

// Launches on `stream`. Returns null, or a message that stays valid until the next call on this thread.
using AttentionLauncher = const char* (*)(const AttentionBackwardParams&, const AttentionPlan&, void* stream);

// A score_mod that NVRTC compiled into a kernel (flashbwd/flex/generated.py), and what it reads and adds to.
struct CompiledScoreMod : CapturedValues {
  void* kernel;  // CUkernel for the dtype and the tile of the plan
};

// As AttentionLauncher, for a problem with has_score_mod.
using ScoreModLauncher = const char* (*)(const AttentionBackwardParams&, const AttentionPlan&, const CompiledScoreMod&,
                                         void* stream);

namespace sm90 {
extern const AttentionFamily kFamily;
const char* run(const AttentionBackwardParams& params, const AttentionPlan& plan, void* stream);  // only in _C_cuda
// As run(), for a problem with has_score_mod.
const char* run_score_mod(const AttentionBackwardParams& params, const AttentionPlan& plan,
                          const CompiledScoreMod& score_mod, void* stream);
}  // namespace sm90

namespace short_sequences {
extern const AttentionFamily kFamily;
const char* run(const AttentionBackwardParams& params, const AttentionPlan& plan, void* stream);  // only in _C_cuda
}  // namespace short_sequences

namespace sm80 {
extern const AttentionFamily kFamily;
const char* run(const AttentionBackwardParams& params, const AttentionPlan& plan, void* stream);  // only in _C_cuda
// As run(), for a problem with has_score_mod.
const char* run_score_mod(const AttentionBackwardParams& params, const AttentionPlan& plan,
                          const CompiledScoreMod& score_mod, void* stream);
}  // namespace sm80

}  // namespace flashbwd

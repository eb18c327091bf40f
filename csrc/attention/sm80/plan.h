// The interface of the sm_80 kernel family. No CUDA here.
#pragma once

#include "../family.h"

namespace flashbwd::sm80 {

// The host half: which problems the family supports, and its plan.
extern const AttentionFamily kFamily;

// The device half, an AttentionLauncher; only in _C_cuda.
const char* run(const AttentionBackwardParams& params, const AttentionPlan& plan, void* stream);

}  // namespace flashbwd::sm80

// The family as the rest of the library sees it. No CUDA here.
#pragma once

#include "../family.h"

namespace flashbwd::sm80 {

// The host half: what the kernel takes and how it would run it.
extern const AttentionFamily kFamily;

// The device half, in _C_cuda alone: see AttentionLauncher.
const char* run(const AttentionBackwardParams& params, const AttentionPlan& plan, void* stream);

}  // namespace flashbwd::sm80

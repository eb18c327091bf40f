#pragma once

#include "../../params.h"
#include "../../plan.h"

namespace flashbwd::sm90::head_dim_512 {

// Launches all kernels of a plan on `stream`; returns null or a message.
const char* run(const AttentionBackwardParams& params, const AttentionPlan& plan, void* stream);

}  // namespace flashbwd::sm90::head_dim_512

// What the plan of sm90 asks about head dimensions 257 to 512. Only _C has these functions. No CUDA here.
#pragma once

#include <string>

#include "../../../common/types.h"
#include "../../problem.h"

namespace flashbwd {
struct AttentionPlan;
}

namespace flashbwd::sm90::head_dim_512 {

// True if a head dimension is above 256: the other kernels of sm90 have no tile for it.
bool is_for(const AttentionProblem& problem);

// As AttentionFamily::refusal and AttentionFamily::plan. The checks of all kernels of sm90 have passed.
std::string refusal(const AttentionProblem& problem);
void plan(const AttentionProblem& problem, AttentionPlan* plan);

}  // namespace flashbwd::sm90::head_dim_512

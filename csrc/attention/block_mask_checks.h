// Checks of the lists of a block mask.
#pragma once

#include <cstdint>
#include <string>

#include "problem.h"

namespace flashbwd {

// Checks the arguments of a block mask, if there is one, and describes it in `problem`. The contents of the lists are
// on the GPU: the function that makes them checks them.
void check_block_mask(const AttentionArguments& arguments, AttentionProblem* problem);

// Why a kernel with these tiles cannot read the lists of a block mask; empty if it can, or if there is no block mask.
std::string refuse_block_tile(const AttentionProblem& problem, int64_t block_m, int64_t block_n);

}  // namespace flashbwd

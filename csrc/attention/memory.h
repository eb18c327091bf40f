// Checks of the memory that the caller gives attention_backward to write to.
#pragma once

#include "problem.h"

namespace flashbwd {

// dq, dk, dv and the workspace share no byte with an input or with one another. Their byte ranges may interleave, as
// gradients in one packed (B, S, 3, H, D) buffer do. Throws as check_attention.
void check_memory(const AttentionArguments& arguments);

}  // namespace flashbwd

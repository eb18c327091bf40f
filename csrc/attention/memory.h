// Checks of the output buffers that the caller passes to attention_backward.
#pragma once

#include "problem.h"

namespace flashbwd {

// Checks that dq, dk, dv and the workspace share no byte with an input or with each other. Their address ranges may
// interleave, as gradients in one packed (B, S, 3, H, D) buffer do. Throws as check_attention does.
void check_memory(const AttentionArguments& arguments);

}  // namespace flashbwd

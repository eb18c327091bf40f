// The gradient of the attention sink, computed from lse and delta of each row.
#pragma once

#include "../params.h"
#include "lse_delta.h"

namespace flashbwd {

// Runs after launch_preprocess on the same stream. Does nothing if there is no sink. Returns null or a message.
const char* launch_sink_gradient(const AttentionBackwardParams& params, const LseDelta& lse_delta, void* stream);

}  // namespace flashbwd

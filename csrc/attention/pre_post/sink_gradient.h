// The gradient of the attention sink, computed from the row statistics.
#pragma once

#include "../params.h"
#include "row_statistics.h"

namespace flashbwd {

// Runs after launch_preprocess on the same stream. Does nothing if there is no sink. Returns null or a message.
const char* launch_sink_gradient(const AttentionBackwardParams& params, const RowStatistics& statistics, void* stream);

}  // namespace flashbwd

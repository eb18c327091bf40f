// The gradient of the sink from row statistics.
#pragma once

#include "params.h"
#include "row_statistics.h"

namespace flashbwd {

// After launch_preprocess, on the same stream. Launches nothing where no sink was given; null or a message.
const char* launch_sink_gradient(const AttentionBackwardParams& params, const RowStatistics& statistics, void* stream);

}  // namespace flashbwd

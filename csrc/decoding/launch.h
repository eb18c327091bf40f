// Launches of flex decoding.
#pragma once

#include "../common/types.h"
#include "params.h"
#include "plan.h"

namespace flashbwd {

// Runs the split kernel, `kernel` (a CUkernel compiled at run time) or, when null, the one without modifications, and
// with more than one split the combine kernel. Returns null or a message.
const char* run_decoding(const DecodingParams& params, DecodingTile tile, bool bfloat16, void* kernel,
                         const DeviceInfo& info, void* stream);

}  // namespace flashbwd

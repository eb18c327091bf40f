// Launchers of the LayerNorm kernels: parameters to grids.
#pragma once

#include <cstdint>

#include "../common/types.h"
#include "params.h"

namespace flashbwd {

// Launches on `stream`; returns null, or a message that lives until the next call on this thread.
const char* launch_layer_norm_backward(const LayerNormBackwardParams& params, const DeviceInfo& device, void* stream);

// Bytes of scratch that the launch needs.
int64_t layer_norm_backward_workspace(const LayerNormBackwardParams& params, const DeviceInfo& device);

const char* launch_layer_norm_forward(const LayerNormForwardParams& params, void* stream);

}  // namespace flashbwd

// Launchers of the LayerNorm and RMSNorm kernels.
#pragma once

#include <cstdint>

#include "../common/types.h"
#include "params.h"

namespace flashbwd {

// Launches the backward on `stream`. Returns null, or an error message, which is a static string.
const char* launch_layer_norm_backward(const LayerNormBackwardParams& params, const DeviceInfo& device, void* stream);

// Size in bytes of the workspace that the launch needs.
int64_t layer_norm_backward_workspace(const LayerNormBackwardParams& params, const DeviceInfo& device);

// Launches the forward on `stream`. Returns null, or an error message.
const char* launch_layer_norm_forward(const LayerNormForwardParams& params, void* stream);

}  // namespace flashbwd

// One instantiation of a kernel: defined in launch.cuh, instantiated in a file for each (head dimension, dtype).
#pragma once

#include "kernel_params.h"

namespace flashbwd::sm90 {

// Launches the kernel for row kTileIndex of kTiles on `stream`; returns null or a message.
template <typename T, int kTileIndex>
const char* launch(const KernelParams& params, void* stream);

}  // namespace flashbwd::sm90

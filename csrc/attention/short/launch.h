// Launches the kernel. launch() is defined in launch.cuh; each (head dimension, dtype) is instantiated in its own file.
#pragma once

#include "config.h"
#include "kernel_params.h"

namespace flashbwd::short_sequences {

// Launches the kernel for row tile_index of kTiles, which must have head dimension kHeadDim, on `stream`. Returns null
// or a message.
template <typename T, int kHeadDim>
const char* launch(int tile_index, const KernelParams& params, bool features, void* stream);

}  // namespace flashbwd::short_sequences

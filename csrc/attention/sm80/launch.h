// Launches the main kernel. launch() is defined in launch.cuh; each (head dimension, dtype) is instantiated in its own
// file.
#pragma once

#include "../plan.h"
#include "config.h"
#include "kernel_params.h"

namespace flashbwd::sm80 {

// Launches the kernel for row tile_index of kTiles, which must have head dimension kHeadDim and elements of type T, on
// `stream`. Returns null or a message.
template <typename T, int kHeadDim>
const char* launch(int tile_index, const KernelParams& params, Variant variant, void* stream);

}  // namespace flashbwd::sm80

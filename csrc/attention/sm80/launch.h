// From parameters to a launch. launch() is defined in launch.cuh and instantiated a (head dimension, dtype) a file.
#pragma once

#include "../plan.h"
#include "config.h"
#include "kernel_params.h"

namespace flashbwd::sm80 {

// Launches the kernel for row tile_index of kTiles, one of head dimension kHeadDim and elements of T, on `stream`;
// returns null or a message.
template <typename T, int kHeadDim>
const char* launch(int tile_index, const KernelParams& params, Extras extras, void* stream);

}  // namespace flashbwd::sm80

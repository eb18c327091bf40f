// From parameters to a launch of one instantiation. launch() is defined in launch.cuh and instantiated a (tile, dtype)
// a file.
#pragma once

#include "../plan.h"
#include "kernel_params.h"

namespace flashbwd::sm80 {

// Launches the kernel for row kTileIndex of kTiles on `stream`; returns null or a message. `features`: the variant with
// bias, ALiBi, softcap and dropout.
template <typename T, int kTileIndex>
const char* launch(const KernelParams& params, bool features, void* stream);

}  // namespace flashbwd::sm80

// The kernels of one head dimension and dtype. Each file in instantiations/ compiles those of one pair.
#pragma once

#include "kernel_params.h"

namespace flashbwd::sm90 {

// Launches the kernel of row `tile_index` of kTiles, whose head dimension is kHeadDim, on `stream`; returns null or a
// message. Defined in launch.cuh.
template <typename T, int kHeadDim>
const char* launch(int tile_index, const KernelParams& params, void* stream);

}  // namespace flashbwd::sm90

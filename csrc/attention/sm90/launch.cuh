#pragma once

#include <cuda_runtime.h>

#include "../../common/launch.h"
#include "kernel.cuh"
#include "launch.h"

namespace flashbwd::sm90 {

template <typename T, int kTileIndex>
const char* launch(const KernelParams& params, void* stream) {
  constexpr Tile kTile = kTiles[kTileIndex];
  using Traits = sm90::Traits<T, kTile.head_dim, kTile.block_m, kTile.block_n, kTile.stages>;
  constexpr int kSharedBytes = sizeof(typename Traits::SharedStorage);
  static_assert(kSharedBytes <= 227 * 1024, "the tile does not fit in shared memory");
  const auto kernel = backward_kernel<Traits>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error == cudaSuccess) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(params.ctas);
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = kSharedBytes;
    config.stream = static_cast<cudaStream_t>(stream);
    cudaLaunchAttribute attribute = overlap_with_launch_before();
    config.attrs = &attribute;
    config.numAttrs = 1;
    error = launch_kernel(config, kernel, params);
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace flashbwd::sm90

#pragma once

#include <cuda_runtime.h>

#include "../../common/launch.h"
#include "kernel.cuh"
#include "launch.h"

namespace flashbwd::short_sequences {

template <typename Traits>
const char* launch_kernel_variant(const KernelParams& params, void* stream) {
  const auto kernel = backward_kernel<Traits>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, params.shared.bytes);
  if (error == cudaSuccess) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(params.attention.heads_kv), static_cast<unsigned>(params.slots));
    config.blockDim = dim3(Traits::kThreads);
    config.dynamicSmemBytes = params.shared.bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    error = launch_kernel(config, kernel, params);
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <typename T, int kHeadDim, int kTileIndex>
const char* launch_row(int tile_index, const KernelParams& params, bool features, void* stream) {
  if constexpr (kTileIndex == kNumTiles) {
    return "short: no such tile";
  } else {
    if constexpr (kTiles[kTileIndex].head_dim == kHeadDim) {
      if (tile_index == kTileIndex) {
        return features ? launch_kernel_variant<Traits<T, kTileIndex, true>>(params, stream)
                        : launch_kernel_variant<Traits<T, kTileIndex, false>>(params, stream);
      }
    }
    return launch_row<T, kHeadDim, kTileIndex + 1>(tile_index, params, features, stream);
  }
}

template <typename T, int kHeadDim>
const char* launch(int tile_index, const KernelParams& params, bool features, void* stream) {
  return launch_row<T, kHeadDim, 0>(tile_index, params, features, stream);
}

}  // namespace flashbwd::short_sequences

#pragma once

#include <cuda_runtime.h>

#include "../../common/launch.h"
#include "kernel.cuh"
#include "launch.h"

namespace flashbwd::sm80 {

template <typename Traits>
const char* launch_variant(const KernelParams& params, void* stream) {
  constexpr int kSharedBytes = sizeof(typename Traits::SharedStorage);
  static_assert(kSharedBytes <= Traits::kTile.shared_bytes() + kAlignmentBytes, "the tile table counts too little");
  const auto kernel = backward_kernel<Traits>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error == cudaSuccess) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(params.jobs));
    config.blockDim = dim3(Traits::kThreads);
    config.dynamicSmemBytes = kSharedBytes;
    config.stream = static_cast<cudaStream_t>(stream);
    error = launch_kernel(config, kernel, params);
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <typename T, int kTileIndex>
const char* launch(const KernelParams& params, bool features, void* stream) {
  if constexpr (kTiles[kTileIndex].features) {
    if (features) return launch_variant<Traits<T, kTileIndex, true>>(params, stream);
  }
  return features ? "sm80: the tile has no variant for bias, ALiBi, softcap and dropout"
                  : launch_variant<Traits<T, kTileIndex, false>>(params, stream);
}

}  // namespace flashbwd::sm80

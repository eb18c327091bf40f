#pragma once

#include <cuda_runtime.h>

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
    kernel<<<static_cast<unsigned>(params.jobs), kThreads, kSharedBytes, static_cast<cudaStream_t>(stream)>>>(params);
    error = cudaGetLastError();
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace flashbwd::sm90

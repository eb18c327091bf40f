#pragma once

#include <cuda_runtime.h>

#include "../../common/launch.h"
#include "kernel.cuh"
#include "large_head_dim/kernel.cuh"

namespace flashbwd::sm90 {

template <typename Traits>
const char* launch_kernel(void (*kernel)(KernelParams), int threads, const KernelParams& params, void* stream) {
  constexpr int kSharedBytes = sizeof(typename Traits::SharedStorage);
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error == cudaSuccess) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(params.schedule.wave_size * Traits::kTile.ctas);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = kSharedBytes;
    config.stream = static_cast<cudaStream_t>(stream);
    cudaLaunchAttribute attributes[] = {programmatic_dependent_launch(), cooperative_launch()};
    config.attrs = attributes;
    config.numAttrs = params.schedule.dispatch == Dispatch::kStatic ? 2 : 1;
    error = flashbwd::launch_kernel(config, kernel, params);
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <typename T, int kTileIndex, bool kByHeads, bool kLastWritesDq>
const char* launch_kernel(const KernelParams& params, void* stream) {
  if constexpr (is_large(kTiles[kTileIndex])) {
    using Traits = large_head_dim::Traits<T, kTileIndex, kByHeads>;
    return launch_kernel<Traits>(large_head_dim::backward_kernel<Traits>, threads_of(kTiles[kTileIndex]), params,
                                 stream);
  } else {
    using Traits = sm90::Traits<T, kTileIndex, kByHeads, kLastWritesDq>;
    return launch_kernel<Traits>(backward_kernel<Traits>, threads_of(kTiles[kTileIndex]), params, stream);
  }
}

// The kernel for a tile and the choices of the schedule that are made when the kernel is compiled.
template <typename T, int kTileIndex>
const char* launch_tile(const KernelParams& params, void* stream) {
  constexpr Tile kTile = kTiles[kTileIndex];
  const bool writes_dq = params.schedule.last_add_writes_dq, by_heads = params.schedule.heads_outermost;
  if constexpr (last_writes_dq(kTile)) {
    if constexpr (!has(kTile, feature::kBlockMask)) {
      if (by_heads && (writes_dq || by_heads_counts_adds(kTile))) {
        return launch_kernel<T, kTileIndex, true, true>(params, stream);
      }
    }
    if (writes_dq) return launch_kernel<T, kTileIndex, false, true>(params, stream);
  }
  if constexpr (!by_heads_counts_adds(kTile) && !has(kTile, feature::kBlockMask) && kTile.batch_entries == 1) {
    if (by_heads) return launch_kernel<T, kTileIndex, true, false>(params, stream);
  }
  return launch_kernel<T, kTileIndex, false, false>(params, stream);
}

// Compiles a kernel for each row of kTiles with this head dimension, from row kTileIndex on; none for generated ones.
template <typename T, int kHeadDim, int kTileIndex>
const char* launch(int tile_index, const KernelParams& params, void* stream) {
  if constexpr (kTileIndex == kNumTiles) {
    return "sm90: no such tile";
  } else {
    if constexpr (kTiles[kTileIndex].head_dim == kHeadDim && !has(kTiles[kTileIndex], feature::kGenerated)) {
      if (tile_index == kTileIndex) return launch_tile<T, kTileIndex>(params, stream);
    }
    return launch<T, kHeadDim, kTileIndex + 1>(tile_index, params, stream);
  }
}

}  // namespace flashbwd::sm90

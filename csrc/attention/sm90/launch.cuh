#pragma once

#include <cuda_runtime.h>

#include "../../common/launch.h"
#include "kernel.cuh"
#include "large_head_dim/kernel.cuh"
#include "launch.h"

namespace flashbwd::sm90 {

// The kernel function and its number of threads, for either kind of kernel.
template <typename T, int kTileIndex, bool kByHeads, bool kLastWritesDq, bool kLarge = is_large(kTiles[kTileIndex])>
struct Kernel {
  using Traits = sm90::Traits<T, kTileIndex, kByHeads, kLastWritesDq>;
  static constexpr auto kFunction = backward_kernel<Traits>;
  static constexpr int kBlockThreads = kThreads;
};

template <typename T, int kTileIndex, bool kByHeads, bool kLastWritesDq>
struct Kernel<T, kTileIndex, kByHeads, kLastWritesDq, true> {
  static_assert(!kLastWritesDq, "parts of a tile have turns of their own");
  using Traits = large_head_dim::Traits<T, kTileIndex, kByHeads>;
  static constexpr auto kFunction = large_head_dim::backward_kernel<Traits>;
  static constexpr int kBlockThreads = kLargeThreads;
};

template <typename Kernel>
const char* launch(const KernelParams& params, void* stream) {
  constexpr int kSharedBytes = sizeof(typename Kernel::Traits::SharedStorage);
  static_assert(kSharedBytes <= 227 * 1024, "the tile does not fit in shared memory");
  const auto kernel = Kernel::kFunction;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error == cudaSuccess) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(params.schedule.ctas);
    config.blockDim = dim3(Kernel::kBlockThreads);
    config.dynamicSmemBytes = kSharedBytes;
    config.stream = static_cast<cudaStream_t>(stream);
    cudaLaunchAttribute attributes[] = {overlap_with_launch_before(), begin_together()};
    config.attrs = attributes;
    config.numAttrs = params.schedule.dispatch == Dispatch::kStatic ? 2 : 1;
    error = launch_kernel(config, kernel, params);
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <typename T, int kTileIndex>
const char* launch(const KernelParams& params, void* stream) {
  constexpr Tile kTile = kTiles[kTileIndex];
  const bool writes_dq = params.schedule.last_add_writes_dq, by_heads = params.schedule.heads_outermost;
  if constexpr (last_writes_dq(kTile)) {
    if (by_heads && (writes_dq || by_heads_in_turn_only(kTile))) {
      return launch<Kernel<T, kTileIndex, true, true>>(params, stream);
    }
    if (writes_dq) return launch<Kernel<T, kTileIndex, false, true>>(params, stream);
  }
  if constexpr (!by_heads_in_turn_only(kTile) && !has_block_mask(kTile.feature)) {
    if (by_heads) return launch<Kernel<T, kTileIndex, true, false>>(params, stream);
  }
  return launch<Kernel<T, kTileIndex, false, false>>(params, stream);
}

}  // namespace flashbwd::sm90

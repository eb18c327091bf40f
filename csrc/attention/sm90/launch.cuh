#pragma once

#include <cuda_runtime.h>

#include "../../common/launch.h"
#include "kernel.cuh"
#include "launch.h"
#include "wide/kernel.cuh"

namespace flashbwd::sm90 {

// What differs between the two kernels: how they are cut, and how many threads they take.
template <typename T, int kTileIndex, bool kFeatures, bool kByHeads, bool kWide = is_wide(kTiles[kTileIndex])>
struct Kernel {
  static_assert(!kFeatures, "features are of wide tiles");
  using Traits = sm90::Traits<T, kTileIndex, kByHeads>;
  static constexpr auto kFunction = backward_kernel<Traits>;
  static constexpr int kBlockThreads = kThreads;
};

template <typename T, int kTileIndex, bool kFeatures, bool kByHeads>
struct Kernel<T, kTileIndex, kFeatures, kByHeads, true> {
  using Traits = wide::Traits<T, kTileIndex, kFeatures, kByHeads>;
  static constexpr auto kFunction = wide::backward_kernel<Traits>;
  static constexpr int kBlockThreads = kWideThreads;
};

template <typename Kernel>
const char* launch(const KernelParams& params, void* stream) {
  constexpr int kSharedBytes = sizeof(typename Kernel::Traits::SharedStorage);
  static_assert(kSharedBytes <= 227 * 1024, "the tile does not fit in shared memory");
  const auto kernel = Kernel::kFunction;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error == cudaSuccess) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(params.ctas);
    config.blockDim = dim3(Kernel::kBlockThreads);
    config.dynamicSmemBytes = kSharedBytes;
    config.stream = static_cast<cudaStream_t>(stream);
    cudaLaunchAttribute attributes[] = {overlap_with_launch_before(), begin_together()};
    config.attrs = attributes;
    const bool waits = params.wave_size > 0 && params.attention.deterministic;  // for jobs of other CTAs
    config.numAttrs = waits ? 2 : 1;
    error = launch_kernel(config, kernel, params);
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <typename T, int kTileIndex, bool kFeatures>
const char* launch(const KernelParams& params, void* stream) {
  return params.by_heads ? launch<Kernel<T, kTileIndex, kFeatures, true>>(params, stream)
                         : launch<Kernel<T, kTileIndex, kFeatures, false>>(params, stream);
}

}  // namespace flashbwd::sm90

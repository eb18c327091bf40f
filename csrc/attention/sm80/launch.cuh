#pragma once

#include <cuda_runtime.h>

#include "../../common/launch.h"
#include "kernel.cuh"
#include "launch.h"
#include "wide_kernel.cuh"

namespace flashbwd::sm80 {

inline const char* launch_ctas(void (*kernel)(KernelParams), const KernelParams& params, int64_t ctas, int threads,
                               int shared_bytes, void* stream) {
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error == cudaSuccess) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(ctas));
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    error = launch_kernel(config, kernel, params);
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <typename T, int kTileIndex, bool kFeatures, typename M>
const char* launch_products(const KernelParams& params, void* stream) {
  constexpr Tile kTile = kTiles[kTileIndex];
  if constexpr (kTile.wide) {
    using Variant = WideTraits<T, kTileIndex, kFeatures, M>;
    constexpr int kSharedBytes = sizeof(typename Variant::SharedStorage);
    static_assert(kSharedBytes <= kTile.shared_bytes() + kAlignmentBytes, "the tile table counts too little");
    return launch_ctas(wide_kernel<Variant>, params, params.workers, Variant::kThreads, kSharedBytes, stream);
  } else {
    using Variant = Traits<T, kTileIndex, kFeatures, M>;
    constexpr int kSharedBytes = sizeof(typename Variant::SharedStorage);
    static_assert(kSharedBytes <= kTile.shared_bytes() + kAlignmentBytes, "the tile table counts too little");
    return launch_ctas(backward_kernel<Variant>, params, params.jobs, Variant::kThreads, kSharedBytes, stream);
  }
}

template <typename T, int kTileIndex, bool kFeatures>
const char* launch_variant(const KernelParams& params, void* stream) {
  if constexpr (sizeof(T) == 4) {
    if (params.attention.tf32) return launch_products<T, kTileIndex, kFeatures, MmaFp32<false>>(params, stream);
  }
  return launch_products<T, kTileIndex, kFeatures, Mma<T>>(params, stream);
}

template <typename T, int kTileIndex>
const char* launch(const KernelParams& params, bool features, void* stream) {
  return features ? launch_variant<T, kTileIndex, true>(params, stream)
                  : launch_variant<T, kTileIndex, false>(params, stream);
}

}  // namespace flashbwd::sm80

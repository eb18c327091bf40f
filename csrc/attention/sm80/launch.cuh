#pragma once

#include <cuda_runtime.h>

#include "../../common/launch.h"
#include "kernel.cuh"
#include "large_head_dim_kernel.cuh"
#include "launch.h"

namespace flashbwd::sm80 {

inline const char* launch_workers(void (*kernel)(KernelParams), const KernelParams& params, int threads,
                                  int shared_bytes, void* stream) {
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error == cudaSuccess) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(params.workers));
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    error = launch_kernel(config, kernel, params);
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <typename T, int kTileIndex, Extras kExtras, typename M>
const char* launch_products(const KernelParams& params, void* stream) {
  constexpr Tile kTile = kTiles[kTileIndex];
  if constexpr (kTile.large) {
    using Variant = LargeTraits<T, kTileIndex, kExtras, M>;
    constexpr int kSharedBytes = sizeof(typename Variant::SharedStorage);
    static_assert(kSharedBytes <= kTile.shared_bytes() + kAlignmentBytes, "the tile table counts too little");
    return launch_workers(large_kernel<Variant>, params, Variant::kThreads, kSharedBytes, stream);
  } else {
    using Variant = Traits<T, kTileIndex, kExtras, M>;
    constexpr int kSharedBytes = sizeof(typename Variant::SharedStorage);
    static_assert(kSharedBytes <= kTile.shared_bytes() + kAlignmentBytes, "the tile table counts too little");
    const int more_keys = Variant::kLoadsAhead && params.loads_ahead ? keys_bytes(kTile) : 0;
    return launch_workers(backward_kernel<Variant>, params, Variant::kThreads, kSharedBytes + more_keys, stream);
  }
}

template <typename T, int kTileIndex, Extras kExtras>
const char* launch_variant(const KernelParams& params, void* stream) {
  if constexpr (sizeof(T) == 4) {
    using One = MmaFp32<Fp32Products::kOne>;
    if (params.attention.tf32) return launch_products<T, kTileIndex, kExtras, One>(params, stream);
  }
  return launch_products<T, kTileIndex, kExtras, Mma<T>>(params, stream);
}

// Finds row tile_index of kTiles, searching from row kFirst on.
template <typename T, int kHeadDim, int kFirst>
const char* launch_row(int tile_index, const KernelParams& params, Extras extras, void* stream) {
  if constexpr (kFirst == kNumTiles) {
    return "sm80: no such tile";
  } else {
    if constexpr (kTiles[kFirst].head_dim == kHeadDim && kTiles[kFirst].element_bytes == sizeof(T)) {
      if (tile_index == kFirst) {
        if (extras == Extras::kNone) return launch_variant<T, kFirst, Extras::kNone>(params, stream);
        if constexpr (has_whole_heads(kTiles[kFirst])) {
          if (extras == Extras::kWholeHeads) return launch_variant<T, kFirst, Extras::kWholeHeads>(params, stream);
        }
        if constexpr (has_loads_ahead(kTiles[kFirst])) {
          if (extras == Extras::kLoadsAhead) return launch_variant<T, kFirst, Extras::kLoadsAhead>(params, stream);
        }
        if constexpr (has_first_stores(kTiles[kFirst])) {
          if (extras == Extras::kFirstStores) return launch_variant<T, kFirst, Extras::kFirstStores>(params, stream);
        }
        if constexpr (has_bias_kernel(kTiles[kFirst])) {
          if (extras == Extras::kBias) return launch_variant<T, kFirst, Extras::kBias>(params, stream);
        }
        if constexpr (has_shared_bias_kernel(kTiles[kFirst])) {
          if (extras == Extras::kSharedBias) return launch_variant<T, kFirst, Extras::kSharedBias>(params, stream);
        }
        return launch_variant<T, kFirst, Extras::kAll>(params, stream);
      }
    }
    return launch_row<T, kHeadDim, kFirst + 1>(tile_index, params, extras, stream);
  }
}

template <typename T, int kHeadDim>
const char* launch(int tile_index, const KernelParams& params, Extras extras, void* stream) {
  return launch_row<T, kHeadDim, 0>(tile_index, params, extras, stream);
}

}  // namespace flashbwd::sm80

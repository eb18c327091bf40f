#pragma once

#include <cuda_runtime.h>

#include "../../common/launch.h"
#include "kernel.cuh"
#include "large_head_dim_kernel.cuh"
#include "launch.h"

namespace flashbwd::sm80 {

inline const char* launch_persistent(void (*kernel)(KernelParams), const KernelParams& params, int threads,
                                     int shared_bytes, void* stream) {
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error == cudaSuccess) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(params.schedule.num_ctas));
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    error = launch_kernel(config, kernel, params);
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <typename T, int kTileIndex, Variant kVariant, typename M>
const char* launch_kernel_variant(const KernelParams& params, void* stream) {
  constexpr Tile kTile = kTiles[kTileIndex];
  if constexpr (kTile.large) {
    using KernelTraits = LargeTraits<T, kTileIndex, kVariant, M>;
    constexpr int kSharedBytes = sizeof(typename KernelTraits::SharedStorage);
    static_assert(kSharedBytes <= kTile.shared_bytes() + kAlignmentBytes, "the tile table counts too little");
    return launch_persistent(large_kernel<KernelTraits>, params, KernelTraits::kThreads, kSharedBytes, stream);
  } else {
    using KernelTraits = Traits<T, kTileIndex, kVariant, M>;
    constexpr int kSharedBytes = sizeof(typename KernelTraits::SharedStorage);
    static_assert(kSharedBytes <= kTile.shared_bytes() + kAlignmentBytes, "the tile table counts too little");
    const int more_keys = KernelTraits::kLoadsAhead && params.schedule.loads_ahead ? keys_bytes(kTile) : 0;
    return launch_persistent(backward_kernel<KernelTraits>, params, KernelTraits::kThreads, kSharedBytes + more_keys,
                             stream);
  }
}

template <typename T, int kTileIndex, Variant kVariant>
const char* launch_variant(const KernelParams& params, void* stream) {
  if constexpr (sizeof(T) == 4) {
    using One = MmaFp32<Fp32Products::kOne>;
    if (params.attention.tf32) return launch_kernel_variant<T, kTileIndex, kVariant, One>(params, stream);
  }
  return launch_kernel_variant<T, kTileIndex, kVariant, Mma<T>>(params, stream);
}

// Finds row tile_index of kTiles, searching from row kFirst on.
template <typename T, int kHeadDim, int kFirst>
const char* launch_row(int tile_index, const KernelParams& params, Variant variant, void* stream) {
  if constexpr (kFirst == kNumTiles) {
    return "sm80: no such tile";
  } else {
    if constexpr (kTiles[kFirst].head_dim == kHeadDim && kTiles[kFirst].element_bytes == sizeof(T)) {
      if (tile_index == kFirst) {
        if (variant == Variant::kPlain) return launch_variant<T, kFirst, Variant::kPlain>(params, stream);
        if constexpr (has_whole_heads(kTiles[kFirst])) {
          if (variant == Variant::kWholeHeads) return launch_variant<T, kFirst, Variant::kWholeHeads>(params, stream);
        }
        if constexpr (has_loads_ahead(kTiles[kFirst])) {
          if (variant == Variant::kLoadsAhead) return launch_variant<T, kFirst, Variant::kLoadsAhead>(params, stream);
        }
        if constexpr (has_first_stores(kTiles[kFirst])) {
          if (variant == Variant::kFirstStores) return launch_variant<T, kFirst, Variant::kFirstStores>(params, stream);
        }
        if constexpr (has_bias_kernel(kTiles[kFirst])) {
          if (variant == Variant::kBias) return launch_variant<T, kFirst, Variant::kBias>(params, stream);
        }
        if constexpr (has_shared_bias_kernel(kTiles[kFirst])) {
          if (variant == Variant::kSharedBias) return launch_variant<T, kFirst, Variant::kSharedBias>(params, stream);
        }
        if constexpr (has_block_mask_kernel(kTiles[kFirst])) {
          if (variant == Variant::kBlockMask) return launch_variant<T, kFirst, Variant::kBlockMask>(params, stream);
        }
        return launch_variant<T, kFirst, Variant::kAllFeatures>(params, stream);
      }
    }
    return launch_row<T, kHeadDim, kFirst + 1>(tile_index, params, variant, stream);
  }
}

template <typename T, int kHeadDim>
const char* launch(int tile_index, const KernelParams& params, Variant variant, void* stream) {
  return launch_row<T, kHeadDim, 0>(tile_index, params, variant, stream);
}

}  // namespace flashbwd::sm80

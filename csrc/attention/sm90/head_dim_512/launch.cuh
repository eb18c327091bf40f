#pragma once

#include <cuda_runtime.h>

#include "../../../common/launch.h"
#include "key_gradients.cuh"
#include "query_gradients.cuh"

namespace flashbwd::sm90::head_dim_512 {

// `overlaps`: the kernel may start before the previous launch has finished.
template <typename Storage>
const char* launch_kernel(void (*kernel)(KernelParams), int32_t ctas, bool overlaps, const KernelParams& params,
                          void* stream) {
  static_assert(sizeof(Storage) <= kSharedMemoryBytes, "the tiles do not fit in shared memory");
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Storage));
  if (error == cudaSuccess) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(ctas);
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = sizeof(Storage);
    config.stream = static_cast<cudaStream_t>(stream);
    cudaLaunchAttribute attribute = programmatic_dependent_launch();
    config.attrs = &attribute;
    config.numAttrs = overlaps ? 1 : 0;
    error = flashbwd::launch_kernel(config, kernel, params);
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <typename T, int kHeadDim>
const char* launch(const KernelParams& params, void* stream) {
  using Traits = head_dim_512::Traits<T, kHeadDim>;
  const bool has_keys = params.key_tiles > 0;
  if (has_keys) {
    const char* const error = launch_kernel<typename Traits::KeyGradientsStorage>(
        key_gradients_kernel<Traits>, 2 * params.key_tiles, true, params, stream);
    if (error != nullptr) return error;
  }
  if (params.query_tiles == 0) return nullptr;
  // Without keys the previous launch is the preprocess, and the kernel for dq does not wait for it.
  return launch_kernel<typename Traits::QueryGradientsStorage>(query_gradients_kernel<Traits>, params.query_tiles,
                                                               has_keys, params, stream);
}

}  // namespace flashbwd::sm90::head_dim_512

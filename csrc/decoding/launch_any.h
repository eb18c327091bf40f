// Launching a kernel that the build holds, or one compiled at run time, with any parameters.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <mutex>
#include <set>
#include <utility>

#include "../common/launch.h"

namespace flashbwd {

inline cudaLaunchConfig_t config_of(dim3 grid, int threads, int bytes, void* stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  return config;
}

// What a kernel must be allowed, once a device, which is the current one.
inline cudaError_t allow(const void* kernel, int shared_bytes, int device) {
  static thread_local std::pair<const void*, int> last = {nullptr, -1};
  static std::mutex mutex;
  static std::set<std::pair<const void*, int>> allowed;
  const std::pair<const void*, int> wanted = {kernel, device};
  if (wanted == last) return cudaSuccess;
  const std::lock_guard<std::mutex> lock(mutex);
  if (allowed.count(wanted) == 0) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return error;
    allowed.insert(wanted);
  }
  last = wanted;
  return cudaSuccess;
}

template <class Params>
cudaError_t launch_prebuilt(const Params& p, void (*kernel)(Params), cudaLaunchConfig_t config, int device,
                            int cluster_size = 1) {
  if (kernel == nullptr) return cudaErrorInvalidValue;
  const cudaError_t error =
      allow(reinterpret_cast<const void*>(kernel), static_cast<int>(config.dynamicSmemBytes), device);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {1, static_cast<unsigned>(cluster_size), 1};
  config.attrs = &cluster;
  config.numAttrs = cluster_size > 1 ? 1 : 0;
  return launch_kernel(config, kernel, p);
}

// A function of the driver, without linking libcuda.
template <typename Function>
Function* driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found);
  return error == cudaSuccess ? reinterpret_cast<Function*>(function) : nullptr;
}

// A kernel compiled at run time belongs to the driver's interface.
inline cudaError_t launch_compiled(const void* params, void* kernel, const cudaLaunchConfig_t& config,
                                   int cluster_size = 1) {
  static const auto launch = driver_function<decltype(cuLaunchKernelEx)>("cuLaunchKernelEx");
  if (launch == nullptr) return cudaErrorUnknown;
  CUlaunchAttribute cluster = {};
  cluster.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
  cluster.value.clusterDim.x = cluster.value.clusterDim.z = 1;
  cluster.value.clusterDim.y = cluster_size;
  CUlaunchConfig driver_config = {};
  driver_config.gridDimX = config.gridDim.x;
  driver_config.gridDimY = config.gridDim.y;
  driver_config.gridDimZ = 1;
  driver_config.blockDimX = config.blockDim.x;
  driver_config.blockDimY = driver_config.blockDimZ = 1;
  driver_config.sharedMemBytes = static_cast<unsigned>(config.dynamicSmemBytes);
  driver_config.hStream = config.stream;
  driver_config.attrs = &cluster;
  driver_config.numAttrs = cluster_size > 1 ? 1 : 0;
  void* arguments[] = {const_cast<void*>(params)};
  const CUresult result = launch(&driver_config, static_cast<CUfunction>(kernel), arguments, nullptr);
  return result == CUDA_SUCCESS ? cudaSuccess : static_cast<cudaError_t>(result);  // the numbers are the same
}

}  // namespace flashbwd

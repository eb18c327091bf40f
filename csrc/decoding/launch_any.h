// Launching a kernel that the build holds, or one compiled at run time, with any parameters.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <map>
#include <mutex>
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

// What a launch has to know of a kernel on a device.
struct Permission {
  const void* kernel = nullptr;
  int device = -1;
  bool waits = false;  // for the launch before it: code for compute capability 8 that runs on 9 does not
};

// Allows a kernel its shared memory, once a device, which is the current one.
inline cudaError_t allow(const void* kernel, int shared_bytes, int device, Permission& permission) {
  static thread_local Permission last;
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, Permission> all;
  if (last.kernel != kernel || last.device != device) {
    const std::lock_guard<std::mutex> lock(mutex);
    Permission& known = all[{kernel, device}];
    if (known.kernel == nullptr) {
      cudaFuncAttributes attributes;
      cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
      if (error == cudaSuccess)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
      if (error != cudaSuccess) return error;
      known = {kernel, device, attributes.ptxVersion >= 90};
    }
    last = known;
  }
  permission = last;
  return cudaSuccess;
}

// How a kernel is launched beside its grid.
struct LaunchForm {
  int device = 0;
  int cluster = 1;
  bool overlaps = false;  // with the end of the launch before it, for which it waits
};

template <class Params>
cudaError_t launch_prebuilt(const Params& p, void (*kernel)(Params), cudaLaunchConfig_t config, LaunchForm form) {
  if (kernel == nullptr) return cudaErrorInvalidValue;
  Permission permission;
  const cudaError_t error =
      allow(reinterpret_cast<const void*>(kernel), static_cast<int>(config.dynamicSmemBytes), form.device, permission);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  if (form.cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {1, static_cast<unsigned>(form.cluster), 1};
  }
  if (form.overlaps && permission.waits) attributes[config.numAttrs++] = overlap_with_launch_before();
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
                                   LaunchForm form) {
  static const auto launch = driver_function<decltype(cuLaunchKernelEx)>("cuLaunchKernelEx");
  if (launch == nullptr) return cudaErrorUnknown;
  CUlaunchAttribute attributes[2] = {};
  CUlaunchConfig driver_config = {};
  driver_config.gridDimX = config.gridDim.x;
  driver_config.gridDimY = config.gridDim.y;
  driver_config.gridDimZ = 1;
  driver_config.blockDimX = config.blockDim.x;
  driver_config.blockDimY = driver_config.blockDimZ = 1;
  driver_config.sharedMemBytes = static_cast<unsigned>(config.dynamicSmemBytes);
  driver_config.hStream = config.stream;
  driver_config.attrs = attributes;
  if (form.cluster > 1) {
    CUlaunchAttribute& cluster = attributes[driver_config.numAttrs++];
    cluster.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    cluster.value.clusterDim = {1, static_cast<unsigned>(form.cluster), 1};
  }
  if (form.overlaps) {
    CUlaunchAttribute& overlap = attributes[driver_config.numAttrs++];
    overlap.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    overlap.value.programmaticStreamSerializationAllowed = 1;
  }
  void* arguments[] = {const_cast<void*>(params)};
  const CUresult result = launch(&driver_config, static_cast<CUfunction>(kernel), arguments, nullptr);
  return result == CUDA_SUCCESS ? cudaSuccess : static_cast<cudaError_t>(result);  // the numbers are the same
}

}  // namespace flashbwd

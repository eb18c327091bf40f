// Launches kernels, prebuilt or compiled at run time, through the driver API. It has less host overhead than the
// runtime API.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <utility>

#include "capture.h"

namespace flashbwd {

// Launch configuration for CTAs of `threads` threads and `bytes` of dynamic shared memory.
inline CUlaunchConfig config_of(dim3 grid, unsigned threads, unsigned bytes, void* stream) {
  CUlaunchConfig config = {};
  config.gridDimX = grid.x;
  config.gridDimY = grid.y;
  config.gridDimZ = grid.z;
  config.blockDimX = threads;
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = bytes;
  config.hStream = static_cast<CUstream>(stream);
  return config;
}

// Launch attributes other than the grid.
struct LaunchForm {
  int device = 0;
  int cluster = 1;
  bool overlaps = false;     // programmatic dependent launch; the kernel must itself wait for the previous grid
  bool cooperative = false;  // all CTAs run at the same time
};

// Looks up a driver API function, to avoid linking libcuda.
template <typename Function>
Function* driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found);
  return error == cudaSuccess ? reinterpret_cast<Function*>(function) : nullptr;
}

// The driver API needs a current context. A new thread has none until the runtime API sets one.
inline cudaError_t begin_context_on(int device) {
  static thread_local bool begun = false;
  if (begun) return cudaSuccess;
  const AllowedInCapture allowed;
  const cudaError_t error = cudaSetDevice(device);
  begun = error == cudaSuccess;
  return error;
}

// `kernel`: a CUfunction of the current device, or a CUkernel.
inline cudaError_t launch_with_driver(const void* params, void* kernel, CUlaunchConfig config, LaunchForm form) {
  static const auto launch = driver_function<decltype(cuLaunchKernelEx)>("cuLaunchKernelEx");
  if (launch == nullptr) return cudaErrorUnknown;
  const cudaError_t error = begin_context_on(form.device);
  if (error != cudaSuccess) return error;
  CUlaunchAttribute attributes[3] = {};
  config.attrs = attributes;
  if (form.cluster > 1) {
    CUlaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    cluster.value.clusterDim = {1, static_cast<unsigned>(form.cluster), 1};
  }
  if (form.overlaps) {
    CUlaunchAttribute& overlap = attributes[config.numAttrs++];
    overlap.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    overlap.value.programmaticStreamSerializationAllowed = 1;
  }
  if (form.cooperative) {
    CUlaunchAttribute& cooperative = attributes[config.numAttrs++];
    cooperative.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    cooperative.value.cooperative = 1;
  }
  void* arguments[] = {const_cast<void*>(params)};
  const CUresult result = launch(&config, static_cast<CUfunction>(kernel), arguments, nullptr);
  return result == CUDA_SUCCESS ? cudaSuccess : static_cast<cudaError_t>(result);  // both enums have the same values
}

// A prebuilt kernel on one device, as looked up for its launch.
struct Prebuilt {
  const void* kernel = nullptr;
  int device = -1;
  cudaFunction_t function = nullptr;
  bool waits = false;  // contains griddepcontrol.wait; code compiled for compute capability 8.x does not
};

// Looks up a kernel and raises its shared memory limit, once per kernel and device. The device must be the current one.
inline cudaError_t find_prebuilt(const void* kernel, int shared_bytes, int device, Prebuilt& prebuilt) {
  static thread_local Prebuilt last;
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, Prebuilt> all;
  if (last.kernel != kernel || last.device != device) {
    const std::lock_guard<std::mutex> lock(mutex);
    Prebuilt& known = all[{kernel, device}];
    if (known.kernel == nullptr) {
      const AllowedInCapture allowed;
      cudaFuncAttributes attributes;
      cudaFunction_t function = nullptr;
      cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
      if (error == cudaSuccess)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
      if (error == cudaSuccess) error = cudaGetFuncBySymbol(&function, kernel);
      if (error != cudaSuccess) return error;
      known = {kernel, device, function, attributes.ptxVersion >= 90};
    }
    last = known;
  }
  prebuilt = last;
  return cudaSuccess;
}

template <class Params>
cudaError_t launch_prebuilt(const Params& p, void (*kernel)(Params), const CUlaunchConfig& config, LaunchForm form) {
  if (kernel == nullptr) return cudaErrorInvalidValue;
  Prebuilt prebuilt;
  const cudaError_t error = find_prebuilt(reinterpret_cast<const void*>(kernel),
                                          static_cast<int>(config.sharedMemBytes), form.device, prebuilt);
  if (error != cudaSuccess) return error;
  form.overlaps = form.overlaps && prebuilt.waits;
  return launch_with_driver(&p, prebuilt.function, config, form);
}

}  // namespace flashbwd

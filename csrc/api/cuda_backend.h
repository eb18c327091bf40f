// The interface between the two libraries. _C has the schemas, checks and plans, and loads on every machine. _C_cuda
// has the kernels, is loaded if torch has CUDA, and registers its entry points here.
#pragma once

#include <cstddef>
#include <string>

#include "../attention/families.h"
#include "../common/types.h"
#include "../decoding/launch.h"
#include "../layer_norm/params.h"

namespace flashbwd {

struct CudaBackend {
  DeviceInfo (*device_info)(int device_index) = nullptr;
  int (*current_device)() = nullptr;
  void* (*current_stream)(int device_index) = nullptr;
  // Allocates from PyTorch's caching allocator, for use on the current device's current stream.
  void* (*allocate)(size_t bytes) = nullptr;
  void (*release)(void* memory) = nullptr;
  StreamMemory (*stream_memory)(int device_index, void* stream) = nullptr;
  // Launchers of the kernel families; null if the build does not include the family.
  AttentionLauncher attention_sm90 = nullptr;
  AttentionLauncher attention_sm80 = nullptr;
  AttentionLauncher attention_short = nullptr;
  ScoreModLauncher attention_sm90_score_mod = nullptr;
  ScoreModLauncher attention_sm80_score_mod = nullptr;
  const char* (*layer_norm_backward)(const LayerNormBackwardParams&, const DeviceInfo&, void* stream) = nullptr;
  const char* (*layer_norm_forward)(const LayerNormForwardParams&, void* stream) = nullptr;
  int64_t (*layer_norm_workspace)(const LayerNormBackwardParams&, const DeviceInfo&) = nullptr;
  const char* (*decoding)(const DecodingParams&, DecodingTile, DType, bool aligned, void* kernel, const DeviceInfo&,
                          void* stream) = nullptr;
  const char* (*decoding_backward)(const DecodingBackwardParams&, int head_dim, DType, bool aligned, void* kernel,
                                   const DeviceInfo&, void* stream) = nullptr;
};

// Null until _C_cuda has been loaded.
const CudaBackend* cuda_backend();

}  // namespace flashbwd

extern "C" __attribute__((visibility("default"))) void flashbwd_install_cuda_backend(const flashbwd::CudaBackend*);

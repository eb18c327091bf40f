// Registers the kernels of this build with _C when the library _C_cuda is loaded.
#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/util/shim_utils.h>

#include <map>
#include <mutex>
#include <string>

#include "../common/capture.h"
#include "../common/probe.h"
#include "../layer_norm/launch.h"
#include "cuda_backend.h"
#include "cuda_stream_memory.h"

namespace flashbwd {
namespace {

std::string why_not(cudaError_t error) {
  int driver = 0;
  int runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  const auto version = [](int v) { return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10); };
  if (driver == 0) return "there is no CUDA driver";
  if (driver / 1000 < runtime / 1000) {
    return "the driver supports CUDA " + version(driver) + ", which is older than the " + version(runtime) +
           " of this build";
  }
  return std::string("kernels of this build cannot run on this device: ") + cudaGetErrorString(error);
}

DeviceInfo query_device(int index) {
  const AllowedInCapture allowed;
  DeviceInfo info;
  info.index = index;
  int capability = 0;
  cudaError_t error = probe_current_device(&capability);
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, which, index);
    return value;
  };
  info.cc_major = attribute(cudaDevAttrComputeCapabilityMajor);
  info.cc_minor = attribute(cudaDevAttrComputeCapabilityMinor);
  if (error == cudaSuccess && capability < info.cc_major * 10 + info.cc_minor) {
    info.cc_major = capability / 10;
    info.cc_minor = capability % 10;
  }
  info.sm_count = attribute(cudaDevAttrMultiProcessorCount);
  info.smem_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  info.l2_bytes = attribute(cudaDevAttrL2CacheSize);
  info.usable = error == cudaSuccess;
  info.why_not = info.usable ? "" : why_not(error);
  cudaGetLastError();  // clear the error of a failed probe, so that no later call reports it
  return info;
}

// Caches the properties of each device, since they do not change.
DeviceInfo device_info(int index) {
  static std::mutex mutex;
  static std::map<int, DeviceInfo> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(index);
  if (found != known.end()) return found->second;
  int before = 0;
  const bool switched = cudaGetDevice(&before) == cudaSuccess && before != index && cudaSetDevice(index) == cudaSuccess;
  const DeviceInfo info = query_device(index);
  if (switched) cudaSetDevice(before);
  return known.emplace(index, info).first->second;
}

int current_device() {
  static const bool only_one = [] {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess && count == 1;
  }();
  if (only_one) return 0;
  int index = -1;
  cudaGetDevice(&index);
  return index;
}

void* current_stream(int index) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index, &stream));
  return stream;
}

void* allocate(size_t bytes) {
  void* memory = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_caching_allocator_raw_alloc(bytes, &memory));
  return memory;
}

void release(void* memory) { aoti_torch_cuda_caching_allocator_raw_delete(memory); }

// The first call loads kernels, sets their attributes and looks up the encoder of tensor maps. CUDA rejects that
// during stream capture without AllowedInCapture.
template <AttentionLauncher kLaunch>
const char* launch_in_capture_too(const AttentionBackwardParams& params, const AttentionPlan& plan, void* stream) {
  const AllowedInCapture allowed;
  return kLaunch(params, plan, stream);
}

template <ScoreModLauncher kLaunch>
const char* launch_score_mod_in_capture_too(const AttentionBackwardParams& params, const AttentionPlan& plan,
                                            const CompiledScoreMod& score_mod, void* stream) {
  const AllowedInCapture allowed;
  return kLaunch(params, plan, score_mod, stream);
}

struct Installer {
  Installer() {
    CudaBackend backend;
    backend.device_info = device_info;
    backend.current_device = current_device;
    backend.current_stream = current_stream;
    backend.stream_memory = stream_memory;
    backend.allocate = allocate;
    backend.release = release;
#ifdef FLASHBWD_BUILT_ATTENTION_SM80
    backend.attention_sm80 = launch_in_capture_too<sm80::run>;
    backend.attention_sm80_score_mod = launch_score_mod_in_capture_too<sm80::run_score_mod>;
#endif
#ifdef FLASHBWD_BUILT_ATTENTION_SHORT
    backend.attention_short = launch_in_capture_too<short_sequences::run>;
#endif
#ifdef FLASHBWD_BUILT_ATTENTION_SM90
    backend.attention_sm90 = launch_in_capture_too<sm90::run>;
    backend.attention_sm90_score_mod = launch_score_mod_in_capture_too<sm90::run_score_mod>;
#endif
#ifdef FLASHBWD_BUILT_DECODING
    backend.decoding = run_decoding;
    backend.decoding_backward = run_decoding_backward;
#endif
#ifdef FLASHBWD_BUILT_LAYER_NORM
    backend.layer_norm_backward = launch_layer_norm_backward;
    backend.layer_norm_workspace = layer_norm_backward_workspace;
    backend.layer_norm_forward = launch_layer_norm_forward;
#endif
    flashbwd_install_cuda_backend(&backend);
  }
};

const Installer installer;

}  // namespace
}  // namespace flashbwd

// Plain descriptions of tensors and devices, which host code uses instead of torch types.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace flashbwd {

enum class DType : int32_t { kFloat16, kBFloat16, kFloat32, kFloat64, kInt32, kInt64, kUInt8, kUInt64, kBool, kOther };

constexpr int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kUInt8:
    case DType::kBool:
      return 1;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    default:
      return 8;
  }
}

constexpr bool is_16bit(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBFloat16; }

const char* name_of(DType dtype);  // "float16": torch's name without the prefix

enum class DeviceType : int32_t { kCPU, kCUDA, kMeta, kOther };

struct Device {
  DeviceType type = DeviceType::kCPU;
  int32_t index = 0;
  bool operator==(const Device& other) const { return type == other.type && index == other.index; }
  bool operator!=(const Device& other) const { return !(*this == other); }
};

std::string name_of(Device device);  // "cuda:0"

// A tensor's metadata. Sizes and strides count elements. If `defined` is false, there is no tensor.
struct TensorDesc {
  static constexpr int kMaxDims = 8;
  void* data = nullptr;
  std::array<int64_t, kMaxDims> sizes{};
  std::array<int64_t, kMaxDims> strides{};
  int32_t dim = 0;
  DType dtype = DType::kOther;
  Device device;
  bool defined = false;

  explicit operator bool() const { return defined; }
  int64_t numel() const {
    int64_t n = 1;
    for (int i = 0; i < dim; ++i) n *= sizes[i];
    return n;
  }
};

std::string shape_of(const TensorDesc& tensor);  // "(2, 3, 4)"

// The strides that torch.empty_like gives a tensor of these sizes and strides: the same if it is dense, otherwise dense
// ones with the dimensions in the same order in memory. Returns false if strides are equal or 0, so that the order is
// unclear.
bool strides_without_gaps(const TensorDesc& tensor, std::array<int64_t, TensorDesc::kMaxDims>* strides);

// What a plan needs to know about the GPU. If this build's kernels cannot run there (no driver, driver too old, no
// device), `usable` is false and `why_not` gives the reason.
struct DeviceInfo {
  bool usable = false;
  int32_t index = 0;
  std::string why_not = "there is no CUDA device";
  // Compute capability of the device, or of the code that it runs if that is lower: 8.0 code compiled by the driver for
  // a 9.0 device cannot use 9.0 instructions.
  int32_t cc_major = 0;
  int32_t cc_minor = 0;
  int32_t sm_count = 0;
  int64_t smem_per_block = 0;  // largest dynamic shared memory that a block may request, in bytes
  int64_t l2_bytes = 0;
  // The kernel families in this build.
  bool has_attention_sm90 = false;
  bool has_attention_sm80 = false;
  bool has_attention_short = false;
};

}  // namespace flashbwd

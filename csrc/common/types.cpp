#include "types.h"

#include <algorithm>
#include <numeric>

namespace flashbwd {

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat32:
      return "float32";
    case DType::kFloat64:
      return "float64";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    case DType::kUInt8:
      return "uint8";
    case DType::kUInt64:
      return "uint64";
    case DType::kBool:
      return "bool";
    case DType::kOther:
      break;
  }
  return "another dtype";
}

std::string name_of(Device device) {
  switch (device.type) {
    case DeviceType::kCPU:
      return "cpu";
    case DeviceType::kCUDA:
      return "cuda:" + std::to_string(device.index);
    case DeviceType::kMeta:
      return "meta";
    case DeviceType::kOther:
      break;
  }
  return "another device";
}

std::string shape_of(const TensorDesc& tensor) {
  std::string text = "(";
  for (int i = 0; i < tensor.dim; ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(tensor.sizes[i]);
  }
  return text + (tensor.dim == 1 ? ",)" : ")");
}

bool strides_without_gaps(const TensorDesc& tensor, std::array<int64_t, TensorDesc::kMaxDims>* strides) {
  std::array<int32_t, TensorDesc::kMaxDims> inner_first{};
  const auto end = inner_first.begin() + tensor.dim;
  std::iota(inner_first.begin(), end, 0);
  std::sort(inner_first.begin(), end, [&](int32_t a, int32_t b) { return tensor.strides[a] < tensor.strides[b]; });
  int64_t step = 1;
  int64_t before = 0;
  bool gaps = false;
  for (auto dim = inner_first.begin(); dim != end; ++dim) {
    const int64_t stride = tensor.strides[*dim];
    if (stride <= before || tensor.sizes[*dim] == 0) return false;
    gaps = gaps || (tensor.sizes[*dim] > 1 && stride != step);
    (*strides)[*dim] = step;
    step *= tensor.sizes[*dim];
    before = stride;
  }
  if (!gaps) *strides = tensor.strides;
  return true;
}

}  // namespace flashbwd

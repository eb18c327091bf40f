#include "types.h"

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

}  // namespace flashbwd

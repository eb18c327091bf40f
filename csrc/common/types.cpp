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

bool strides_without_gaps(const TensorDesc& tensor, std::array<int64_t, TensorDesc::kMaxDims>* strides) {
  int64_t step = 1;
  int64_t before = 0;
  bool gaps = false;
  for (int n = 0; n < tensor.dim; ++n) {
    int next = -1;  // the dimension with the smallest stride larger than `before`
    for (int dim = 0; dim < tensor.dim; ++dim) {
      const int64_t stride = tensor.strides[dim];
      if (stride > before && (next < 0 || stride < tensor.strides[next])) next = dim;
    }
    if (next < 0 || tensor.sizes[next] == 0) return false;
    gaps = gaps || (tensor.sizes[next] > 1 && tensor.strides[next] != step);
    (*strides)[next] = step;
    step *= tensor.sizes[next];
    before = tensor.strides[next];
  }
  if (!gaps) *strides = tensor.strides;
  return true;
}

}  // namespace flashbwd

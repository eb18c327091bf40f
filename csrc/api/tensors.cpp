#include "tensors.h"

#include <algorithm>

#include "../common/check.h"

namespace flashbwd {
namespace {

constexpr std::pair<ScalarType, DType> kDTypes[] = {
    {ScalarType::Half, DType::kFloat16},  {ScalarType::BFloat16, DType::kBFloat16},
    {ScalarType::Float, DType::kFloat32}, {ScalarType::Double, DType::kFloat64},
    {ScalarType::Int, DType::kInt32},     {ScalarType::Long, DType::kInt64},
    {ScalarType::Byte, DType::kUInt8},    {ScalarType::UInt64, DType::kUInt64},
    {ScalarType::Bool, DType::kBool},
};

DType dtype_of(int32_t number) {
  for (const auto& [scalar_type, dtype] : kDTypes) {
    if (static_cast<int32_t>(scalar_type) == number) return dtype;
  }
  return DType::kOther;
}

Device device_of(AtenTensorHandle tensor) {
  static const int32_t cuda = aoti_torch_device_type_cuda();
  static const int32_t meta = aoti_torch_device_type_meta();
  static const int32_t cpu = aoti_torch_device_type_cpu();
  int32_t type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor, &type));
  Device device;
  if (type == cuda) {
    device.type = DeviceType::kCUDA;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor, &device.index));
  } else if (type == meta) {
    device.type = DeviceType::kMeta;
  } else if (type != cpu) {
    device.type = DeviceType::kOther;
  }
  return device;
}

}  // namespace

int32_t dtype_number(AtenTensorHandle tensor) {
  int32_t number = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor, &number));
  return number;
}

void describe(AtenTensorHandle tensor, TensorDesc& desc) {
  bool defined = false;  // PyTorch's dispatcher accepts None for a Tensor argument
  TORCH_ERROR_CODE_CHECK(aoti_torch_is_defined(tensor, &defined));
  check(defined, "a tensor is missing, expected all that are not optional");
  int64_t dim = 0, *sizes = nullptr, *strides = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor, &dim));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor, &sizes));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor, &strides));
  check(dim <= TensorDesc::kMaxDims, "a tensor has ", dim, " dimensions, expected at most ", TensorDesc::kMaxDims);
  desc.defined = true;
  desc.dim = static_cast<int32_t>(dim);
  std::copy_n(sizes, dim, desc.sizes.begin());
  std::copy_n(strides, dim, desc.strides.begin());
  desc.dtype = dtype_of(dtype_number(tensor));
  desc.device = device_of(tensor);
  if (desc.device.type != DeviceType::kMeta) TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor, &desc.data));
}

TensorDesc describe(const Tensor& tensor) {
  TensorDesc desc;
  describe(tensor.get(), desc);
  return desc;
}

TensorDesc describe(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? describe(*tensor) : TensorDesc{};
}

ScalarType scalar_type_of(DType dtype) {
  for (const auto& [scalar_type, known] : kDTypes) {
    if (known == dtype) return scalar_type;
  }
  refuse("no scalar type for ", name_of(dtype));
}

AtenTensorHandle empty_strided(AtenTensorHandle like, int32_t dims, const int64_t* sizes, const int64_t* strides,
                               int32_t dtype_number) {
  int32_t device_type = 0, device_index = 0;
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like, &device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like, &device_index));
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(dims, sizes, strides, dtype_number, device_type, device_index, &handle));
  return handle;
}

Tensor new_empty(const Tensor& like, IntHeaderOnlyArrayRef sizes, ScalarType dtype) {
  const auto dims = static_cast<int32_t>(sizes.size());
  check(dims <= TensorDesc::kMaxDims, "a tensor has ", dims, " dimensions, expected at most ", TensorDesc::kMaxDims);
  std::array<int64_t, TensorDesc::kMaxDims> strides{};
  int64_t stride = 1;
  for (int32_t i = dims - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= std::max<int64_t>(sizes[i], 1);
  }
  return Tensor(empty_strided(like.get(), dims, sizes.data(), strides.data(), static_cast<int32_t>(dtype)));
}

Tensor new_like(const Tensor& tensor) {
  std::array<int64_t, TensorDesc::kMaxDims> strides{};
  const TensorDesc like = describe(tensor);
  if (!strides_without_gaps(like, &strides)) return torch::stable::empty_like(tensor);
  return Tensor(empty_strided(tensor.get(), like.dim, like.sizes.data(), strides.data(), dtype_number(tensor.get())));
}

Tensor with_contiguous_last_dim(const Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  if (last < 0 || tensor.size(last) <= 1 || tensor.stride(last) == 1) return tensor;
  return torch::stable::contiguous(tensor);
}

void call_operator(const char* name, StableIValue* stack) {
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", stack, TORCH_ABI_VERSION));
}

}  // namespace flashbwd

// From the stable ABI's tensors to the plain descriptions that host logic works on, and back.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "../common/types.h"

namespace flashbwd {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// A tensor that one owns, as arguments of operators and their results are: Tensor, which can be shared, costs two
// allocations more.
struct DeleteTensor {
  void operator()(AtenTensorHandle handle) const { aoti_torch_delete_tensor_object(handle); }
};
using OwnedTensor = std::unique_ptr<AtenTensorOpaque, DeleteTensor>;

void describe(AtenTensorHandle tensor, TensorDesc& desc);  // which described nothing before
inline void describe(const Tensor& tensor, TensorDesc& desc) { describe(tensor.get(), desc); }
inline void describe(const std::optional<Tensor>& tensor, TensorDesc& desc) {
  if (tensor.has_value()) describe(*tensor, desc);
}
TensorDesc describe(const Tensor& tensor);
TensorDesc describe(const std::optional<Tensor>& tensor);  // undefined when there is none

// Of any dtype, those that are no DType too; the number of its ScalarType.
int32_t dtype_number(AtenTensorHandle tensor);
ScalarType scalar_type_of(DType dtype);

// An uninitialised tensor on `like`'s device.
Tensor new_empty(const Tensor& like, std::initializer_list<int64_t> sizes, DType dtype);
template <size_t kDims>
OwnedTensor empty_strided(AtenTensorHandle like, const std::array<int64_t, kDims>& sizes,
                          const std::array<int64_t, kDims>& strides, DType dtype) {
  AtenTensorHandle handle = nullptr;
  int32_t device_type = 0, device_index = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like, &device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like, &device_index));
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(kDims, sizes.data(), strides.data(),
                                                  static_cast<int32_t>(scalar_type_of(dtype)), device_type,
                                                  device_index, &handle));
  return OwnedTensor(handle);
}

// A tensor in the storage of `all`, which begins where that does, from `offset_bytes` on. It is no view of `all`.
template <size_t kDims>
OwnedTensor part_of(AtenTensorHandle all, int64_t offset_bytes, const std::array<int64_t, kDims>& sizes,
                    const std::array<int64_t, kDims>& strides, DType dtype) {
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__alloc_from_pool(all, offset_bytes, static_cast<int32_t>(scalar_type_of(dtype)),
                                                     kDims, sizes.data(), strides.data(), &handle));
  return OwnedTensor(handle);
}

// As torch.empty_like, mostly without asking the dispatcher.
Tensor new_like(const Tensor& tensor);

// `tensor`, or a copy whose last dimension is contiguous (gradients of sums come expanded).
Tensor with_contiguous_last_dim(const Tensor& tensor);

// Reads an operator's arguments off a boxed stack, in the order of its schema. All of them must be read before
// anything can throw: reading takes ownership.
class ArgumentReader {
 public:
  explicit ArgumentReader(StableIValue* stack) : next_(stack) {}
  template <typename T>
  T read() {
    return torch::stable::detail::to<T>(*next_++);
  }
  Tensor tensor() { return read<Tensor>(); }
  OwnedTensor owned_tensor() { return OwnedTensor(read<AtenTensorHandle>()); }
  std::optional<Tensor> optional_tensor() { return read<std::optional<Tensor>>(); }

 private:
  StableIValue* next_;
};

template <typename T>
StableIValue boxed(const T& value) {
  return torch::stable::detail::from(value);
}

inline StableIValue boxed(OwnedTensor value) { return torch::stable::detail::from(value.release()); }

inline StableIValue boxed(std::vector<OwnedTensor> values) {
  std::vector<Tensor> tensors;
  tensors.reserve(values.size());
  for (OwnedTensor& value : values) tensors.emplace_back(value.release());
  return torch::stable::detail::from(tensors);
}

// Calls an operator of this namespace through the dispatcher, for its effect on the arguments.
void call_operator(const char* name, StableIValue* stack);

}  // namespace flashbwd

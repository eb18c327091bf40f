// Conversions between tensors of PyTorch's stable ABI and the plain TensorDesc of the host logic, and boxed arguments.
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

using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// A uniquely owned tensor handle. Tensor has shared ownership, which costs two more allocations.
struct DeleteTensor {
  void operator()(AtenTensorHandle handle) const { aoti_torch_delete_tensor_object(handle); }
};
using OwnedTensor = std::unique_ptr<AtenTensorOpaque, DeleteTensor>;

// Fills a default-constructed `desc`. Throws if the tensor is undefined or has too many dimensions.
void describe(AtenTensorHandle tensor, TensorDesc& desc);
inline void describe(const Tensor& tensor, TensorDesc& desc) { describe(tensor.get(), desc); }
inline void describe(const std::optional<Tensor>& tensor, TensorDesc& desc) {
  if (tensor.has_value()) describe(*tensor, desc);
}
TensorDesc describe(const Tensor& tensor);
TensorDesc describe(const std::optional<Tensor>& tensor);  // undefined for nullopt

// The number of the tensor's ScalarType, also for dtypes that DType does not have.
int32_t dtype_number(AtenTensorHandle tensor);
ScalarType scalar_type_of(DType dtype);

// An uninitialised contiguous tensor on `like`'s device, made without a dispatcher call, which takes longer.
Tensor new_empty(const Tensor& like, IntHeaderOnlyArrayRef sizes, ScalarType dtype);
inline Tensor new_empty(const Tensor& like, std::initializer_list<int64_t> sizes, DType dtype) {
  return new_empty(like, IntHeaderOnlyArrayRef(sizes.begin(), sizes.size()), scalar_type_of(dtype));
}

// An uninitialised tensor on `like`'s device, which the caller must own.
AtenTensorHandle empty_strided(AtenTensorHandle like, int32_t dims, const int64_t* sizes, const int64_t* strides,
                               int32_t dtype_number);
template <size_t kDims>
OwnedTensor empty_strided(AtenTensorHandle like, const std::array<int64_t, kDims>& sizes,
                          const std::array<int64_t, kDims>& strides, DType dtype) {
  return OwnedTensor(
      empty_strided(like, kDims, sizes.data(), strides.data(), static_cast<int32_t>(scalar_type_of(dtype))));
}

// Makes a tensor at `offset_bytes` in the storage of `all`, whose storage offset is 0. For autograd it is not a view.
template <size_t kDims>
OwnedTensor tensor_in(AtenTensorHandle all, int64_t offset_bytes, const std::array<int64_t, kDims>& sizes,
                      const std::array<int64_t, kDims>& strides, DType dtype) {
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__alloc_from_pool(all, offset_bytes, static_cast<int32_t>(scalar_type_of(dtype)),
                                                     kDims, sizes.data(), strides.data(), &handle));
  return OwnedTensor(handle);
}

// Like torch.empty_like, but without a dispatcher call if the strides determine the order of the dimensions.
Tensor new_like(const Tensor& tensor);

// `tensor` if its last dimension is contiguous, else a copy. (The gradient of a sum is an expanded tensor.)
Tensor with_contiguous_last_dim(const Tensor& tensor);

// Reads an operator's arguments from a boxed stack, in the order of its schema. Reading transfers ownership, so all
// arguments must be read before anything can throw; otherwise the rest leaks.
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

// Calls operator `name` through the dispatcher; its results replace the arguments on the stack.
void call_operator(const char* name, StableIValue* stack);

}  // namespace flashbwd

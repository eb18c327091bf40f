// From the stable ABI's tensors to the plain descriptions that host logic works on, and back.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <optional>
#include <utility>

#include "../common/types.h"

namespace flashbwd {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

TensorDesc describe(const Tensor& tensor);
TensorDesc describe(const std::optional<Tensor>& tensor);  // undefined when there is none

ScalarType scalar_type_of(DType dtype);

// An uninitialised tensor on `like`'s device.
Tensor new_empty(const Tensor& like, std::initializer_list<int64_t> sizes, DType dtype);
template <size_t kDims>
Tensor empty_strided(const Tensor& like, const std::array<int64_t, kDims>& sizes,
                     const std::array<int64_t, kDims>& strides, DType dtype) {
  AtenTensorHandle handle = nullptr;
  int32_t device_type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(kDims, sizes.data(), strides.data(),
                                                  static_cast<int32_t>(scalar_type_of(dtype)), device_type,
                                                  like.get_device_index(), &handle));
  return Tensor(handle);
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
  std::optional<Tensor> optional_tensor() { return read<std::optional<Tensor>>(); }

 private:
  StableIValue* next_;
};

template <typename T>
StableIValue boxed(const T& value) {
  return torch::stable::detail::from(value);
}

// Calls an operator of this namespace through the dispatcher, for its effect on the arguments.
void call_operator(const char* name, StableIValue* stack);

}  // namespace flashbwd

// PyTorch's C interface has no norm backward, so this file looks up the C++ functions by mangled name. The name
// contains all parameter types, so a PyTorch with another signature lacks the symbol. The code relies on the layouts of
// std types and c10::ArrayRef, and assumes that an AtenTensorHandle points to an at::Tensor, which is a single owning
// pointer.
#include <dlfcn.h>

#include <tuple>

#include "pytorch_kernels.h"

namespace flashbwd::pytorch {
namespace {

// Same layout as at::Tensor. Its destructor is non-trivial too, since that determines how the ABI returns it.
struct Slot {
  void* owned;
  ~Slot() {}
};
static_assert(sizeof(Slot) == sizeof(void*));

Slot& slot_of(AtenTensorHandle handle) { return *reinterpret_cast<Slot*>(handle); }

// The caller keeps ownership of the tensor.
std::optional<Slot> slot_of(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? std::optional<Slot>(slot_of(tensor->get())) : std::nullopt;
}

// Takes ownership of a slot's pointer by moving it into a new undefined tensor.
Tensor tensor_of(const Slot& slot) {
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_uninitialized_tensor(&handle));
  slot_of(handle).owned = slot.owned;
  return Tensor(handle);
}

using Shape = torch::headeronly::HeaderOnlyArrayRef<int64_t>;
using LayerNormBackward = std::tuple<Slot, Slot, Slot>(const Slot& dz, const Slot& x, Shape normalized_shape,
                                                       const Slot& mean, const Slot& rstd,
                                                       const std::optional<Slot>& weight,
                                                       const std::optional<Slot>& bias, std::array<bool, 3> mask);
using RmsNormBackward = std::tuple<Slot, Slot>(const Slot& dz, const Slot& x, Shape normalized_shape, const Slot& rstd,
                                               const std::optional<Slot>& weight, std::array<bool, 2> mask);

template <typename Function>
Function* find(const char* library, const char* name) {
  void* const torch = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  return torch == nullptr ? nullptr : reinterpret_cast<Function*>(dlsym(torch, name));
}

bool on_cpu(const Tensor& tensor) {
  int32_t type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
  return type == aoti_torch_device_type_cpu();
}

}  // namespace

std::vector<Tensor> layer_norm_backward(const Tensor& dz, const Tensor& x, const std::vector<int64_t>& normalized_shape,
                                        const Tensor& mean, const Tensor& rstd, const std::optional<Tensor>& weight,
                                        const std::optional<Tensor>& bias, const std::vector<bool>& mask) {
  static const auto cpu = find<LayerNormBackward>(
      "libtorch_cpu.so",
      "_ZN2at3cpu26native_layer_norm_backwardERKNS_6TensorES3_N3c108ArrayRefIlEES3_S3_RKSt8optionalIS1_ESA_"
      "St5arrayIbLm3EE");
  static const auto cuda = find<LayerNormBackward>(
      "libtorch_cuda.so",
      "_ZN2at4cuda26native_layer_norm_backwardERKNS_6TensorES3_N3c108ArrayRefIlEES3_S3_RKSt8optionalIS1_ESA_"
      "St5arrayIbLm3EE");
  const auto kernel = on_cpu(x) ? cpu : cuda;
  if (kernel == nullptr) return {};
  const auto [dx, dgamma, dbeta] =
      kernel(slot_of(dz.get()), slot_of(x.get()), {normalized_shape.data(), normalized_shape.size()},
             slot_of(mean.get()), slot_of(rstd.get()), slot_of(weight), slot_of(bias), {mask[0], mask[1], mask[2]});
  return {tensor_of(dx), tensor_of(dgamma), tensor_of(dbeta)};
}

std::vector<Tensor> rms_norm_backward(const Tensor& dz, const Tensor& x, const std::vector<int64_t>& normalized_shape,
                                      const Tensor& rstd, const std::optional<Tensor>& weight,
                                      const std::vector<bool>& mask) {
  static const auto cuda = find<RmsNormBackward>(
      "libtorch_cuda.so",
      "_ZN2at4cuda24_fused_rms_norm_backwardERKNS_6TensorES3_N3c108ArrayRefIlEES3_RKSt8optionalIS1_ESt5arrayIbLm2EE");
  if (cuda == nullptr || on_cpu(x)) return {};
  const auto [dx, dgamma] =
      cuda(slot_of(dz.get()), slot_of(x.get()), {normalized_shape.data(), normalized_shape.size()}, slot_of(rstd.get()),
           slot_of(weight), {mask[0], mask[1]});
  return {tensor_of(dx), tensor_of(dgamma)};
}

}  // namespace flashbwd::pytorch

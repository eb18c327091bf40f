#include "pytorch_kernels.h"

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>

namespace flashbwd::pytorch {
namespace {

// Looks up a C function of PyTorch; null in a PyTorch without CUDA.
template <typename Function>
Function* find(const char* name) {
  static void* const torch = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  return torch == nullptr ? nullptr : reinterpret_cast<Function*>(dlsym(torch, name));
}

#define FLASHBWD_FIND(name) find<decltype(name)>(#name)

// Converts an optional to the pointer that the C functions expect: null for nullopt.
template <typename T>
T* pointer(const std::optional<T>& value) {
  return value.has_value() ? const_cast<T*>(&*value) : nullptr;
}

class OptionalHandle {
 public:
  explicit OptionalHandle(const std::optional<Tensor>& tensor) : handle_(tensor ? tensor->get() : nullptr) {}
  operator AtenTensorHandle*() { return handle_ == nullptr ? nullptr : &handle_; }

 private:
  AtenTensorHandle handle_;
};

template <size_t kResults>
std::vector<Tensor> results(AOTITorchError error, const std::array<AtenTensorHandle, kResults>& handles) {
  if (error != AOTI_TORCH_SUCCESS) return {};
  return {handles.begin(), handles.end()};
}

}  // namespace

std::vector<Tensor> cudnn_attention_backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                                             const Tensor& out, const Tensor& lse, const Tensor& philox_seed,
                                             const Tensor& philox_offset, const Tensor& attn_bias,
                                             const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                                             const int64_t& max_q, const int64_t& max_k, const double& dropout_p,
                                             const bool& is_causal, const std::optional<double>& scale) {
  static const auto kernel = FLASHBWD_FIND(aoti_torch_cuda__scaled_dot_product_cudnn_attention_backward);
  if (kernel == nullptr) return {};
  std::array<AtenTensorHandle, 3> grads{};
  const AOTITorchError error =
      kernel(dout.get(), q.get(), k.get(), v.get(), out.get(), lse.get(), philox_seed.get(), philox_offset.get(),
             attn_bias.get(), cu_seqlens_q.get(), cu_seqlens_k.get(), max_q, max_k, dropout_p, is_causal,
             pointer(scale), &grads[0], &grads[1], &grads[2]);
  return results(error, grads);
}

std::vector<Tensor> flash_attention_backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                                             const Tensor& out, const Tensor& lse, const Tensor& cu_seqlens_q,
                                             const Tensor& cu_seqlens_k, const int64_t& max_q, const int64_t& max_k,
                                             const double& dropout_p, const bool& is_causal, const Tensor& rng_state,
                                             const Tensor& unused, const std::optional<double>& scale,
                                             const std::optional<int64_t>& window_left,
                                             const std::optional<int64_t>& window_right) {
  static const auto kernel = FLASHBWD_FIND(aoti_torch_cuda__flash_attention_backward);
  if (kernel == nullptr) return {};
  std::array<AtenTensorHandle, 3> grads{};
  const AOTITorchError error =
      kernel(dout.get(), q.get(), k.get(), v.get(), out.get(), lse.get(), cu_seqlens_q.get(), cu_seqlens_k.get(), max_q,
             max_k, dropout_p, is_causal, rng_state.get(), unused.get(), pointer(scale), pointer(window_left),
             pointer(window_right), &grads[0], &grads[1], &grads[2]);
  return results(error, grads);
}

std::vector<Tensor> efficient_attention_backward(
    const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& bias,
    const Tensor& out, const std::optional<Tensor>& cu_seqlens_q, const std::optional<Tensor>& cu_seqlens_k,
    const int64_t& max_q, const int64_t& max_k, const Tensor& lse, const double& dropout_p, const Tensor& philox_seed,
    const Tensor& philox_offset, const int64_t& mask, const bool& bias_has_gradient, const std::optional<double>& scale,
    const std::optional<int64_t>& num_splits_key, const std::optional<int64_t>& window_size, const bool& one_storage) {
  static const auto kernel = FLASHBWD_FIND(aoti_torch_cuda__efficient_attention_backward);
  if (kernel == nullptr) return {};
  OptionalHandle bias_handle(bias), q_handle(cu_seqlens_q), k_handle(cu_seqlens_k);
  std::array<AtenTensorHandle, 4> grads{};
  const AOTITorchError error =
      kernel(dout.get(), q.get(), k.get(), v.get(), bias_handle, out.get(), q_handle, k_handle, max_q, max_k, lse.get(),
             dropout_p, philox_seed.get(), philox_offset.get(), mask, bias_has_gradient, pointer(scale),
             pointer(num_splits_key), pointer(window_size), one_storage, &grads[0], &grads[1], &grads[2], &grads[3]);
  return results(error, grads);
}

}  // namespace flashbwd::pytorch

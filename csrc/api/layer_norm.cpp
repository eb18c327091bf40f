// The LayerNorm and RMSNorm operators: schemas and shared helpers.
#include "layer_norm.h"

#include <functional>

#include "../common/check.h"
#include "cuda_backend.h"
#include "norm_call.h"

namespace flashbwd {

Rows with_one_row_stride(const Tensor& tensor) {
  if (const std::optional<int64_t> stride = row_stride_of(describe(tensor))) return {tensor, *stride};
  return {torch::stable::contiguous(tensor), tensor.size(tensor.dim() - 1)};
}

Tensor packed(const Tensor& tensor) {
  const TensorDesc desc = describe(tensor);
  int64_t stride = 1;
  for (int i = desc.dim - 1; i >= 0; --i) {
    if (desc.sizes[i] != 1 && desc.strides[i] != stride) return torch::stable::contiguous(tensor);
    stride *= desc.sizes[i];
  }
  return tensor;
}

void check_output_mask(const std::vector<bool>& mask, size_t gradients) {
  check(mask.size() == gradients, "output_mask has ", mask.size(), " elements, expected ", gradients,
        ", one for each gradient");
}

cpu::Threads host_threads() {
  return {torch::stable::get_num_threads(), [](int64_t tasks, const std::function<void(int64_t)>& task) {
            torch::stable::parallel_for(0, tasks, 1, [&](int64_t first, int64_t last) {
              for (int64_t i = first; i < last; ++i) task(i);
            });
          }};
}

DeviceInfo norm_device_info(Device device) {
  DeviceInfo info;
  if (cuda_backend() == nullptr || cuda_backend()->layer_norm_backward == nullptr) {
    info.why_not = "this installation has no LayerNorm kernels";
  } else if (device.type == DeviceType::kCUDA) {
    info = cuda_backend()->device_info(device.index);
  }
  return info;
}

void Dropout::write_to(DropoutParams* params) {
  if (keep.has_value()) {
    keep_rows = with_one_row_stride(*keep);
    params->keep = static_cast<const uint8_t*>(keep_rows->tensor.data_ptr());
    params->keep_row_stride = keep_rows->stride;
  }
  if (rng.has_value()) {
    rng = packed(*rng);
    params->rng = static_cast<const int64_t*>(rng->data_ptr());
  }
}

}  // namespace flashbwd

STABLE_TORCH_LIBRARY_FRAGMENT(flashbwd, m) {
  m.def(
      "layer_norm_backward(Tensor dz, Tensor x, Tensor mu, Tensor rs, Tensor? gamma=None, Tensor? dresidual=None, *, "
      "bool zero_centered_gamma=False, bool[3] output_mask=[True, True, True]) "
      "-> (Tensor dx, Tensor dgamma, Tensor dbeta)");
  m.def(
      "rms_norm_backward(Tensor dz, Tensor x, Tensor rs, Tensor? gamma=None, Tensor? dresidual=None, *, "
      "bool zero_centered_gamma=False, bool[2] output_mask=[True, True]) -> (Tensor dx, Tensor dgamma)");
  m.def(
      "norm_backward_from_output(Tensor dz, Tensor z, Tensor rs, Tensor? gamma=None, Tensor? beta=None, "
      "Tensor? dresidual=None, *, bool zero_centered_gamma=False, bool rms=False, "
      "bool[3] output_mask=[True, True, True]) -> (Tensor dx, Tensor dgamma, Tensor dbeta)");
  m.def(
      "dropout_add_norm_backward(Tensor dz, Tensor h, Tensor? mu, Tensor rs, Tensor? gamma=None, "
      "Tensor? dresidual=None, Tensor? keep=None, Tensor? rng=None, *, float dropout_p=0.0, "
      "bool zero_centered_gamma=False, bool[4] output_mask=[True, True, True, True]) "
      "-> (Tensor dx, Tensor dresidual, Tensor dgamma, Tensor dbeta)");
  // The differentiable norms. Their autograd rules are in Python, and save z instead of x if memory_efficient.
  m.def(
      "layer_norm(Tensor x, Tensor? gamma, Tensor? beta, float eps, bool zero_centered_gamma, "
      "bool memory_efficient=False) -> (Tensor z, Tensor mu, Tensor rs)");
  m.def(
      "rms_norm(Tensor x, Tensor? gamma, float eps, bool zero_centered_gamma, bool memory_efficient=False) "
      "-> (Tensor z, Tensor rs)");
  // The forward of flashbwd::dropout_add_norm, without autograd.
  m.def(
      "dropout_add_norm_forward(Tensor x, Tensor residual, Tensor? gamma, Tensor? beta, Tensor? keep, Tensor? rng, "
      "float dropout_p, float eps, bool zero_centered_gamma, bool rms) "
      "-> (Tensor z, Tensor h, Tensor mu, Tensor rs)");
  // Implemented in Python with torch operators; the operators above call them if no kernel supports the call.
  m.def(
      "norm_forward_reference(Tensor x, Tensor? gamma, Tensor? beta, float eps, bool zero_centered_gamma, bool rms) "
      "-> (Tensor z, Tensor mu, Tensor rs)");
  m.def(
      "layer_norm_backward_reference(Tensor dz, Tensor x, Tensor mu, Tensor rs, Tensor? gamma, Tensor? dresidual, "
      "bool zero_centered_gamma, bool need_dx, bool need_dgamma, bool need_dbeta) "
      "-> (Tensor dx, Tensor dgamma, Tensor dbeta)");
  m.def(
      "norm_backward_from_output_reference(Tensor dz, Tensor z, Tensor rs, Tensor? gamma, Tensor? beta, "
      "Tensor? dresidual, bool zero_centered_gamma, bool rms, bool need_dx, bool need_dgamma, bool need_dbeta) "
      "-> (Tensor dx, Tensor dgamma, Tensor dbeta)");
  m.def(
      "dropout_add_norm_backward_reference(Tensor dz, Tensor h, Tensor? mu, Tensor rs, Tensor? gamma, "
      "Tensor? dresidual, Tensor? keep, Tensor? rng, float dropout_p, bool zero_centered_gamma, bool need_dx, "
      "bool need_dresidual, bool need_dgamma, bool need_dbeta) "
      "-> (Tensor dx, Tensor dresidual, Tensor dgamma, Tensor dbeta)");
  m.def(
      "dropout_add_norm_forward_reference(Tensor x, Tensor residual, Tensor? gamma, Tensor? beta, Tensor? keep, "
      "Tensor? rng, float dropout_p, float eps, bool zero_centered_gamma, bool rms) "
      "-> (Tensor z, Tensor h, Tensor mu, Tensor rs)");
  m.def(
      "rms_norm_backward_reference(Tensor dz, Tensor x, Tensor rs, Tensor? gamma, Tensor? dresidual, "
      "bool zero_centered_gamma, bool need_dx, bool need_dgamma) -> (Tensor dx, Tensor dgamma)");
}

#define FLASHBWD_IMPLEMENT(key)                                               \
  STABLE_TORCH_LIBRARY_IMPL(flashbwd, key, m) {                               \
    m.impl("layer_norm_backward", flashbwd::layer_norm_backward);             \
    m.impl("rms_norm_backward", flashbwd::rms_norm_backward);                 \
    m.impl("norm_backward_from_output", flashbwd::norm_backward_from_output); \
    m.impl("dropout_add_norm_backward", flashbwd::dropout_add_norm_backward); \
    m.impl("layer_norm", flashbwd::layer_norm);                               \
    m.impl("rms_norm", flashbwd::rms_norm);                                   \
    m.impl("dropout_add_norm_forward", flashbwd::dropout_add_norm_forward);   \
  }

FLASHBWD_IMPLEMENT(CPU)
FLASHBWD_IMPLEMENT(CUDA)

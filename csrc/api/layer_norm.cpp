// The LayerNorm and RMSNorm operators: read the arguments, check, allocate, launch.
#include <torch/csrc/stable/accelerator.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "../common/check.h"
#include "cuda_backend.h"
#include "norm_call.h"

namespace flashbwd {
namespace {

LayerNormBackwardParams checked(NormCall& call) {
  LayerNormArguments& a = call.arguments;
  a.dz = describe(call.dz);
  a.x = describe(call.x);
  a.mu = describe(call.mu);
  a.rs = describe(call.rs);
  a.gamma = describe(call.gamma);
  a.dresidual = describe(call.dresidual);
  return check_layer_norm(a);
}

NormCall read_call(StableIValue* stack, bool rms) {
  ArgumentReader reader(stack);
  Tensor dz = reader.tensor();
  Tensor x = reader.tensor();
  std::optional<Tensor> mu;
  if (!rms) mu = reader.tensor();
  NormCall call{dz, x, mu, reader.tensor(), {}, {}, {}};
  call.gamma = reader.optional_tensor();
  call.dresidual = reader.optional_tensor();
  LayerNormArguments& a = call.arguments;
  a.rms = rms;
  a.zero_centered_gamma = reader.read<bool>();
  const std::vector<bool> mask = reader.read<std::vector<bool>>();
  a.need_dx = mask[0];
  a.need_dgamma = mask[1] && call.gamma.has_value();
  a.need_dbeta = !rms && mask[2];
  return call;
}

NormGradients run_reference(const NormCall& call) {
  const LayerNormArguments& a = call.arguments;
  NormGradients grads;
  const auto keep = [&](StableIValue result, bool wanted, std::optional<Tensor>* grad) {
    Tensor tensor = torch::stable::detail::to<Tensor>(result);
    if (wanted) *grad = tensor;
  };
  if (a.rms) {
    StableIValue stack[] = {
        boxed(call.dz),    boxed(call.x),         boxed(call.rs),
        boxed(call.gamma), boxed(call.dresidual), boxed(a.zero_centered_gamma),
        boxed(a.need_dx),  boxed(a.need_dgamma),
    };
    call_operator("flashbwd::rms_norm_backward_reference", stack);
    keep(stack[0], a.need_dx, &grads.dx);
    keep(stack[1], a.need_dgamma, &grads.dgamma);
  } else {
    StableIValue stack[] = {
        boxed(call.dz),
        boxed(call.x),
        boxed(*call.mu),
        boxed(call.rs),
        boxed(call.gamma),
        boxed(call.dresidual),
        boxed(a.zero_centered_gamma),
        boxed(a.need_dx),
        boxed(a.need_dgamma),
        boxed(a.need_dbeta),
    };
    call_operator("flashbwd::layer_norm_backward_reference", stack);
    keep(stack[0], a.need_dx, &grads.dx);
    keep(stack[1], a.need_dgamma, &grads.dgamma);
    keep(stack[2], a.need_dbeta, &grads.dbeta);
  }
  return grads;
}

// A tensor as kernels take it, and its row stride. Rows at several distances are copied.
struct Rows {
  Tensor tensor;
  int64_t stride;
};

Rows with_one_row_stride(const Tensor& tensor) {
  if (const std::optional<int64_t> stride = row_stride_of(describe(tensor))) return {tensor, *stride};
  return {torch::stable::contiguous(tensor), tensor.size(tensor.dim() - 1)};
}

// Statistics as kernels take them: packed, in float32.
Tensor as_statistics(const Tensor& tensor) {
  if (tensor.scalar_type() == ScalarType::Float) return packed(tensor);
  return torch::stable::to(packed(tensor), ScalarType::Float);
}

NormGradients run_kernel(const NormCall& call, LayerNormBackwardParams params, const DeviceInfo& info) {
  const CudaBackend& cuda = *cuda_backend();
  const LayerNormArguments& a = call.arguments;
  const torch::stable::accelerator::DeviceGuard guard(a.x.device.index);
  NormGradients grads;
  if (a.need_dx) grads.dx = torch::stable::empty_like(call.x);
  if (a.need_dgamma) grads.dgamma = new_empty(call.x, {params.columns}, params.gamma_dtype);
  if (a.need_dbeta) grads.dbeta = new_empty(call.x, {params.columns}, params.gamma_dtype);

  const Rows dz = with_one_row_stride(call.dz);
  const Rows x = with_one_row_stride(call.x);
  params.dz = dz.tensor.data_ptr();
  params.dz_row_stride = dz.stride;
  params.x = x.tensor.data_ptr();
  params.x_row_stride = x.stride;
  const Tensor rs = as_statistics(call.rs);
  params.rs = static_cast<const float*>(rs.data_ptr());
  std::optional<Tensor> mu, gamma, workspace;
  if (call.mu.has_value()) {
    mu = as_statistics(*call.mu);
    params.mu = static_cast<const float*>(mu->data_ptr());
  }
  if (call.gamma.has_value()) {
    gamma = packed(*call.gamma);
    params.gamma = gamma->data_ptr();
  }
  std::optional<Rows> dresidual, dx;
  if (a.need_dx) {
    dx = with_one_row_stride(*grads.dx);
    params.dx = dx->tensor.data_ptr();
    params.dx_row_stride = dx->stride;
    if (call.dresidual.has_value()) {
      dresidual = with_one_row_stride(*call.dresidual);
      params.dresidual = dresidual->tensor.data_ptr();
      params.dresidual_row_stride = dresidual->stride;
    }
  }
  if (a.need_dgamma) params.dgamma = grads.dgamma->data_ptr();
  if (a.need_dbeta) params.dbeta = grads.dbeta->data_ptr();
  params.workspace_bytes = cuda.layer_norm_workspace(params, info);
  if (params.workspace_bytes > 0) {
    workspace = new_empty(call.x, {params.workspace_bytes}, DType::kUInt8);
    params.workspace = workspace->data_ptr();
  }
  const char* error = cuda.layer_norm_backward(params, info, cuda.current_stream(a.x.device.index));
  STD_TORCH_CHECK(error == nullptr, "flashbwd: ", error);
  if (dx.has_value() && dx->tensor.get() != grads.dx->get()) torch::stable::copy_(*grads.dx, dx->tensor);
  return grads;
}

DeviceInfo norm_device_info(Device device) {
  DeviceInfo info;
  if (cuda_backend() == nullptr || cuda_backend()->layer_norm_backward == nullptr) {
    info.why_not = "this installation holds no LayerNorm kernels";
  } else if (device.type == DeviceType::kCUDA) {
    info = cuda_backend()->device_info(device.index);
  }
  return info;
}

NormGradients run(NormCall& call) {
  const LayerNormBackwardParams params = checked(call);
  const Device device = call.arguments.x.device;
  const DeviceInfo info = norm_device_info(device);
  return layer_norm_refusal(params.x_dtype, params.columns, device, info).empty() ? run_kernel(call, params, info)
                                                                                  : run_reference(call);
}

// Operators return tensors, never none: what was not asked for is an empty one.
Tensor or_empty(const std::optional<Tensor>& tensor, const NormCall& call) {
  return tensor.has_value() ? *tensor : new_empty(call.x, {0}, call.arguments.x.dtype);
}

void layer_norm_backward(StableIValue* stack, uint64_t, uint64_t) {
  NormCall call = read_call(stack, false);
  const NormGradients grads = run(call);
  stack[0] = boxed(or_empty(grads.dx, call));
  stack[1] = boxed(or_empty(grads.dgamma, call));
  stack[2] = boxed(or_empty(grads.dbeta, call));
}

void rms_norm_backward(StableIValue* stack, uint64_t, uint64_t) {
  NormCall call = read_call(stack, true);
  const NormGradients grads = run(call);
  stack[0] = boxed(or_empty(grads.dx, call));
  stack[1] = boxed(or_empty(grads.dgamma, call));
}

// Uninitialised statistics of x's rows, (..., 1): a dimension of x that is split over devices is one of theirs too.
Tensor new_statistics(const Tensor& x) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = 1;
  return torch::stable::new_empty(x, {sizes.data(), sizes.size()}, ScalarType::Float);
}

// z like x, mu and rs (..., 1) in float32; mu is empty for RMSNorm. By the kernel, where there is one.
void norm_forward(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader reader(stack);
  const Tensor x = reader.tensor();
  const std::optional<Tensor> gamma = reader.optional_tensor();
  const std::optional<Tensor> beta = reader.optional_tensor();
  LayerNormForwardArguments a;
  a.eps = reader.read<double>();
  a.zero_centered_gamma = reader.read<bool>();
  a.rms = reader.read<bool>();
  a.x = describe(x);
  a.gamma = describe(gamma);
  a.beta = describe(beta);
  LayerNormForwardParams params = check_layer_norm_forward(a);
  if (!layer_norm_refusal(params.x_dtype, params.columns, a.x.device, norm_device_info(a.x.device)).empty()) {
    StableIValue reference[] = {boxed(x),    boxed(gamma), boxed(beta), boxed(a.eps), boxed(a.zero_centered_gamma),
                                boxed(a.rms)};
    call_operator("flashbwd::norm_forward_reference", reference);
    for (int i = 0; i < 3; ++i) stack[i] = reference[i];
    return;
  }
  const torch::stable::accelerator::DeviceGuard guard(a.x.device.index);
  const Rows rows = with_one_row_stride(x);
  Tensor z = torch::stable::empty_like(x);
  const Rows z_rows = with_one_row_stride(z);
  const Tensor mu = a.rms ? new_empty(x, {0}, DType::kFloat32) : new_statistics(x);
  const Tensor rs = new_statistics(x);
  params.x = rows.tensor.data_ptr();
  params.x_row_stride = rows.stride;
  params.z = z_rows.tensor.data_ptr();
  params.z_row_stride = z_rows.stride;
  std::optional<Tensor> packed_gamma, packed_beta;
  if (gamma.has_value()) {
    packed_gamma = packed(*gamma);
    params.gamma = packed_gamma->data_ptr();
  }
  if (beta.has_value()) {
    packed_beta = packed(*beta);
    params.beta = packed_beta->data_ptr();
  }
  if (!a.rms) params.mu = static_cast<float*>(mu.data_ptr());
  params.rs = static_cast<float*>(rs.data_ptr());
  const CudaBackend& cuda = *cuda_backend();
  const char* error = cuda.layer_norm_forward(params, cuda.current_stream(a.x.device.index));
  STD_TORCH_CHECK(error == nullptr, "flashbwd: ", error);
  if (z_rows.tensor.get() != z.get()) torch::stable::copy_(z, z_rows.tensor);
  stack[0] = boxed(z);
  stack[1] = boxed(mu);
  stack[2] = boxed(rs);
}

}  // namespace

Tensor packed(const Tensor& tensor) {
  const TensorDesc desc = describe(tensor);
  int64_t stride = 1;
  for (int i = desc.dim - 1; i >= 0; --i) {
    if (desc.sizes[i] != 1 && desc.strides[i] != stride) return torch::stable::contiguous(tensor);
    stride *= desc.sizes[i];
  }
  return tensor;
}

NormGradients norm_backward_or_refusal(NormCall& call, bool any_backend) {
  try {
    const LayerNormBackwardParams params = checked(call);
    const Device device = call.arguments.x.device;
    const DeviceInfo info = norm_device_info(device);
    const std::string refusal = layer_norm_refusal(params.x_dtype, params.columns, device, info);
    if (refusal.empty()) return run_kernel(call, params, info);
    if (any_backend) return run_reference(call);
    return {{}, {}, {}, refusal};
  } catch (const std::invalid_argument& error) {
    return {{}, {}, {}, error.what()};
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
  // Below flashbwd::layer_norm and flashbwd::rms_norm, which have the gradients.
  m.def(
      "norm_forward(Tensor x, Tensor? gamma, Tensor? beta, float eps, bool zero_centered_gamma, bool rms) "
      "-> (Tensor z, Tensor mu, Tensor rs)");
  // Implemented in Python on torch operators; the operators above call them where there is no kernel.
  m.def(
      "norm_forward_reference(Tensor x, Tensor? gamma, Tensor? beta, float eps, bool zero_centered_gamma, bool rms) "
      "-> (Tensor z, Tensor mu, Tensor rs)");
  m.def(
      "layer_norm_backward_reference(Tensor dz, Tensor x, Tensor mu, Tensor rs, Tensor? gamma, Tensor? dresidual, "
      "bool zero_centered_gamma, bool need_dx, bool need_dgamma, bool need_dbeta) "
      "-> (Tensor dx, Tensor dgamma, Tensor dbeta)");
  m.def(
      "rms_norm_backward_reference(Tensor dz, Tensor x, Tensor rs, Tensor? gamma, Tensor? dresidual, "
      "bool zero_centered_gamma, bool need_dx, bool need_dgamma) -> (Tensor dx, Tensor dgamma)");
}

#define FLASHBWD_IMPLEMENT(key)                                   \
  STABLE_TORCH_LIBRARY_IMPL(flashbwd, key, m) {                   \
    m.impl("layer_norm_backward", flashbwd::layer_norm_backward); \
    m.impl("rms_norm_backward", flashbwd::rms_norm_backward);     \
    m.impl("norm_forward", flashbwd::norm_forward);               \
  }

FLASHBWD_IMPLEMENT(CPU)
FLASHBWD_IMPLEMENT(CUDA)

// The LayerNorm and RMSNorm forward operators. Each checks its arguments, allocates the results and launches.
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <array>
#include <vector>

#include "../common/check.h"
#include "cuda_backend.h"
#include "layer_norm.h"
#include "norm_call.h"

namespace flashbwd {
namespace {

// Owns the tensors that `arguments` describes.
struct ForwardCall {
  Tensor x;
  std::optional<Tensor> residual, gamma, beta;
  Dropout dropout;
  LayerNormForwardArguments arguments;

  // Describes and checks the tensors. Call it after all arguments have been read, since it can throw.
  LayerNormForwardParams checked() {
    LayerNormForwardArguments& a = arguments;
    a.x = describe(x);
    a.residual = describe(residual);
    a.gamma = describe(gamma);
    a.beta = describe(beta);
    a.dropout.keep = describe(dropout.keep);
    a.dropout.rng = describe(dropout.rng);
    return check_layer_norm_forward(a);
  }
};

struct Results {
  Tensor z;
  std::optional<Tensor> h;  // set if there is a residual
  Tensor mu, rs;
};

// Allocates mu or rs (..., 1) for the rows of x. They keep the leading dimensions of x, so that a sharding of x
// (DTensor) applies to them too.
Tensor new_statistics(const Tensor& x) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = 1;
  return new_empty(x, {sizes.data(), sizes.size()}, ScalarType::Float);
}

// Allocates the results and runs the CUDA kernel, or the C++ loops on a CPU.
Results run_kernel(ForwardCall& call, LayerNormForwardParams params) {
  const LayerNormForwardArguments& a = call.arguments;
  const bool on_cuda = a.x.device.type == DeviceType::kCUDA;
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
  if (on_cuda) guard.emplace(a.x.device.index);
  Results results{new_like(call.x), std::nullopt,
                  a.rms ? new_empty(call.x, {0}, DType::kFloat32) : new_statistics(call.x), new_statistics(call.x)};
  const Rows x = with_one_row_stride(call.x);
  params.x = x.tensor.data_ptr();
  params.x_row_stride = x.stride;
  const Rows z = with_one_row_stride(results.z);
  params.z = z.tensor.data_ptr();
  params.z_row_stride = z.stride;
  std::optional<Rows> residual, h;
  if (call.residual.has_value()) {
    results.h = new_like(*call.residual);
    residual = with_one_row_stride(*call.residual);
    h = with_one_row_stride(*results.h);
    params.residual = residual->tensor.data_ptr();
    params.residual_row_stride = residual->stride;
    params.h = h->tensor.data_ptr();
    params.h_row_stride = h->stride;
    call.dropout.write_to(&params.dropout);
  }
  std::optional<Tensor> gamma, beta;
  if (call.gamma.has_value()) {
    gamma = packed(*call.gamma);
    params.gamma = gamma->data_ptr();
  }
  if (call.beta.has_value()) {
    beta = packed(*call.beta);
    params.beta = beta->data_ptr();
  }
  if (!a.rms) params.mu = static_cast<float*>(results.mu.data_ptr());
  params.rs = static_cast<float*>(results.rs.data_ptr());
  if (on_cuda) {
    const CudaBackend& cuda = *cuda_backend();
    const char* error = cuda.layer_norm_forward(params, cuda.current_stream(a.x.device.index));
    STD_TORCH_CHECK(error == nullptr, "flashbwd: ", error);
  } else {
    cpu::layer_norm_forward(params, host_threads());
  }
  if (z.tensor.get() != results.z.get()) torch::stable::copy_(results.z, z.tensor);
  if (h.has_value() && h->tensor.get() != results.h->get()) torch::stable::copy_(*results.h, h->tensor);
  return results;
}

// True if a CUDA kernel, or on the CPU the reference's C++ loops, support the call. Else the reference runs in Python.
bool has_kernel(const ForwardCall& call, const LayerNormForwardParams& params) {
  const Device device = call.arguments.x.device;
  if (device.type == DeviceType::kCPU) return !call.residual.has_value() && cpu::supports(params.x_dtype);
  return layer_norm_refusal(params.x_dtype, params.columns, device, norm_device_info(device)).empty();
}

// Computes z like x, and mu and rs (..., 1) in float32; mu is empty for RMSNorm. Calls the reference in Python if no
// kernel supports the call.
std::array<StableIValue, 3> run(ForwardCall& call) {
  const LayerNormForwardArguments& a = call.arguments;
  const LayerNormForwardParams params = call.checked();
  if (has_kernel(call, params)) {
    const Results results = run_kernel(call, params);
    return {boxed(results.z), boxed(results.mu), boxed(results.rs)};
  }
  StableIValue reference[] = {
      boxed(call.x), boxed(call.gamma), boxed(call.beta), boxed(a.eps), boxed(a.zero_centered_gamma), boxed(a.rms),
  };
  call_operator("flashbwd::norm_forward_reference", reference);
  return {reference[0], reference[1], reference[2]};
}

}  // namespace

// The forward without autograd. The autograd rule is in Python; it alone reads the operator's last argument.
void layer_norm(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader reader(stack);
  ForwardCall call{reader.tensor(), std::nullopt, reader.optional_tensor(), reader.optional_tensor(), {}, {}};
  call.arguments.eps = reader.read<double>();
  call.arguments.zero_centered_gamma = reader.read<bool>();
  const std::array<StableIValue, 3> results = run(call);
  std::copy(results.begin(), results.end(), stack);
}

// Like layer_norm(), but for RMSNorm. Returns z and rs.
void rms_norm(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader reader(stack);
  ForwardCall call{reader.tensor(), std::nullopt, reader.optional_tensor(), std::nullopt, {}, {}};
  call.arguments.eps = reader.read<double>();
  call.arguments.zero_centered_gamma = reader.read<bool>();
  call.arguments.rms = true;
  const auto [z, mu, rs] = run(call);
  torch::stable::detail::to<Tensor>(mu);  // takes ownership of the unused mu and releases it
  stack[0] = z;
  stack[1] = rs;
}

// Like layer_norm() and rms_norm(), but normalises h = residual + dropout(x) and returns h too.
void dropout_add_norm_forward(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader reader(stack);
  ForwardCall call{reader.tensor(),
                   reader.tensor(),
                   reader.optional_tensor(),
                   reader.optional_tensor(),
                   {reader.optional_tensor(), reader.optional_tensor()},
                   {}};
  LayerNormForwardArguments& a = call.arguments;
  a.dropout.p = reader.read<double>();
  a.eps = reader.read<double>();
  a.zero_centered_gamma = reader.read<bool>();
  a.rms = reader.read<bool>();
  const LayerNormForwardParams params = call.checked();
  if (has_kernel(call, params)) {
    const Results results = run_kernel(call, params);
    stack[0] = boxed(results.z);
    stack[1] = boxed(*results.h);
    stack[2] = boxed(results.mu);
    stack[3] = boxed(results.rs);
    return;
  }
  StableIValue reference[] = {
      boxed(call.x),
      boxed(*call.residual),
      boxed(call.gamma),
      boxed(call.beta),
      boxed(call.dropout.keep),
      boxed(call.dropout.rng),
      boxed(a.dropout.p),
      boxed(a.eps),
      boxed(a.zero_centered_gamma),
      boxed(a.rms),
  };
  call_operator("flashbwd::dropout_add_norm_forward_reference", reference);
  for (int i = 0; i < 4; ++i) stack[i] = reference[i];
}

}  // namespace flashbwd

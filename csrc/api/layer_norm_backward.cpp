// The LayerNorm and RMSNorm backward operators. Each checks its arguments, allocates the gradients and launches.
#include <torch/csrc/stable/accelerator.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../common/check.h"
#include "cuda_backend.h"
#include "layer_norm.h"
#include "norm_call.h"

namespace flashbwd {
namespace {

LayerNormBackwardParams checked(NormCall& call) {
  LayerNormArguments& a = call.arguments;
  describe(call.dz, a.dz);
  describe(call.x, a.x);
  describe(call.mu, a.mu);
  describe(call.rs, a.rs);
  describe(call.gamma, a.gamma);
  describe(call.beta, a.beta);
  describe(call.dresidual, a.dresidual);
  describe(call.dropout.keep, a.dropout.keep);
  describe(call.dropout.rng, a.dropout.rng);
  return check_layer_norm(a);
}

// Converts statistics to the kernels' format: contiguous float32.
Tensor as_statistics(const Tensor& tensor) {
  if (tensor.scalar_type() == ScalarType::Float) return packed(tensor);
  return torch::stable::to(packed(tensor), ScalarType::Float);
}

// The memory that the kernel writes a gradient to: the gradient itself, or a contiguous copy if its rows are not
// equidistant.
struct Target {
  std::optional<Rows> rows;

  Target(const std::optional<Tensor>& grad, void** data, int64_t* stride) {
    if (!grad.has_value()) return;
    rows = with_one_row_stride(*grad);
    *data = rows->tensor.data_ptr();
    *stride = rows->stride;
  }

  // Copies the gradient back if the kernel wrote a copy.
  void finish(std::optional<Tensor>* grad) const {
    if (rows.has_value() && rows->tensor.get() != (*grad)->get()) torch::stable::copy_(**grad, rows->tensor);
  }
};

void run_on_cuda(const NormCall& call, LayerNormBackwardParams params, const DeviceInfo& info) {
  const CudaBackend& cuda = *cuda_backend();
  std::optional<Tensor> workspace;
  params.workspace_bytes = cuda.layer_norm_workspace(params, info);
  if (params.workspace_bytes > 0) {
    workspace = new_empty(call.x, {params.workspace_bytes}, DType::kUInt8);
    params.workspace = workspace->data_ptr();
  }
  const char* error = cuda.layer_norm_backward(params, info, cuda.current_stream(call.arguments.x.device.index));
  STD_TORCH_CHECK(error == nullptr, "flashbwd: ", error);
}

// Allocates the gradients and runs the CUDA kernel, or the C++ loops on a CPU.
NormGradients run_kernel(NormCall& call, LayerNormBackwardParams params, const DeviceInfo& info) {
  const LayerNormArguments& a = call.arguments;
  const bool on_cuda = a.x.device.type == DeviceType::kCUDA;
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
  if (on_cuda) guard.emplace(a.x.device.index);
  // The kernel's dx is the gradient of the norm's input. In the dropout form that input is h = residual + dropout(x),
  // so it is also the residual's gradient, and x's gradient is the kernel's dbranch.
  const bool dropout = a.form == NormForm::kDropout;
  NormGradients grads;
  if (a.need_dx) grads.dx = new_like(dropout ? call.dz : call.x);
  if (a.need_dresidual) grads.dresidual = new_like(call.x);
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
  std::optional<Tensor> mu, gamma, beta;
  if (call.mu.has_value()) {
    mu = as_statistics(*call.mu);
    params.mu = static_cast<const float*>(mu->data_ptr());
  }
  if (call.gamma.has_value()) {
    gamma = packed(*call.gamma);
    params.gamma = gamma->data_ptr();
  }
  if (call.beta.has_value()) {
    beta = packed(*call.beta);
    params.beta = beta->data_ptr();
  }
  const Target dx(dropout ? grads.dresidual : grads.dx, &params.dx, &params.dx_row_stride);
  const Target branch(dropout ? grads.dx : std::nullopt, &params.dbranch, &params.dbranch_row_stride);
  call.dropout.write_to(&params.dropout);
  std::optional<Rows> dresidual;
  if (call.dresidual.has_value()) {
    dresidual = with_one_row_stride(*call.dresidual);
    params.dresidual = dresidual->tensor.data_ptr();
    params.dresidual_row_stride = dresidual->stride;
  }
  if (a.need_dgamma) params.dgamma = grads.dgamma->data_ptr();
  if (a.need_dbeta) params.dbeta = grads.dbeta->data_ptr();
  if (on_cuda) {
    run_on_cuda(call, params, info);
  } else {
    cpu::layer_norm_backward(params, host_threads());
  }
  dx.finish(dropout ? &grads.dresidual : &grads.dx);
  branch.finish(&grads.dx);
  return grads;
}

// Calls a reference operator with `arguments` and stores its outputs in `results`, as pairs (wanted, target); an output
// that is not wanted is dropped.
template <size_t kSize>
void call_reference(const char* name, StableIValue (&arguments)[kSize],
                    std::initializer_list<std::pair<bool, std::optional<Tensor>*>> results) {
  call_operator(name, arguments);
  const StableIValue* next = arguments;
  for (const auto& [wanted, result] : results) {
    const Tensor tensor = torch::stable::detail::to<Tensor>(*next++);
    if (wanted) *result = tensor;
  }
}

NormGradients run_in_python(const NormCall& call) {
  const LayerNormArguments& a = call.arguments;
  NormGradients grads;
  const std::pair<bool, std::optional<Tensor>*> dx{a.need_dx, &grads.dx}, dgamma{a.need_dgamma, &grads.dgamma},
      dbeta{a.need_dbeta, &grads.dbeta}, dresidual{a.need_dresidual, &grads.dresidual};
  if (a.form == NormForm::kDropout) {
    StableIValue arguments[] = {
        boxed(call.dz),           boxed(call.x),
        boxed(call.mu),           boxed(call.rs),
        boxed(call.gamma),        boxed(call.dresidual),
        boxed(call.dropout.keep), boxed(call.dropout.rng),
        boxed(a.dropout.p),       boxed(a.zero_centered_gamma),
        boxed(a.need_dx),         boxed(a.need_dresidual),
        boxed(a.need_dgamma),     boxed(a.need_dbeta),
    };
    call_reference("flashbwd::dropout_add_norm_backward_reference", arguments, {dx, dresidual, dgamma, dbeta});
  } else if (a.form == NormForm::kOutput) {
    StableIValue arguments[] = {
        boxed(call.dz),
        boxed(call.x),
        boxed(call.rs),
        boxed(call.gamma),
        boxed(call.beta),
        boxed(call.dresidual),
        boxed(a.zero_centered_gamma),
        boxed(a.rms),
        boxed(a.need_dx),
        boxed(a.need_dgamma),
        boxed(a.need_dbeta),
    };
    call_reference("flashbwd::norm_backward_from_output_reference", arguments, {dx, dgamma, dbeta});
  } else if (a.rms) {
    StableIValue arguments[] = {
        boxed(call.dz),    boxed(call.x),         boxed(call.rs),
        boxed(call.gamma), boxed(call.dresidual), boxed(a.zero_centered_gamma),
        boxed(a.need_dx),  boxed(a.need_dgamma),
    };
    call_reference("flashbwd::rms_norm_backward_reference", arguments, {dx, dgamma});
  } else {
    StableIValue arguments[] = {
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
    call_reference("flashbwd::layer_norm_backward_reference", arguments, {dx, dgamma, dbeta});
  }
  return grads;
}

// Runs the reference backend: C++ loops if the tensors are on the CPU and the loops support the call, else Python.
NormGradients run_reference(NormCall& call, const LayerNormBackwardParams& params) {
  const LayerNormArguments& a = call.arguments;
  const bool on_cpu = a.x.device.type == DeviceType::kCPU;
  const bool in_cpp = on_cpu && a.form == NormForm::kInput && cpu::supports(params.x_dtype);
  return in_cpp ? run_kernel(call, params, {}) : run_in_python(call);
}

NormGradients run(NormCall& call) {
  const LayerNormBackwardParams params = checked(call);
  const Device device = call.arguments.x.device;
  const DeviceInfo info = norm_device_info(device);
  return layer_norm_refusal(params.x_dtype, params.columns, device, info).empty() ? run_kernel(call, params, info)
                                                                                  : run_reference(call, params);
}

// The schemas return Tensor, not Tensor?, so an output that was not requested is an empty tensor.
void put(StableIValue* stack, const NormCall& call, std::initializer_list<const std::optional<Tensor>*> results) {
  for (const std::optional<Tensor>* result : results) {
    *stack++ = boxed(result->has_value() ? **result : new_empty(call.x, {0}, call.arguments.x.dtype));
  }
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
  check_output_mask(mask, rms ? 2 : 3);
  a.need_dx = mask[0];
  a.need_dgamma = mask[1] && call.gamma.has_value();
  a.need_dbeta = !rms && mask[2];
  return call;
}

}  // namespace

NormGradients norm_backward_or_refusal(NormCall& call, bool any_backend) {
  const auto refused = [](std::string reason) {
    NormGradients none;
    none.refusal = std::move(reason);
    return none;
  };
  try {
    const LayerNormBackwardParams params = checked(call);
    const Device device = call.arguments.x.device;
    const DeviceInfo info = norm_device_info(device);
    const std::string refusal = layer_norm_refusal(params.x_dtype, params.columns, device, info);
    if (refusal.empty()) return run_kernel(call, params, info);
    return any_backend ? run_reference(call, params) : refused(refusal);
  } catch (const std::invalid_argument& error) {
    return refused(error.what());
  }
}

void layer_norm_backward(StableIValue* stack, uint64_t, uint64_t) {
  NormCall call = read_call(stack, false);
  const NormGradients grads = run(call);
  put(stack, call, {&grads.dx, &grads.dgamma, &grads.dbeta});
}

void rms_norm_backward(StableIValue* stack, uint64_t, uint64_t) {
  NormCall call = read_call(stack, true);
  const NormGradients grads = run(call);
  put(stack, call, {&grads.dx, &grads.dgamma});
}

// The backward from the norm's output: takes z and beta instead of x and mu.
void norm_backward_from_output(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader reader(stack);
  NormCall call{reader.tensor(), reader.tensor(), {}, reader.tensor(), reader.optional_tensor(), {}, {}};
  call.beta = reader.optional_tensor();
  call.dresidual = reader.optional_tensor();
  LayerNormArguments& a = call.arguments;
  a.form = NormForm::kOutput;
  a.zero_centered_gamma = reader.read<bool>();
  a.rms = reader.read<bool>();
  const std::vector<bool> mask = reader.read<std::vector<bool>>();
  check_output_mask(mask, 3);
  a.need_dx = mask[0];
  a.need_dgamma = mask[1] && call.gamma.has_value();
  a.need_dbeta = !a.rms && mask[2];
  const NormGradients grads = run(call);
  put(stack, call, {&grads.dx, &grads.dgamma, &grads.dbeta});
}

// The backward of z = norm(h), h = residual + dropout(x).
void dropout_add_norm_backward(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader reader(stack);
  NormCall call{
      reader.tensor(), reader.tensor(), reader.optional_tensor(), reader.tensor(), reader.optional_tensor(), {}, {}};
  call.dresidual = reader.optional_tensor();
  call.dropout.keep = reader.optional_tensor();
  call.dropout.rng = reader.optional_tensor();
  LayerNormArguments& a = call.arguments;
  a.form = NormForm::kDropout;
  a.dropout.p = reader.read<double>();
  a.zero_centered_gamma = reader.read<bool>();
  const std::vector<bool> mask = reader.read<std::vector<bool>>();
  check_output_mask(mask, 4);
  a.rms = !call.mu.has_value();
  a.need_dx = mask[0];
  a.need_dresidual = mask[1];
  a.need_dgamma = mask[2] && call.gamma.has_value();
  a.need_dbeta = !a.rms && mask[3];
  const NormGradients grads = run(call);
  put(stack, call, {&grads.dx, &grads.dresidual, &grads.dgamma, &grads.dbeta});
}

}  // namespace flashbwd

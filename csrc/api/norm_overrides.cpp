// Overrides of PyTorch's LayerNorm and RMSNorm backward operators, implemented with this library's kernels.
#include <algorithm>

#include "norm_call.h"
#include "overrides.h"
#include "pytorch_kernels.h"

namespace flashbwd {
namespace {

using MaybeTensor = std::optional<Tensor>;
using Shape = std::vector<int64_t>;

bool ends_with(const Tensor& x, const Shape& shape) {
  const size_t dims = static_cast<size_t>(x.dim());
  if (shape.empty() || shape.size() > dims) return false;
  return std::equal(shape.begin(), shape.end(), x.sizes().end() - static_cast<int64_t>(shape.size()));
}

// x with its last `dims` dimensions, over which it is normalised, flattened to one.
Tensor in_rows(const Tensor& x, size_t dims) {
  if (dims == 1) return x;
  Shape shape(x.sizes().begin(), x.sizes().end() - static_cast<int64_t>(dims));
  shape.push_back(-1);
  return torch::stable::reshape(x, {shape.data(), shape.size()});
}

Tensor flat(const Tensor& x, size_t dims) {
  constexpr int64_t kAll = -1;
  return dims == 1 ? x : torch::stable::reshape(x, {&kAll, 1});
}

Tensor like(const Tensor& grad, const Tensor& parameter) {
  Tensor result = grad;
  if (grad.scalar_type() != parameter.scalar_type()) result = torch::stable::to(grad, parameter.scalar_type());
  return parameter.dim() == 1 ? result : torch::stable::view(result, parameter.sizes());
}

Attempt run(const Tensor& dz, const Tensor& input, const Shape& normalized_shape, const MaybeTensor& mean,
            const Tensor& rstd, const MaybeTensor& weight, const MaybeTensor& bias, const std::vector<bool>& mask) {
  if (!is_given(dz)) return refused(kNoGradient);
  check_output_mask(mask, mean.has_value() ? 3 : 2);
  if (!ends_with(input, normalized_shape)) return refused("x does not end with normalized_shape");
  const size_t dims = normalized_shape.size();
  const Tensor x = packed(input);  // contiguous, so that dx is contiguous like PyTorch's
  NormCall call{in_rows(dz, dims), in_rows(x, dims), {}, flat(rstd, dims), {}, {}, {}};
  if (mean.has_value()) call.mu = flat(*mean, dims);
  if (is_given(weight)) call.gamma = flat(*weight, dims);
  LayerNormArguments& a = call.arguments;
  a.rms = !mean.has_value();
  a.need_dx = mask[0];
  a.need_dgamma = mask[1] && call.gamma.has_value();
  a.need_dbeta = mask.size() == 3 && mask[2] && is_given(bias);
  NormGradients grads = norm_backward_or_refusal(call, forced_backend() == "reference");
  if (!grads.refusal.empty()) return refused(std::move(grads.refusal));
  std::vector<Tensor> results(mask.size());  // undefined tensors
  if (grads.dx.has_value()) results[0] = dims == 1 ? *grads.dx : torch::stable::view(*grads.dx, x.sizes());
  if (grads.dgamma.has_value()) results[1] = like(*grads.dgamma, *weight);
  if (grads.dbeta.has_value()) results[2] = like(*grads.dbeta, *bias);
  return {std::move(results), {}};
}

// native_layer_norm_backward
Attempt layer_norm_backward(const Tensor& dz, const Tensor& x, const Shape& normalized_shape, const Tensor& mean,
                            const Tensor& rstd, const MaybeTensor& weight, const MaybeTensor& bias,
                            const std::vector<bool>& mask) {
  return run(dz, x, normalized_shape, mean, rstd, weight, bias, mask);
}

// _fused_rms_norm_backward
Attempt rms_norm_backward(const Tensor& dz, const Tensor& x, const Shape& normalized_shape, const Tensor& rstd,
                          const MaybeTensor& weight, const std::vector<bool>& mask) {
  return run(dz, x, normalized_shape, {}, rstd, weight, {}, mask);
}

}  // namespace

Override layer_norm_override{"native_layer_norm_backward", "flashbwd::fall_back_native_layer_norm_backward",
                             [](StableIValue* stack, uint64_t, uint64_t) {
                               run_override(layer_norm_override, layer_norm_backward, stack,
                                            pytorch::layer_norm_backward);
                             }};

Override rms_norm_override{"_fused_rms_norm_backward", "flashbwd::fall_back_fused_rms_norm_backward",
                           [](StableIValue* stack, uint64_t, uint64_t) {
                             run_override(rms_norm_override, rms_norm_backward, stack, pytorch::rms_norm_backward);
                           }};

}  // namespace flashbwd

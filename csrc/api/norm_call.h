// The tensors and options of one LayerNorm or RMSNorm backward call, read from an operator's stack or set by C++ code.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "../layer_norm/cpu/norms.h"
#include "../layer_norm/problem.h"
#include "tensors.h"

namespace flashbwd {

// A tensor with equidistant rows, as the kernels require, and its row stride in elements.
struct Rows {
  Tensor tensor;
  int64_t stride;
};
// `tensor` itself if its rows are equidistant, else a contiguous copy.
Rows with_one_row_stride(const Tensor& tensor);

// Like torch's contiguous(), but without a dispatcher call if `tensor` is contiguous already.
Tensor packed(const Tensor& tensor);

// Owns the tensors of a dropout that the arguments and the kernel parameters refer to.
struct Dropout {
  std::optional<Tensor> keep, rng;
  std::optional<Rows> keep_rows = {};

  // Writes the addresses to `params`.
  void write_to(DropoutParams* params);
};

// Owns the tensors that `arguments` describes.
struct NormCall {
  Tensor dz, x;              // x holds z or h in the other forms (see NormForm)
  std::optional<Tensor> mu;  // nullopt: RMSNorm, or not needed
  Tensor rs;
  std::optional<Tensor> gamma, dresidual;
  LayerNormArguments arguments;  // only the options; the tensors are described when the call is checked
  std::optional<Tensor> beta = {};
  Dropout dropout = {};
};

// The gradients (nullopt if not requested), or the reason why no kernel computes them.
struct NormGradients {
  std::optional<Tensor> dx, dgamma, dbeta;
  std::string refusal = {};
  std::optional<Tensor> dresidual = {};  // NormForm::kDropout only
};

// Runs the backward on a kernel, or returns the reason why no kernel supports the call. Throws only for launch errors.
// With `any_backend`, the reference runs if no kernel supports the call.
NormGradients norm_backward_or_refusal(NormCall& call, bool any_backend);

// Throws if the length of `mask` is wrong, which a schema's bool[3] does not prevent.
void check_output_mask(const std::vector<bool>& mask, size_t gradients);

// PyTorch's threads for loops on the CPU, as many as torch.get_num_threads() says.
cpu::Threads host_threads();

// The properties of a device, or (in why_not) the reason why this installation has no kernels for it.
DeviceInfo norm_device_info(Device device);

}  // namespace flashbwd

// One call of a LayerNorm or RMSNorm backward: its tensors and options, from an operator's stack or from C++.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "../layer_norm/problem.h"
#include "tensors.h"

namespace flashbwd {

// A tensor as kernels take it, and its row stride. Rows at several distances are copied.
struct Rows {
  Tensor tensor;
  int64_t stride;
};
Rows with_one_row_stride(const Tensor& tensor);

// `tensor` without gaps: itself, without asking the dispatcher, where it has none.
Tensor packed(const Tensor& tensor);

// The tensors of a dropout, which own what arguments and kernels point to.
struct Dropout {
  std::optional<Tensor> keep, rng;
  std::optional<Rows> keep_rows = {};

  // Adds the addresses to `params`.
  void place(DropoutParams* params);
};

// A call's tensors, which own what `arguments` point to.
struct NormCall {
  Tensor dz, x;              // x: z or h in the forms that have it
  std::optional<Tensor> mu;  // none: RMSNorm, or not needed
  Tensor rs;
  std::optional<Tensor> gamma, dresidual;
  LayerNormArguments arguments;  // the options; tensors are described when they are checked
  std::optional<Tensor> beta = {};
  Dropout dropout = {};
};

// Results, none where not asked for; or why no kernel computes them.
struct NormGradients {
  std::optional<Tensor> dx, dgamma, dbeta;
  std::string refusal = {};
  std::optional<Tensor> dresidual = {};  // where x was dropped out and added
};

// The backward by a kernel, or no gradients and a reason: nothing is raised but what a launch reports. With
// `any_backend` the reference counts as a kernel.
NormGradients norm_backward_or_refusal(NormCall& call, bool any_backend);

// A schema's bool[3] does not keep a caller of the operator from passing another number of flags.
void check_output_mask(const std::vector<bool>& mask, size_t gradients);

// The device of a norm, and what its kernels need to know of it.
DeviceInfo norm_device_info(Device device);

}  // namespace flashbwd

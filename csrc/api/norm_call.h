// One call of a LayerNorm or RMSNorm backward: its tensors and options, from an operator's stack or from C++.
#pragma once

#include <optional>
#include <string>

#include "../layer_norm/problem.h"
#include "tensors.h"

namespace flashbwd {

// A call's tensors, which own what `arguments` point to.
struct NormCall {
  Tensor dz, x;
  std::optional<Tensor> mu;  // none: RMSNorm
  Tensor rs;
  std::optional<Tensor> gamma, dresidual;
  LayerNormArguments arguments;  // the options; tensors are described when they are checked
};

// Results, none where not asked for; or why no kernel computes them.
struct NormGradients {
  std::optional<Tensor> dx, dgamma, dbeta;
  std::string refusal;
};

// The backward by a kernel, or no gradients and a reason: nothing is raised but what a launch reports. With
// `any_backend` the reference counts as a kernel.
NormGradients norm_backward_or_refusal(NormCall& call, bool any_backend);

// `tensor` without gaps: itself, without asking the dispatcher, where it has none.
Tensor packed(const Tensor& tensor);

}  // namespace flashbwd

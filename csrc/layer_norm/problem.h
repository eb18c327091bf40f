// The arguments of layer_norm_backward and rms_norm_backward as plain data, and the one table of checks on them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "../common/types.h"
#include "params.h"

namespace flashbwd {

// What stands in the place of x.
enum class NormForm {
  kInput,    // x, what was normalised
  kOutput,   // z, what came of it
  kDropout,  // h = residual + dropout(x), which was normalised: the gradients are those of x and of the residual
};

struct DropoutArguments {
  TensorDesc keep, rng;
  double p = 0.0;
};

// A backward operator's arguments, before any check. Names are those of the public functions.
struct LayerNormArguments {
  NormForm form = NormForm::kInput;
  TensorDesc dz, x, mu, rs, gamma, beta,
      dresidual;  // x: z or h in the other forms; mu undefined: RMSNorm, or not needed
  DropoutArguments dropout;
  bool rms = false;
  bool zero_centered_gamma = false;
  bool need_dx = true;
  bool need_dresidual = false;  // of Form::kDropout
  bool need_dgamma = true;      // false too where there is no gamma
  bool need_dbeta = true;
};

// Sizes and dtypes; tensors stay where they are. Throws std::invalid_argument whose message names the argument, what
// was expected and what came.
LayerNormBackwardParams check_layer_norm(const LayerNormArguments& arguments);

// The forward operators' arguments, before any check.
struct LayerNormForwardArguments {
  TensorDesc x, residual, gamma, beta;  // residual undefined: x is what is normalised
  DropoutArguments dropout;
  bool rms = false;
  bool zero_centered_gamma = false;
  double eps = 0.0;
};

// As check_layer_norm.
LayerNormForwardParams check_layer_norm_forward(const LayerNormForwardArguments& arguments);

// Elements from one row (..., N) to the next where the rows have one distance and contiguous elements, as kernels take
// them; none otherwise.
std::optional<int64_t> row_stride_of(const TensorDesc& tensor);

// Why no kernel takes rows of a dtype on a device; empty where one does.
std::string layer_norm_refusal(DType x_dtype, int64_t columns, Device place, const DeviceInfo& device);

}  // namespace flashbwd

// The arguments of the norm operators as plain data, and the checks on them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "../common/types.h"
#include "params.h"

namespace flashbwd {

// The tensor that a backward operator receives as `x`.
enum class NormForm {
  kInput,    // x, the input of the norm
  kOutput,   // z, the output of the norm
  kDropout,  // h = residual + dropout(x), the input of the norm; the gradients are those of x and of the residual
};

struct DropoutArguments {
  TensorDesc keep, rng;
  double p = 0.0;
};

// A backward operator's arguments, before any check. Names are those of the public functions.
struct LayerNormArguments {
  NormForm form = NormForm::kInput;
  // x is z in NormForm::kOutput and h in NormForm::kDropout. mu is undefined for RMSNorm or if it is not needed.
  TensorDesc dz, x, mu, rs, gamma, beta, dresidual;
  DropoutArguments dropout;
  bool rms = false;
  bool zero_centered_gamma = false;
  bool need_dx = true;
  bool need_dresidual = false;  // NormForm::kDropout only
  bool need_dgamma = true;      // also false if there is no gamma
  bool need_dbeta = true;
};

// Checks the arguments and returns params with sizes, dtypes and options; the caller sets the pointers and strides.
// Throws std::invalid_argument with "NAME is VALUE, expected ...".
LayerNormBackwardParams check_layer_norm(const LayerNormArguments& arguments);

// The forward operators' arguments, before any check.
struct LayerNormForwardArguments {
  TensorDesc x, residual, gamma, beta;  // if residual is undefined, x is normalised, else residual + dropout(x)
  DropoutArguments dropout;
  bool rms = false;
  bool zero_centered_gamma = false;
  double eps = 0.0;
};

// Like check_layer_norm().
LayerNormForwardParams check_layer_norm_forward(const LayerNormForwardArguments& arguments);

// The row stride, in elements, if the tensor (..., N) is a sequence of equidistant rows with contiguous elements, which
// the kernels require; nullopt otherwise.
std::optional<int64_t> row_stride_of(const TensorDesc& tensor);

// The reason why no kernel supports rows of this dtype and length on the device; empty if a kernel does.
std::string layer_norm_refusal(DType x_dtype, int64_t columns, Device device_of_x, const DeviceInfo& device);

}  // namespace flashbwd

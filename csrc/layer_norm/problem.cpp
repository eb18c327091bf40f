#include "problem.h"

#include "../common/check.h"

namespace flashbwd {
namespace {

bool is_floating(DType dtype) { return is_16bit(dtype) || dtype == DType::kFloat32 || dtype == DType::kFloat64; }

bool same_shape(const TensorDesc& a, const TensorDesc& b) {
  if (a.dim != b.dim) return false;
  for (int i = 0; i < a.dim; ++i) {
    if (a.sizes[i] != b.sizes[i]) return false;
  }
  return true;
}

// The tensor passed as `x`, and its name in error messages: x, z or h.
struct Named {
  const char* name;
  const TensorDesc& tensor;
};

// check() evaluates all arguments of its message on every call. If one of them is a std::string, the code below tests
// the condition itself and calls refuse(), so that a valid call does not build the string.

void check_device(const char* name, const TensorDesc& tensor, const Named& x) {
  if (tensor.device == x.tensor.device) return;
  refuse(name, " is on ", name_of(tensor.device), ", expected ", x.name, "'s ", name_of(x.tensor.device));
}

void check_like(const char* name, const TensorDesc& tensor, const Named& x) {
  if (!same_shape(tensor, x.tensor)) {
    refuse(name, " has shape ", shape_of(tensor), ", expected ", x.name, "'s ", shape_of(x.tensor));
  }
  check_device(name, tensor, x);
}

// True if the shape is (rows,), or x's shape with the last dimension replaced by 1.
bool has_statistics_shape(const TensorDesc& tensor, const TensorDesc& x, int64_t rows) {
  if (tensor.dim == 1 && tensor.sizes[0] == rows) return true;
  if (tensor.dim != x.dim || tensor.sizes[x.dim - 1] != 1) return false;
  for (int i = 0; i + 1 < x.dim; ++i) {
    if (tensor.sizes[i] != x.sizes[i]) return false;
  }
  return true;
}

void check_statistics(const char* name, const TensorDesc& tensor, const Named& x, int64_t rows) {
  if (!has_statistics_shape(tensor, x.tensor, rows)) {
    refuse(name, " has shape ", shape_of(tensor), ", expected (", rows, ",) or ", x.name, "'s ", shape_of(x.tensor),
           " with 1 for the last");
  }
  if (x.tensor.dtype == DType::kFloat64) {
    check(tensor.dtype == DType::kFloat64, name, " is ", name_of(tensor.dtype), ", expected float64 as ", x.name);
  } else {
    check(tensor.dtype == DType::kFloat32 || is_16bit(tensor.dtype), name, " is ", name_of(tensor.dtype),
          ", expected float32, float16 or bfloat16");
  }
  check_device(name, tensor, x);
}

void check_x(const Named& x) {
  const TensorDesc& t = x.tensor;
  check(t.dim >= 1, x.name, " has no dimensions, expected (..., N)");
  check(is_floating(t.dtype), x.name, " is ", name_of(t.dtype), ", expected float16, bfloat16, float32 or float64");
  if (t.sizes[t.dim - 1] < 1) {
    refuse(x.name, " has shape ", shape_of(t), ", expected at least 1 in the last dimension");
  }
}

// Requires gamma and beta to be (N,), in x's dtype or in float32 (only in float64 if x is float64).
void check_parameter(const char* name, const TensorDesc& tensor, const Named& x) {
  if (!tensor) return;
  const int64_t columns = x.tensor.sizes[x.tensor.dim - 1];
  const DType dtype = x.tensor.dtype;
  if (tensor.dim != 1 || tensor.sizes[0] != columns) {
    refuse(name, " has shape ", shape_of(tensor), ", expected (", columns, ",)");
  }
  check(tensor.dtype == dtype || (tensor.dtype == DType::kFloat32 && dtype != DType::kFloat64), name, " is ",
        name_of(tensor.dtype), ", expected ", x.name, "'s ", name_of(dtype),
        dtype == DType::kFloat64 || dtype == DType::kFloat32 ? "" : " or float32");
  check_device(name, tensor, x);
}

void check_parameters(const TensorDesc& gamma, const TensorDesc& beta, bool zero_centered_gamma, const Named& x) {
  check_parameter("gamma", gamma, x);
  check_parameter("beta", beta, x);
  check(!gamma || !beta || gamma.dtype == beta.dtype, "beta is ", name_of(beta.dtype), ", expected gamma's ",
        name_of(gamma.dtype));
  check(gamma || !zero_centered_gamma, "zero_centered_gamma is set, expected a gamma with it");
}

// The residual (or h) has x's dtype, or is float32 if x is 16-bit.
void check_residual_dtype(const char* name, const TensorDesc& residual, const Named& x) {
  check(residual.dtype == x.tensor.dtype || (residual.dtype == DType::kFloat32 && is_16bit(x.tensor.dtype)), name,
        " is ", name_of(residual.dtype), ", expected ", x.name, "'s ", name_of(x.tensor.dtype),
        is_16bit(x.tensor.dtype) ? " or float32" : "");
}

DropoutParams check_dropout(const DropoutArguments& d, const Named& x) {
  check(d.p >= 0.0 && d.p < 1.0, "dropout_p is ", d.p, ", expected 0 <= dropout_p < 1");
  if (d.keep) {
    check(d.keep.dtype == DType::kBool, "keep is ", name_of(d.keep.dtype), ", expected bool");
    check_like("keep", d.keep, x);
  }
  if (d.rng) {
    if (d.rng.dtype != DType::kInt64 || d.rng.dim != 1 || d.rng.sizes[0] != 2) {
      refuse("rng is ", name_of(d.rng.dtype), " of shape ", shape_of(d.rng),
             ", expected int64 of shape (2,): seed and offset");
    }
    check_device("rng", d.rng, x);
  }
  check(!d.keep || !d.rng, "keep and rng are both given, expected one of them");
  check(d.p == 0.0 || d.keep || d.rng, "dropout_p is ", d.p, ", expected keep or rng with it");
  DropoutParams params;
  params.p = d.p;
  return params;
}

}  // namespace

LayerNormForwardParams check_layer_norm_forward(const LayerNormForwardArguments& a) {
  const Named x{"x", a.x};
  check_x(x);
  check_parameters(a.gamma, a.beta, a.zero_centered_gamma, x);
  LayerNormForwardParams params;
  if (a.residual) {
    check_like("residual", a.residual, x);
    check_residual_dtype("residual", a.residual, x);
    params.dropout = check_dropout(a.dropout, x);
  }
  params.columns = a.x.sizes[a.x.dim - 1];
  params.rows = a.x.numel() / params.columns;
  params.x_dtype = a.x.dtype;
  params.h_dtype = a.residual ? a.residual.dtype : a.x.dtype;
  params.parameter_dtype = a.gamma ? a.gamma.dtype : (a.beta ? a.beta.dtype : a.x.dtype);
  params.eps = a.eps;
  params.zero_centered_gamma = a.zero_centered_gamma;
  return params;
}

LayerNormBackwardParams check_layer_norm(const LayerNormArguments& a) {
  const Named x{a.form == NormForm::kInput ? "x" : (a.form == NormForm::kOutput ? "z" : "h"), a.x};
  check_x(x);
  const DType dtype = a.x.dtype;
  const int64_t columns = a.x.sizes[a.x.dim - 1];
  const int64_t rows = a.x.numel() / columns;

  check_like("dz", a.dz, x);
  LayerNormBackwardParams params;
  if (a.form == NormForm::kInput) {
    check(is_floating(a.dz.dtype) && (a.dz.dtype == DType::kFloat64) == (dtype == DType::kFloat64), "dz is ",
          name_of(a.dz.dtype), ", expected ",
          dtype == DType::kFloat64 ? "float64 as x" : "float16, bfloat16 or float32");
  } else if (a.form == NormForm::kOutput) {
    check(a.dz.dtype == dtype, "dz is ", name_of(a.dz.dtype), ", expected z's ", name_of(dtype));
  } else {
    check(is_floating(a.dz.dtype), "dz is ", name_of(a.dz.dtype), ", expected float16, bfloat16, float32 or float64");
    check_residual_dtype("h", a.x, {"dz", a.dz});
    params.dropout = check_dropout(a.dropout, x);
  }
  check_statistics("rs", a.rs, x, rows);
  if (a.mu) {
    check_statistics("mu", a.mu, x, rows);
    check(a.mu.dtype == a.rs.dtype, "mu is ", name_of(a.mu.dtype), ", expected rs's ", name_of(a.rs.dtype));
  }
  // If h is float32 and the output is 16-bit, gamma and beta may have the output's dtype.
  const bool mixed = a.form == NormForm::kDropout && a.dz.dtype != dtype;
  check_parameters(a.gamma, a.beta, a.zero_centered_gamma, mixed ? Named{"dz", a.dz} : x);
  if (a.dresidual) {
    check_like("dresidual", a.dresidual, x);
    check(a.dresidual.dtype == dtype, "dresidual is ", name_of(a.dresidual.dtype), ", expected ", x.name, "'s ",
          name_of(dtype));
  }

  params.rows = rows;
  params.columns = columns;
  params.from_output = a.form == NormForm::kOutput;
  params.of_sum = a.form == NormForm::kDropout;
  params.centred = !a.rms;
  params.x_dtype = dtype;
  params.dz_dtype = a.dz.dtype;
  params.gamma_dtype = a.gamma ? a.gamma.dtype : (a.beta ? a.beta.dtype : a.dz.dtype);
  if (a.form == NormForm::kInput && !a.gamma) params.gamma_dtype = dtype;
  params.zero_centered_gamma = a.zero_centered_gamma;
  return params;
}

std::optional<int64_t> row_stride_of(const TensorDesc& tensor) {
  const int last = tensor.dim - 1;
  if (tensor.sizes[last] > 1 && tensor.strides[last] != 1) return std::nullopt;
  std::optional<int64_t> stride;
  int64_t rows = 1;  // product of the sizes of the inner dimensions, except the last one
  for (int i = last - 1; i >= 0; --i) {
    if (tensor.sizes[i] == 0) return 0;
    if (tensor.sizes[i] == 1) continue;
    if (stride.has_value() && tensor.strides[i] != *stride * rows) return std::nullopt;
    if (!stride.has_value()) stride = tensor.strides[i];
    rows *= tensor.sizes[i];
  }
  return stride.value_or(tensor.sizes[last]);
}

std::string layer_norm_refusal(DType x_dtype, int64_t columns, Device device_of_x, const DeviceInfo& device) {
  if (device_of_x.type != DeviceType::kCUDA) return "the tensors are not on a CUDA device";
  if (!device.usable) return device.why_not;
  if (device.cc_major < 8) return "the device is older than compute capability 8.0";
  if (x_dtype == DType::kFloat64) return "float64";
  constexpr int64_t kMostColumns = int64_t{1} << 28;  // the kernels use 32-bit column indices
  if (columns > kMostColumns) return "rows of more than 2^28 elements";
  return "";
}

}  // namespace flashbwd

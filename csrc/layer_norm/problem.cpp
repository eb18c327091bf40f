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

void check_device(const char* name, const TensorDesc& tensor, const TensorDesc& x) {
  check(tensor.device == x.device, name, " is on ", name_of(tensor.device), ", expected x's ", name_of(x.device));
}

void check_like_x(const char* name, const TensorDesc& tensor, const TensorDesc& x) {
  check(same_shape(tensor, x), name, " has shape ", shape_of(tensor), ", expected x's ", shape_of(x));
  check_device(name, tensor, x);
}

// (rows,) or x's shape with 1 for N.
bool has_statistics_shape(const TensorDesc& tensor, const TensorDesc& x, int64_t rows) {
  if (tensor.dim == 1 && tensor.sizes[0] == rows) return true;
  if (tensor.dim != x.dim || tensor.sizes[x.dim - 1] != 1) return false;
  for (int i = 0; i + 1 < x.dim; ++i) {
    if (tensor.sizes[i] != x.sizes[i]) return false;
  }
  return true;
}

void check_statistics(const char* name, const TensorDesc& tensor, const TensorDesc& x, int64_t rows) {
  check(has_statistics_shape(tensor, x, rows), name, " has shape ", shape_of(tensor), ", expected (", rows,
        ",) or x's ", shape_of(x), " with 1 for the last");
  if (x.dtype == DType::kFloat64) {
    check(tensor.dtype == DType::kFloat64, name, " is ", name_of(tensor.dtype), ", expected float64 as x");
  } else {
    check(tensor.dtype == DType::kFloat32 || is_16bit(tensor.dtype), name, " is ", name_of(tensor.dtype),
          ", expected float32, float16 or bfloat16");
  }
  check_device(name, tensor, x);
}

void check_x(const TensorDesc& x) {
  check(x.dim >= 1, "x has no dimensions, expected (..., N)");
  check(is_floating(x.dtype), "x is ", name_of(x.dtype), ", expected float16, bfloat16, float32 or float64");
  check(x.sizes[x.dim - 1] >= 1, "x has shape ", shape_of(x), ", expected at least 1 in the last dimension");
}

void check_parameter(const char* name, const TensorDesc& tensor, const TensorDesc& x) {
  if (!tensor) return;
  const int64_t columns = x.sizes[x.dim - 1];
  check(tensor.dim == 1 && tensor.sizes[0] == columns, name, " has shape ", shape_of(tensor), ", expected (", columns,
        ",)");
  check(tensor.dtype == x.dtype || (tensor.dtype == DType::kFloat32 && x.dtype != DType::kFloat64), name, " is ",
        name_of(tensor.dtype), ", expected x's ", name_of(x.dtype),
        x.dtype == DType::kFloat64 || x.dtype == DType::kFloat32 ? "" : " or float32");
  check_device(name, tensor, x);
}

void check_zero_centered(bool zero_centered_gamma, const TensorDesc& gamma) {
  check(gamma || !zero_centered_gamma, "zero_centered_gamma is set, expected a gamma with it");
}

}  // namespace

LayerNormForwardParams check_layer_norm_forward(const LayerNormForwardArguments& a) {
  check_x(a.x);
  check_parameter("gamma", a.gamma, a.x);
  check_parameter("beta", a.beta, a.x);
  check(!a.gamma || !a.beta || a.gamma.dtype == a.beta.dtype, "beta is ", name_of(a.beta.dtype), ", expected gamma's ",
        name_of(a.gamma.dtype));
  check_zero_centered(a.zero_centered_gamma, a.gamma);
  LayerNormForwardParams params;
  params.columns = a.x.sizes[a.x.dim - 1];
  params.rows = a.x.numel() / params.columns;
  params.x_dtype = a.x.dtype;
  params.parameter_dtype = a.gamma ? a.gamma.dtype : (a.beta ? a.beta.dtype : a.x.dtype);
  params.eps = a.eps;
  params.zero_centered_gamma = a.zero_centered_gamma;
  return params;
}

LayerNormBackwardParams check_layer_norm(const LayerNormArguments& a) {
  const TensorDesc& x = a.x;
  check_x(x);
  const int64_t columns = x.sizes[x.dim - 1];
  const int64_t rows = x.numel() / columns;

  check_like_x("dz", a.dz, x);
  check(is_floating(a.dz.dtype) && (a.dz.dtype == DType::kFloat64) == (x.dtype == DType::kFloat64), "dz is ",
        name_of(a.dz.dtype), ", expected ",
        x.dtype == DType::kFloat64 ? "float64 as x" : "float16, bfloat16 or float32");
  check_statistics("rs", a.rs, x, rows);
  if (!a.rms) {
    check_statistics("mu", a.mu, x, rows);
    check(a.mu.dtype == a.rs.dtype, "mu is ", name_of(a.mu.dtype), ", expected rs's ", name_of(a.rs.dtype));
  }
  check_parameter("gamma", a.gamma, x);
  check_zero_centered(a.zero_centered_gamma, a.gamma);
  if (a.dresidual) {
    check_like_x("dresidual", a.dresidual, x);
    check(a.dresidual.dtype == x.dtype, "dresidual is ", name_of(a.dresidual.dtype), ", expected x's ",
          name_of(x.dtype));
  }

  LayerNormBackwardParams params;
  params.rows = rows;
  params.columns = columns;
  params.x_dtype = x.dtype;
  params.dz_dtype = a.dz.dtype;
  params.gamma_dtype = a.gamma ? a.gamma.dtype : x.dtype;
  params.zero_centered_gamma = a.zero_centered_gamma;
  return params;
}

std::optional<int64_t> row_stride_of(const TensorDesc& tensor) {
  const int last = tensor.dim - 1;
  if (tensor.sizes[last] > 1 && tensor.strides[last] != 1) return std::nullopt;
  std::optional<int64_t> stride;
  int64_t rows = 1;  // of the dimensions already merged, innermost first
  for (int i = last - 1; i >= 0; --i) {
    if (tensor.sizes[i] == 0) return 0;
    if (tensor.sizes[i] == 1) continue;
    if (stride.has_value() && tensor.strides[i] != *stride * rows) return std::nullopt;
    if (!stride.has_value()) stride = tensor.strides[i];
    rows *= tensor.sizes[i];
  }
  return stride.value_or(tensor.sizes[last]);
}

std::string layer_norm_refusal(DType x_dtype, int64_t columns, Device place, const DeviceInfo& device) {
  if (place.type != DeviceType::kCUDA) return "the tensors are not on a CUDA device";
  if (!device.usable) return device.why_not;
  if (device.cc_major < 8) return "the device is older than compute capability 8.0";
  if (x_dtype == DType::kFloat64) return "float64";
  constexpr int64_t kMostColumns = int64_t{1} << 28;  // column numbers are 32-bit in the kernels
  if (columns > kMostColumns) return "rows of more than 2^28 elements";
  return "";
}

}  // namespace flashbwd

// What LayerNorm and RMSNorm kernels are given.
#pragma once

#include <cstdint>

#include "../common/types.h"

namespace flashbwd {

// What was dropped of a tensor of x's shape before it was added to another: a mask, or what to draw it from.
struct DropoutParams {
  double p = 0.0;
  const uint8_t* keep = nullptr;  // bool; null: drawn, unless p is 0
  int64_t keep_row_stride = 0;
  const int64_t* rng = nullptr;  // seed and offset, on the device
};

// A backward.
struct LayerNormBackwardParams {
  int64_t rows = 0;
  int64_t columns = 0;               // N
  DType x_dtype = DType::kBFloat16;  // of x and dx
  DType dz_dtype = DType::kBFloat16;
  DType gamma_dtype = DType::kFloat32;  // of gamma, dgamma, dbeta
  const void* dz = nullptr;
  int64_t dz_row_stride = 0;  // elements
  const void* x = nullptr;
  int64_t x_row_stride = 0;
  bool from_output = false;   // x is the norm's output
  bool centred = false;       // LayerNorm
  const float* mu = nullptr;  // null: RMSNorm, or from the output
  const float* rs = nullptr;
  const void* gamma = nullptr;      // null: none (all ones)
  const void* beta = nullptr;       // needed from the output alone; null: none
  const void* dresidual = nullptr;  // x's dtype, added into dx; null: none
  int64_t dresidual_row_stride = 0;
  void* dx = nullptr;  // null where not asked for, as are the next two
  int64_t dx_row_stride = 0;
  bool of_sum = false;  // x = residual + dropout(branch)
  // The branch's gradient, of dz's dtype; null where not asked for.
  void* dbranch = nullptr;
  int64_t dbranch_row_stride = 0;
  DropoutParams dropout;
  void* dgamma = nullptr;
  void* dbeta = nullptr;
  bool zero_centered_gamma = false;
  void* workspace = nullptr;  // fp32 partial sums
  int64_t workspace_bytes = 0;
};

// A forward.
struct LayerNormForwardParams {
  int64_t rows = 0;
  int64_t columns = 0;
  DType x_dtype = DType::kBFloat16;         // of x and z
  DType h_dtype = DType::kBFloat16;         // of the residual and h
  DType parameter_dtype = DType::kFloat32;  // of gamma and beta
  const void* x = nullptr;
  int64_t x_row_stride = 0;  // elements
  // h = residual + dropout(x) is what is normalised, and written; null: x is.
  const void* residual = nullptr;
  int64_t residual_row_stride = 0;
  void* h = nullptr;
  int64_t h_row_stride = 0;
  DropoutParams dropout;
  void* z = nullptr;
  int64_t z_row_stride = 0;
  const void* gamma = nullptr;  // null: none
  const void* beta = nullptr;
  float* mu = nullptr;  // (rows,), written; null: RMSNorm
  float* rs = nullptr;
  double eps = 0.0;
  bool zero_centered_gamma = false;
};

}  // namespace flashbwd

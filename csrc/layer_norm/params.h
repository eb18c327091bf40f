// What LayerNorm and RMSNorm kernels are given.
#pragma once

#include <cstdint>

#include "../common/types.h"

namespace flashbwd {

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
  const float* mu = nullptr;  // null: RMSNorm
  const float* rs = nullptr;
  const void* gamma = nullptr;      // null: none (all ones)
  const void* dresidual = nullptr;  // x's dtype, added into dx; null: none
  int64_t dresidual_row_stride = 0;
  void* dx = nullptr;  // null where not asked for, as are the next two
  int64_t dx_row_stride = 0;
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
  DType parameter_dtype = DType::kFloat32;  // of gamma and beta
  const void* x = nullptr;
  int64_t x_row_stride = 0;  // elements
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

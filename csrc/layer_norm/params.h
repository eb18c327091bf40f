// Parameters of the LayerNorm and RMSNorm launchers, as plain structs.
#pragma once

#include <cstdint>

#include "../common/types.h"

namespace flashbwd {

// Dropout of the branch before the residual is added: a mask, or the Philox state that regenerates it.
struct DropoutParams {
  double p = 0.0;
  const uint8_t* keep = nullptr;  // (rows, columns) bool; null: drawn from rng, unless p is 0
  int64_t keep_row_stride = 0;
  const int64_t* rng = nullptr;  // (2,): seed and offset, in device memory
};

struct LayerNormBackwardParams {
  int64_t rows = 0;
  int64_t columns = 0;               // N
  DType x_dtype = DType::kBFloat16;  // of x, dresidual and dx
  DType dz_dtype = DType::kBFloat16;
  DType gamma_dtype = DType::kFloat32;  // of gamma, beta, dgamma and dbeta
  const void* dz = nullptr;             // (rows, columns), as are x, dresidual, dx and dbranch
  int64_t dz_row_stride = 0;            // elements
  const void* x = nullptr;
  int64_t x_row_stride = 0;
  bool from_output = false;         // x is the norm's output z
  bool centred = false;             // LayerNorm; else RMSNorm
  const float* mu = nullptr;        // (rows,); null: RMSNorm, or from_output
  const float* rs = nullptr;        // (rows,)
  const void* gamma = nullptr;      // (columns,); null: all ones
  const void* beta = nullptr;       // (columns,), used only if from_output; null: zeros
  const void* dresidual = nullptr;  // added to dx; null: none
  int64_t dresidual_row_stride = 0;
  void* dx = nullptr;  // null: not needed; the same holds for dbranch, dgamma and dbeta
  int64_t dx_row_stride = 0;
  bool of_sum = false;      // x = residual + dropout(branch)
  void* dbranch = nullptr;  // gradient of the branch, dz's dtype
  int64_t dbranch_row_stride = 0;
  DropoutParams dropout;
  void* dgamma = nullptr;
  void* dbeta = nullptr;
  bool zero_centered_gamma = false;
  void* workspace = nullptr;  // layer_norm_backward_workspace() bytes
  int64_t workspace_bytes = 0;
};

struct LayerNormForwardParams {
  int64_t rows = 0;
  int64_t columns = 0;
  DType x_dtype = DType::kBFloat16;         // of x and z
  DType h_dtype = DType::kBFloat16;         // of the residual and h
  DType parameter_dtype = DType::kFloat32;  // of gamma and beta
  const void* x = nullptr;
  int64_t x_row_stride = 0;  // elements
  // If residual is not null, h = residual + dropout(x) is normalised and written; else x is normalised.
  const void* residual = nullptr;
  int64_t residual_row_stride = 0;
  void* h = nullptr;
  int64_t h_row_stride = 0;
  DropoutParams dropout;
  void* z = nullptr;
  int64_t z_row_stride = 0;
  const void* gamma = nullptr;  // (columns,); null: all ones
  const void* beta = nullptr;   // (columns,); null: zeros
  float* mu = nullptr;          // (rows,), output; null: RMSNorm
  float* rs = nullptr;          // (rows,), output
  double eps = 0.0;
  bool zero_centered_gamma = false;
};

}  // namespace flashbwd

// What the kernels are given.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "config.h"

namespace flashbwd::layer_norm {

struct BackwardArguments {
  BackwardTile tile;
  RowSchedule schedule;
  int64_t rows = 0;
  int columns = 0;
  float inverse_columns = 0.f;
  const void* x = nullptr;
  const void* dz = nullptr;
  const void* residual = nullptr;
  const float* mu = nullptr;  // (rows,); null: RMSNorm
  const float* rs = nullptr;
  const void* gamma = nullptr;
  void* dx = nullptr;
  int64_t x_stride = 0, dz_stride = 0, residual_stride = 0, dx_stride = 0;  // elements from row to row
  int64_t row_step = 0;                                                     // from a thread's row to its next
  int64_t x_step = 0, dz_step = 0;                                          // the same in elements
  bool vector_x = false, vector_dz = false, vector_residual = false, vector_dx = false;
  bool all_vectors = false;  // x, dz and the residual
  int pace = 0;              // least time between rows of a thread, in 1/16 ns; 0: none
  bool zero_centered = false;
  DType gamma_dtype = DType::kFloat32;
  const float2* row_sums = nullptr;  // (rows,) of the means below; null: computed here
  float* partial = nullptr;          // (workers, 2, columns): dgamma, dbeta; null: not asked for
};

}  // namespace flashbwd::layer_norm

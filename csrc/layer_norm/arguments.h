// What the kernels are given.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "config.h"
#include "keep.h"
#include "params.h"

namespace flashbwd::layer_norm {

// A dropout mask: given, or drawn again.
struct Dropout {
  bool drops = false;             // otherwise all is kept
  const uint8_t* keep = nullptr;  // (rows, columns); null: drawn
  int64_t keep_stride = 0;        // from row to row
  bool vector_keep = false;
  const int64_t* rng = nullptr;  // seed and offset
  uint32_t keep_from = 0;        // a drawn word from which on its element is kept
  float scale = 1.f;             // of what is kept
};

inline Dropout dropout_of(const DropoutParams& p) {
  Dropout d;
  d.drops = p.keep != nullptr || p.p > 0.0;
  d.keep = p.keep;
  d.keep_stride = p.keep_row_stride;
  d.rng = p.rng;
  d.keep_from = keep_from(p.p);
  d.scale = static_cast<float>(1.0 / (1.0 - p.p));
  return d;
}

// What a backward is given and gives.
enum class Form {
  kPlain,    // x; dx
  kDropout,  // x = residual + dropout(branch): dx, and the gradient of the branch
  kOutput,   // the norm's output in the place of x; dx
};

struct BackwardArguments {
  BackwardTile tile;
  RowSchedule schedule;
  int64_t rows = 0;
  int columns = 0;
  float inverse_columns = 0.f;
  const void* x = nullptr;
  const void* dz = nullptr;
  const void* residual = nullptr;
  bool centred = false;       // LayerNorm
  const float* mu = nullptr;  // (rows,); null: not needed
  const float* rs = nullptr;
  const void* gamma = nullptr;
  const void* beta = nullptr;  // of Form::kOutput
  void* dx = nullptr;
  int64_t x_stride = 0, dz_stride = 0, residual_stride = 0, dx_stride = 0;  // elements from row to row
  bool vector_x = false, vector_dz = false, vector_residual = false, vector_dx = false;
  bool all_vectors = false;  // x and dz
  bool zero_centered = false;
  DType gamma_dtype = DType::kFloat32;
  Dropout dropout;
  void* branch = nullptr;  // of dz's dtype: the gradient of what was dropped; null: not asked for
  int64_t branch_stride = 0;
  bool vector_branch = false;
  const float2* row_sums = nullptr;  // (rows,) of the means below; null: computed here
  // (workers, 2, partial_columns): dgamma, dbeta, shifted by the rows' phase; null: not asked for
  float* partial = nullptr;
  int64_t partial_columns = 0;
  int* progress = nullptr;  // rounds that all workers have begun, from zero; null: workers do not wait for each other
  void* dgamma = nullptr;   // of gamma_dtype, of CTAs that sum columns
  void* dbeta = nullptr;
};

}  // namespace flashbwd::layer_norm

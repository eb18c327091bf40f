// Arguments of the backward kernels.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "config.h"
#include "keep.h"
#include "params.h"

namespace flashbwd::layer_norm {

// A dropout mask: given, or regenerated from seed and offset.
struct Dropout {
  bool drops = false;             // false: all elements are kept
  const uint8_t* keep = nullptr;  // (rows, columns); null: regenerated
  int64_t keep_stride = 0;        // row stride
  bool vector_keep = false;       // the mask's rows are aligned like x's, which allows vector loads
  const int64_t* rng = nullptr;   // (2,): seed and offset
  uint32_t keep_from = 0;         // an element is kept if its Philox word is at least this
  float scale = 1.f;              // factor of the kept elements: 1 / (1 - p)
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

// Compile-time variants of the backward kernel.
enum class Form {
  kPlain,    // from x; writes dx
  kDropout,  // from x = residual + dropout(branch); writes dx (the residual's gradient) and the branch's gradient
  kOutput,   // from the norm's output z instead of x; writes dx
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
  bool centred = false;       // LayerNorm; else RMSNorm
  const float* mu = nullptr;  // (rows,); null: not needed
  const float* rs = nullptr;  // (rows,)
  const void* gamma = nullptr;
  const void* beta = nullptr;  // Form::kOutput only
  void* dx = nullptr;
  int64_t x_stride = 0, dz_stride = 0, residual_stride = 0, dx_stride = 0;  // row strides, in elements
  // True if a tensor's rows have the same phase (see phase.h) as x's, which allows 16-byte accesses.
  bool vector_x = false, vector_dz = false, vector_residual = false, vector_dx = false;
  bool all_vectors = false;  // vector_x && vector_dz
  bool zero_centered = false;
  DType gamma_dtype = DType::kFloat32;
  Dropout dropout;
  void* branch = nullptr;  // gradient of the branch, dz's dtype; null: not needed
  int64_t branch_stride = 0;
  bool vector_branch = false;
  const float2* row_sums = nullptr;  // (rows,): sums of dy and of dy * xhat; null: this kernel computes them
  // (workers, 2, partial_columns): partial dgamma, dbeta, shifted by the phase of the worker's rows; null: not needed
  float* partial = nullptr;
  int64_t partial_columns = 0;
  int* progress = nullptr;  // Throttle: sum over all workers of the rounds begun, initially 0; null: no Throttle
  void* dgamma = nullptr;   // (columns,), gamma_dtype, written only by threads that sum columns
  void* dbeta = nullptr;    // the same
};

}  // namespace flashbwd::layer_norm

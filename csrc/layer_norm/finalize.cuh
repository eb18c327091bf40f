// Reduces the workers' partial sums to dgamma and dbeta, in a fixed order, so the results are deterministic.
#pragma once

#include "device.cuh"

namespace flashbwd::layer_norm {

constexpr int kFinalizeColumns = 32;  // per CTA: one 128-byte line per worker
constexpr int kFinalizeRows = 16;     // threads per column
constexpr int kFinalizeLoads = 9;     // outstanding loads per thread: 16 * 9 covers the 132 workers of an H100 at once

struct FinalizeArguments {
  const float* partial = nullptr;  // (workers, 2, partial_columns)
  int workers = 0;
  int64_t partial_columns = 0;
  int columns = 0;
  int period = 1;  // worker w's sums are shifted by (phase_base + w % period * phase_step) % elements columns
  int phase_base = 0;
  int phase_step = 0;
  int elements = 1;
  void* dgamma = nullptr;  // (columns,) of `dtype`; null: not needed; the same holds for dbeta
  void* dbeta = nullptr;
  DType dtype = DType::kFloat32;
};

// Grid: (columns / 32, 2). Each thread sums every 16th worker, then one warp sums the results. Even at N = 1024, this
// gives enough CTAs and outstanding loads to fill a GPU.
__global__ void __launch_bounds__(kFinalizeColumns* kFinalizeRows)
    finalize_kernel(const __grid_constant__ FinalizeArguments a) {
  __shared__ double sums[kFinalizeRows][kFinalizeColumns];
  const int column = blockIdx.x * kFinalizeColumns + threadIdx.x;
  const int which = blockIdx.y;  // 0: dgamma, 1: dbeta
  void* target = which == 0 ? a.dgamma : a.dbeta;
  if (target == nullptr) return;
  const float* source = a.partial + which * a.partial_columns + column;
  double sum = 0.;  // its rounding error is negligible next to that of the partial sums
  wait_for_previous_launch();
  if (column < a.columns) {
#pragma unroll 1
    for (int first = threadIdx.y; first < a.workers; first += kFinalizeRows * kFinalizeLoads) {
      float loaded[kFinalizeLoads] = {};
#pragma unroll
      for (int i = 0; i < kFinalizeLoads; ++i) {  // `period` and `elements` are powers of two, hence the masks
        const int w = first + i * kFinalizeRows;
        const int phase = (a.phase_base + (w & (a.period - 1)) * a.phase_step) & (a.elements - 1);
        if (w < a.workers) loaded[i] = __ldcg(source + w * 2 * a.partial_columns + phase);
      }
#pragma unroll
      for (int i = 0; i < kFinalizeLoads; ++i) sum += loaded[i];
    }
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();  // all threads have written their sum; the first row of threads reads them
  if (threadIdx.y > 0 || column >= a.columns) return;
  double totals[kFinalizeRows];
#pragma unroll
  for (int r = 0; r < kFinalizeRows; ++r) totals[r] = sums[r][threadIdx.x];
#pragma unroll
  for (int half = kFinalizeRows / 2; half > 0; half /= 2) {
#pragma unroll
    for (int r = 0; r < half; ++r) totals[r] += totals[r + half];
  }
  store_float(target, a.dtype, column, static_cast<float>(totals[0]));
}

}  // namespace flashbwd::layer_norm

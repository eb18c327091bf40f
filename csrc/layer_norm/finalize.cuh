// dgamma and dbeta from the workers' partial sums, in the order of the workers.
#pragma once

#include "device.cuh"

namespace flashbwd::layer_norm {

constexpr int kFinalizeColumns = 32;  // a CTA: one 128-byte line a worker
constexpr int kFinalizeRows = 16;     // threads that share a column

struct FinalizeArguments {
  const float* partial = nullptr;  // (workers, 2, columns)
  int workers = 0;
  int columns = 0;
  void* dgamma = nullptr;  // (columns,) of `dtype`; null: not asked for
  void* dbeta = nullptr;
  DType dtype = DType::kFloat32;
};

// Sums in double, so that a million rows cost no more precision than their partial sums have.
//
// Grid: (columns / 32, 2). Each thread sums every 16th worker, then one of 16 sums those: enough CTAs and loads in
// flight for a chip at N = 1024 already.
__global__ void __launch_bounds__(kFinalizeColumns* kFinalizeRows)
    finalize_kernel(const __grid_constant__ FinalizeArguments a) {
  __shared__ double sums[kFinalizeRows][kFinalizeColumns];
  const int column = blockIdx.x * kFinalizeColumns + threadIdx.x;
  const int which = blockIdx.y;  // dgamma, dbeta
  void* target = which == 0 ? a.dgamma : a.dbeta;
  wait_for_prerequisites();
  if (target == nullptr) return;
  double sum = 0.;
  if (column < a.columns) {
    const float* source = a.partial + static_cast<int64_t>(which) * a.columns + column;
#pragma unroll 8
    for (int w = threadIdx.y; w < a.workers; w += kFinalizeRows) {
      sum += __ldcg(source + static_cast<int64_t>(w) * 2 * a.columns);
    }
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();  // all sums are there; the first row of threads reads them
  if (threadIdx.y > 0 || column >= a.columns) return;
#pragma unroll
  for (int r = 1; r < kFinalizeRows; ++r) sum += sums[r][threadIdx.x];
  store_float(target, a.dtype, column, static_cast<float>(sum));
}

}  // namespace flashbwd::layer_norm

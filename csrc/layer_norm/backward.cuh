// LayerNorm and RMSNorm backward: one pass over x and dz writes dx and fp32 partial sums of dgamma and dbeta.
//
// The CTAs are persistent and process `groups` rows at a time (backward_rows.cuh). If there are few rows, other threads
// or CTAs of the same grid sum dgamma and dbeta by columns (column_sums.cuh).
#pragma once

#include "backward_rows.cuh"
#include "column_sums.cuh"

namespace flashbwd::layer_norm {

template <Form kForm, typename TX, typename TDZ>
__global__ void __launch_bounds__(kMaxThreads, 1) backward_kernel(const __grid_constant__ BackwardArguments a) {
  extern __shared__ __align__(128) char smem[];
  const int row_ctas = a.schedule.workers * a.tile.ctas_per_row;
  // Threads after the tile's threads, or CTAs after the row CTAs, compute dgamma and dbeta by columns.
  if constexpr (kForm == Form::kPlain) {
    if (a.tile.sums_columns && threadIdx.x >= a.tile.threads()) {
      sum_columns<TX, TDZ>(a, reinterpret_cast<float*>(smem + a.tile.columns_offset), a.tile.threads(), 0);
      return;
    }
    if (!a.tile.sums_columns && blockIdx.x >= row_ctas) {
      sum_columns<TX, TDZ>(a, reinterpret_cast<float*>(smem), 0, row_ctas);
      return;
    }
  }
  if (blockIdx.x < row_ctas) BackwardRows<kForm, TX, TDZ>(a, smem).run(smem);
}

}  // namespace flashbwd::layer_norm

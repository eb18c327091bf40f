// Computes the two row sums that dx needs, for rows that are too wide for a CTA or cluster. x and dz are then read
// twice: here and by the backward kernel.
#pragma once

#include "backward.cuh"

namespace flashbwd::layer_norm {

// Grid-stride loop over the rows. Writes row_sums (rows,): the sums of dy and of dy * xhat.
template <Form kForm, typename TX, typename TDZ>
__global__ void __launch_bounds__(kRowSumsThreads)
    row_sums_kernel(const __grid_constant__ BackwardArguments a, float2* row_sums) {
  __shared__ float2 warp_sums[kRowSumsThreads / kWarp];
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const TX* x = static_cast<const TX*>(a.x) + row * a.x_stride;
    const TDZ* dz = static_cast<const TDZ*>(a.dz) + row * a.dz_stride;
    const float rs = a.rs[row];
    const float mu = a.mu == nullptr ? 0.f : a.mu[row];
    float2 sums = make_float2(0.f, 0.f);
#pragma unroll 4
    for (int column = threadIdx.x; column < a.columns; column += kRowSumsThreads) {
      const float gamma = a.gamma == nullptr ? 1.f : load_float(a.gamma, a.gamma_dtype, column) + a.zero_centered;
      const float dy = gamma * to_float(dz[column]);
      float xhat = to_float(x[column]);
      if constexpr (kForm == Form::kOutput) {
        if (a.beta != nullptr) xhat -= load_float(a.beta, a.gamma_dtype, column);
        xhat *= inverse_of_divisor(gamma);
      } else {
        xhat = (xhat - mu) * rs;
      }
      sums.x += dy;
      sums.y += dy * xhat;
    }
    sums = warp_sum(sums, kWarp);
    if (threadIdx.x % kWarp == 0) warp_sums[threadIdx.x / kWarp] = sums;
    __syncthreads();  // all warps have written their sums; warp 0 reads them
    if (threadIdx.x < kWarp) {
      sums = threadIdx.x < kRowSumsThreads / kWarp ? warp_sums[threadIdx.x] : make_float2(0.f, 0.f);
      sums = warp_sum(sums, kWarp);
      if (threadIdx.x == 0) row_sums[row] = sums;
    }
    __syncthreads();  // warp 0 has read the sums; in the next iteration, all warps overwrite them
  }
}

}  // namespace flashbwd::layer_norm

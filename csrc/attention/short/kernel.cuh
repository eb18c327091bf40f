// The kernel for short sequences, see mainloop.cuh.
#pragma once

#include "mainloop.cuh"

namespace flashbwd::short_sequences {

// Zeroes the rows of a packed gradient that belong to no sequence. Called by all threads of the grid.
template <int kThreads>
__device__ void zero_unused_rows(const GradientTarget& target, int32_t heads, int64_t first, int64_t last) {
  const HeadsView& view = target.view;
  const int64_t elements = (last - first) * heads * target.columns;
  const int64_t cta = int64_t{blockIdx.y} * gridDim.x + blockIdx.x, ctas = int64_t{gridDim.x} * gridDim.y;
  for (int64_t i = cta * kThreads + threadIdx.x; i < elements; i += ctas * kThreads) {
    const int64_t row_head = i / target.columns, row = first + row_head / heads;
    const int64_t index = row * view.seq_stride + row_head % heads * view.head_stride + i % target.columns;
    if (target.dtype == DType::kFloat32) {
      static_cast<uint32_t*>(view.data)[index] = 0;
    } else {
      static_cast<uint16_t*>(view.data)[index] = 0;
    }
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kCtasPerSm)
    backward_kernel(const __grid_constant__ KernelParams params) {
  extern __shared__ __align__(128) uint8_t shared[];
  const AttentionBackwardParams& p = params.attention;
  Mainloop<Traits>::run(params, *reinterpret_cast<typename Traits::SharedStorage*>(shared));
  if (p.cu_seqlens_q != nullptr) {
    zero_unused_rows<Traits::kThreads>(params.dq, p.heads, p.cu_seqlens_q[p.batch], p.total_q);
  }
  if (p.cu_seqlens_k != nullptr) {
    zero_unused_rows<Traits::kThreads>(params.keys[0], p.heads_kv, p.cu_seqlens_k[p.batch], p.total_k);
    zero_unused_rows<Traits::kThreads>(params.keys[1], p.heads_kv, p.cu_seqlens_k[p.batch], p.total_k);
  }
}

}  // namespace flashbwd::short_sequences

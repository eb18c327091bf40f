// Sums the slots of the splits to dq, always in the same order, so dq is deterministic.
#pragma once

#include "backward_params.h"
#include "elements.cuh"

namespace flashbwd {

constexpr int kSumThreads = 128;

// Each thread sums one pair of columns of one row.
template <class T>
__global__ void __launch_bounds__(kSumThreads) sum_slots_kernel(const __grid_constant__ DecodingBackwardParams p) {
  const int pairs = (p.head_dim + 1) / 2;
  const long long rows = static_cast<long long>(p.batch) * p.heads * p.seqlen_q;
  const long long i = static_cast<long long>(blockIdx.x) * kSumThreads + threadIdx.x;
  if (i >= rows * pairs) return;
  const float2* slots = reinterpret_cast<const float2*>(p.dq_slots) + i;
  float2 total = make_float2(0.f, 0.f);
#pragma unroll 8
  for (int slot = 0; slot < p.splits; ++slot) {
    const float2 value = slots[slot * rows * pairs];
    total.x += value.x;
    total.y += value.y;
  }
  const long long row = i / pairs;
  const long long head_row = row / p.seqlen_q;
  typename T::Storage* const dq = static_cast<typename T::Storage*>(p.dq) + head_row / p.heads * p.dq_strides[0] +
                                  head_row % p.heads * p.dq_strides[1] + row % p.seqlen_q * p.dq_strides[2];
  store_pair<T>(dq, static_cast<int>(i % pairs), p.head_dim, total.x, total.y);
}

}  // namespace flashbwd

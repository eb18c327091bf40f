// The combine kernel, which reduces the slots of the partial results. Each CTA reduces one row; its warps take the
// slots round-robin.
#pragma once

#include "merge.cuh"

namespace flashbwd {

constexpr int kCombineWarps = 8;
constexpr int kCombinePairs = 4;                                       // per lane, enough for head dimension 256
constexpr int kCombineBytes = kCombineWarps * kCombinePairs * 32 * 8;  // dynamic shared memory

template <class T>
__global__ void __launch_bounds__(kCombineWarps * 32) combine_kernel(const __grid_constant__ DecodingParams p) {
  extern __shared__ float2 merging[];  // (kCombineWarps, pairs)
  const long long row = blockIdx.x;
  const long long all_rows = gridDim.x;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int pairs = (p.head_dim_v + 1) / 2;
  const int slots = p.splits / p.cluster;
  const float2* stats = reinterpret_cast<const float2*>(p.partial_stats) + row;

  wait_for_previous_launch();
  // There are few slots, so every warp reduces the statistics of all of them.
  const auto [largest, base, sum] = reduce_slot_stats(stats, slots, all_rows);

  float2 total[kCombinePairs];
#pragma unroll
  for (int i = 0; i < kCombinePairs; ++i) total[i] = make_float2(0.f, 0.f);
#pragma unroll 8
  for (int slot = warp; slot < slots; slot += kCombineWarps) {
    const float weight = exp2_approx(stats[slot * all_rows].x - base);
    const float2* values = reinterpret_cast<const float2*>(p.partial_out) + (slot * all_rows + row) * pairs;
#pragma unroll
    for (int i = 0; i < kCombinePairs; ++i) {
      if (i * 32 + lane < pairs) {
        const float2 value = values[i * 32 + lane];
        total[i].x += weight * value.x;
        total[i].y += weight * value.y;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kCombinePairs; ++i) {
    if (i * 32 + lane < pairs) merging[warp * pairs + i * 32 + lane] = total[i];
  }
  __syncthreads();  // all warps have written their sums; all threads read them
  const float norm = sum > 0.f ? 1.f / sum : 0.f;
  const long long head_row = row / p.seqlen_q;
  const long long offset = head_row / p.heads * p.out_strides[0] + head_row % p.heads * p.out_strides[1] +
                           row % p.seqlen_q * p.out_strides[2];
  typename T::Storage* const out = static_cast<typename T::Storage*>(p.out) + offset;
  for (int pair = threadIdx.x; pair < pairs; pair += kCombineWarps * 32) {
    float2 value = make_float2(0.f, 0.f);
#pragma unroll
    for (int w = 0; w < kCombineWarps; ++w) {
      value.x += merging[w * pairs + pair].x;
      value.y += merging[w * pairs + pair].y;
    }
    store_out<T>(p, out, row, pair, value.x * norm, value.y * norm);
  }
  if (threadIdx.x == 0) store_stats(p, row, largest, sum);
}

}  // namespace flashbwd

// Adding up the slots of the partial results without a kernel of its own: the thread block of a row tile that is the
// last to write its slot adds up those of all.
#pragma once

#include "meeting.cuh"

#ifdef __CUDACC__

namespace flashbwd {

// Whether all other blocks of this row tile have written their slots. Every thread asks, having written its part.
__device__ inline bool arrives_last(const DecodingParams& p, unsigned char* shared) {
  int* const last = reinterpret_cast<int*>(shared);
  __threadfence();  // what this block wrote comes before its arrival
  __syncthreads();  // ... of all threads, and nobody reads the meeting any more
  if (threadIdx.x == 0) {
    *last = atomicAdd(p.arrivals + blockIdx.x, 1) == static_cast<int>(gridDim.y) - 1;
    if (*last) p.arrivals[blockIdx.x] = 0;  // for the next call
  }
  __syncthreads();
  const bool answer = *last;
  __threadfence();  // what others wrote comes after their arrival
  __syncthreads();  // the answer has been read
  return answer;
}

// Rows [first_row, first_row + count) of a key head. `shared` becomes (count, slots) floats.
template <class T, int kWarps>
__device__ void add_up_slots(const DecodingParams& p, unsigned char* shared, int b, int head_kv, int first_row,
                             int count) {
  float* const weights = reinterpret_cast<float*>(shared);
  const int lane = threadIdx.x % 32;
  const int slots = p.splits / p.cluster;
  const int pairs = (p.head_dim_v + 1) / 2;
  const int rows = p.group * p.seqlen_q;
  const long long all_rows = static_cast<long long>(p.batch) * p.heads * p.seqlen_q;
  const long long row0 = (static_cast<long long>(b) * p.heads_kv + head_kv) * rows + first_row;

  for (int i = threadIdx.x / 32; i < count; i += kWarps) {
    const float2* stats = reinterpret_cast<const float2*>(p.partial_stats) + row0 + i;
    const auto [largest, base, sum] = meet_slots(stats, slots, all_rows);
    const float norm = sum > 0.f ? 1.f / sum : 0.f;
    for (int slot = lane; slot < slots; slot += 32)
      weights[i * slots + slot] = exp2_approx(stats[slot * all_rows].x - base) * norm;
    if (lane == 0) {
      if (p.lse != nullptr) p.lse[row0 + i] = sum > 0.f ? largest * kLn2 + logf(sum) : -FLASHBWD_INFINITY;
      if (p.max_scores != nullptr) p.max_scores[row0 + i] = largest * kLn2;
    }
  }
  __syncthreads();
  for (int at = threadIdx.x; at < count * pairs; at += kWarps * 32) {
    const int i = at / pairs, pair = at % pairs;
    const float2* part = reinterpret_cast<const float2*>(p.partial_out) + (row0 + i) * pairs + pair;
    float2 total = make_float2(0.f, 0.f);
#pragma unroll 16
    for (int slot = 0; slot < slots; ++slot) {
      const float weight = weights[i * slots + slot];
      const float2 value = part[slot * all_rows * pairs];
      total.x += weight * value.x;
      total.y += weight * value.y;
    }
    const int head = head_kv * p.group + (first_row + i) / p.seqlen_q, query = (first_row + i) % p.seqlen_q;
    typename T::Storage* const out = static_cast<typename T::Storage*>(p.out) + b * p.out_strides[0] +
                                     head * p.out_strides[1] + query * p.out_strides[2];
    store_pair<T>(out, pair, p.head_dim_v, total.x, total.y);
    store_exact(p, row0 + i, pair, total.x, total.y);
  }
}

}  // namespace flashbwd

#endif

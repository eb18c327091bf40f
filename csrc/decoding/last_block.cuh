// Last-arriver finalization of the partial results, which replaces the combine kernel: the last CTA of a row tile to
// write its slot reduces all slots of that tile.
#pragma once

#include "merge.cuh"

#ifdef __CUDACC__

namespace flashbwd {

// Returns true in the last CTA of a row tile to arrive. All threads call this after they have written to the slot.
__device__ inline bool arrives_last(const DecodingParams& p, unsigned char* shared) {
  int* const last = reinterpret_cast<int*>(shared);
  __threadfence();  // release: this thread's stores to the slot are visible before the arrival below
  __syncthreads();  // all threads have passed the fence and finished reading `shared`
  if (threadIdx.x == 0) {
    *last = atomicAdd(p.arrivals + blockIdx.x, 1) == static_cast<int>(gridDim.y) - 1;
    if (*last) p.arrivals[blockIdx.x] = 0;  // reset for the next call
  }
  __syncthreads();  // thread 0 has written *last; all threads read it
  const bool is_last = *last;
  __threadfence();  // acquire: the slots of the other CTAs are read after their arrivals
  __syncthreads();  // all threads have read *last; its memory is reused
  return is_last;
}

// Reduces the slots of rows [first_row, first_row + count) of a KV head and writes the output. `shared` is used for the
// weights of the slots, (count, slots) floats.
template <class T, int kWarps>
__device__ void reduce_slots(const DecodingParams& p, unsigned char* shared, int b, int head_kv, int first_row,
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
    const auto [largest, base, sum] = reduce_slot_stats(stats, slots, all_rows);
    const float norm = sum > 0.f ? 1.f / sum : 0.f;
    for (int slot = lane; slot < slots; slot += 32)
      weights[i * slots + slot] = exp2_approx(stats[slot * all_rows].x - base) * norm;
    if (lane == 0) store_stats(p, row0 + i, largest, sum);
  }
  __syncthreads();  // all warps have written the weights; all threads read them
  for (int at = threadIdx.x; at < count * pairs; at += kWarps * 32) {
    const int i = at / pairs, pair = at % pairs;
    const float2* values = reinterpret_cast<const float2*>(p.partial_out) + (row0 + i) * pairs + pair;
    float2 total = make_float2(0.f, 0.f);
#pragma unroll 16
    for (int slot = 0; slot < slots; ++slot) {
      const float weight = weights[i * slots + slot];
      const float2 value = values[slot * all_rows * pairs];
      total.x += weight * value.x;
      total.y += weight * value.y;
    }
    const int head = head_kv * p.group + (first_row + i) / p.seqlen_q, query = (first_row + i) % p.seqlen_q;
    typename T::Storage* const out = static_cast<typename T::Storage*>(p.out) + b * p.out_strides[0] +
                                     head * p.out_strides[1] + query * p.out_strides[2];
    store_out<T>(p, out, row0 + i, pair, total.x, total.y);
  }
}

}  // namespace flashbwd

#endif

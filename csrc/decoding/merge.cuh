// Epilogue of a CTA: merges the online softmax of its warps, then that of the CTAs of its cluster, and writes the
// result, either as the final output or as one slot of the partial results.
#pragma once

#include "elements.cuh"

#ifdef __CUDACC__

namespace flashbwd {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
#define FLASHBWD_INFINITY __int_as_float(0x7f800000)

// Softmax statistics of one row over all slots of its partial results. One warp computes them.
struct RowStats {
  float largest, base, sum;  // base: `largest`, or 0 for a row without keys, where largest is -inf
};

__device__ inline RowStats reduce_slot_stats(const float2* stats, int slots, long long all_rows) {
  const int lane = threadIdx.x % 32;
  float largest = -FLASHBWD_INFINITY;
  for (int slot = lane; slot < slots; slot += 32) largest = fmaxf(largest, stats[slot * all_rows].x);
#pragma unroll
  for (int step = 1; step < 32; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
  const float base = largest == -FLASHBWD_INFINITY ? 0.f : largest;
  float sum = 0.f;
  for (int slot = lane; slot < slots; slot += 32) {
    const float2 stat = stats[slot * all_rows];
    sum += exp2_approx(stat.x - base) * stat.y;
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  return {largest, base, sum};
}

__device__ inline void store_exact(const DecodingParams& p, long long row, int pair, float low, float high) {
  if (p.exact_out != nullptr) store_pair<Float>(p.exact_out + row * p.head_dim_v, pair, p.head_dim_v, low, high);
}

template <int kD, int kM, int kWarps>
class SoftmaxMerge {
 public:
  // Layout of `shared`: (kWarps, kM, kD) floats, then (kWarps, kM) pairs (max, sum), then (2, kM) such pairs.
  __device__ explicit SoftmaxMerge(unsigned char* shared)
      : out_(reinterpret_cast<float2*>(shared)),
        stats_(out_ + kWarps * kM * kD / 2),
        of_block_(stats_ + kWarps * kM),
        of_cluster_(of_block_ + kM) {}

  // Stores this warp's accumulators (in mma layout) and statistics to shared memory.
  __device__ void store_warp(const float (&tO)[kM / 16][kD / 8][4], const float (&row_max)[kM / 16][2],
                             const float (&row_sum)[kM / 16][2]) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int m = 0; m < kM / 16; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum = row_sum[m][half];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        const int row = warp * kM + m * 16 + half * 8 + lane / 4;
        if (lane % 4 == 0) stats_[row] = make_float2(row_max[m][half], sum);
#pragma unroll
        for (int n = 0; n < kD / 8; ++n)
          out_[at(row, n * 4 + lane % 4)] = make_float2(tO[m][n][half * 2], tO[m][n][half * 2 + 1]);
      }
    }
    __syncthreads();
  }

  template <class T>
  __device__ void finish(const DecodingParams& p, int b, int head_kv, int first_row) {
    static_assert(kM <= kWarps * 32);
    const int pairs = (p.head_dim_v + 1) / 2;
    const int count = min(kM, p.group * p.seqlen_q - first_row);
    const int row_of_thread = threadIdx.x;
    if (row_of_thread < count) {
      of_block_[row_of_thread] =
          weigh(kWarps, row_of_thread, [&](int warp) { return stats_[warp * kM + row_of_thread]; });
    }
    __syncthreads();  // the weights of all warps have been written
    for (int i = threadIdx.x; i < count * pairs; i += kWarps * 32) {
      const int row = i / pairs, pair = i % pairs;
      const float2 total = add(kWarps, row, [&](int warp) { return out_[at(warp * kM + row, pair)]; });
      if (p.cluster == 1) {
        write<T>(p, b, head_kv, first_row + row, pair, total, of_block_[row]);
      } else {
        out_[at(row, pair)] = total;  // overwrites the value of warp 0, which only this thread reads
      }
    }
    if (p.cluster == 1) return;
    cluster_barrier();  // all CTAs of the cluster have written their sums
    if (row_of_thread < count) {
      of_cluster_[row_of_thread] = weigh(p.cluster, row_of_thread, [&](int block) {
        return load_cluster(shared_address(of_block_ + row_of_thread), block);
      });
    }
    __syncthreads();  // the weights of all CTAs have been written
    const int rank = blockIdx.y % p.cluster;
    const int share = (count * pairs + p.cluster - 1) / p.cluster;
    const int end = min(count * pairs, (rank + 1) * share);
    for (int i = rank * share + threadIdx.x; i < end; i += kWarps * 32) {
      const int row = i / pairs, pair = i % pairs;
      const float2 total =
          add(p.cluster, row, [&](int block) { return load_cluster(shared_address(out_ + at(row, pair)), block); });
      write<T>(p, b, head_kv, first_row + row, pair, total, of_cluster_[row]);
    }
    cluster_barrier();  // no CTA may exit while another reads its shared memory
  }

 private:
  float2* out_;
  float2* stats_;
  float2* of_block_;    // (kM,): (max, sum) of each row over the CTA's warps
  float2* of_cluster_;  // (kM,): the same over the cluster's CTAs

  // XOR swizzle: the store of a warp (eight rows, four pairs each) has no bank conflicts.
  __device__ static int at(int row, int pair) { return row * (kD / 2) + (pair ^ row % 8 * 4); }

  // Returns (max, sum) of a row over `parts` parts, at most kWarps. Stores the factor that rescales each part to the
  // common maximum over the maxima in stats_.
  template <class StatsOf>
  __device__ float2 weigh(int parts, int row, const StatsOf& stats_of) {
    float largest = -FLASHBWD_INFINITY;
#pragma unroll 8
    for (int i = 0; i < parts; ++i) largest = fmaxf(largest, stats_of(i).x);
    const float base = largest == -FLASHBWD_INFINITY ? 0.f : largest;
    float sum = 0.f;
#pragma unroll 8
    for (int i = 0; i < parts; ++i) {
      const float2 stat = stats_of(i);
      const float weight = exp2_approx(stat.x - base);
      sum += weight * stat.y;
      stats_[i * kM + row].x = weight;
    }
    return make_float2(largest, sum);
  }

  // Sum of the parts' values, weighted by the factors from weigh().
  template <class ValueOf>
  __device__ float2 add(int parts, int row, const ValueOf& value_of) const {
    float2 total = make_float2(0.f, 0.f);
#pragma unroll 8
    for (int i = 0; i < parts; ++i) {
      const float weight = stats_[i * kM + row].x;
      const float2 value = value_of(i);
      total.x += weight * value.x;
      total.y += weight * value.y;
    }
    return total;
  }

  template <class T>
  __device__ static void write(const DecodingParams& p, int b, int head_kv, int local, int pair, float2 total,
                               float2 stat) {
    const int rows = p.group * p.seqlen_q;
    const int head = head_kv * p.group + local / p.seqlen_q, query = local % p.seqlen_q;
    const long long row = (static_cast<long long>(b) * p.heads_kv + head_kv) * rows + local;
    if (p.splits == p.cluster) {
      const float norm = stat.y > 0.f ? 1.f / stat.y : 0.f;
      typename T::Storage* const to = static_cast<typename T::Storage*>(p.out) + b * p.out_strides[0] +
                                      head * p.out_strides[1] + query * p.out_strides[2];
      store_pair<T>(to, pair, p.head_dim_v, total.x * norm, total.y * norm);
      store_exact(p, row, pair, total.x * norm, total.y * norm);
      if (pair == 0) {
        if (p.lse != nullptr) p.lse[row] = stat.y > 0.f ? stat.x * kLn2 + logf(stat.y) : -FLASHBWD_INFINITY;
        if (p.max_scores != nullptr) p.max_scores[row] = stat.x * kLn2;
      }
    } else {
      const long long all_rows = static_cast<long long>(p.batch) * p.heads * p.seqlen_q;
      const long long slot_row = blockIdx.y / p.cluster * all_rows + row;
      reinterpret_cast<float2*>(p.partial_out)[slot_row * ((p.head_dim_v + 1) / 2) + pair] = total;
      if (pair == 0) reinterpret_cast<float2*>(p.partial_stats)[slot_row] = stat;
    }
  }
};

}  // namespace flashbwd

#endif

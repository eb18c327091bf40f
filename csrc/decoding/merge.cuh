// The epilogue of a CTA. It merges the online softmax of the CTA's warps, then that of the CTAs of its cluster. It
// writes the result as the final output, or as one slot of the partial results.
#pragma once

#include "elements.cuh"

#ifdef __CUDACC__

namespace flashbwd {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// The softmax statistics of one row over all slots of its partial results.
struct RowStats {
  float largest, base, sum;  // base: `largest`, or 0 for a row without keys, whose `largest` is -inf
};

// Called by all lanes of a warp. `stats`: (slots,) pairs (max, sum) of the row, with stride all_rows.
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

// Stores columns 2 * pair and 2 * pair + 1 of an output row, and of the unrounded output if it is needed.
template <class T>
__device__ __forceinline__ void store_out(const DecodingParams& p, void* out, long long row, int pair, float low,
                                          float high) {
  store_pair<T>(out, pair, p.head_dim_v, low, high);
  if (p.exact_out != nullptr) store_pair<Float>(p.exact_out + row * p.head_dim_v, pair, p.head_dim_v, low, high);
}

// Stores lse and max_scores of a row from its maximum, in log2 units, and its sum of exp2(s - max).
__device__ __forceinline__ void store_stats(const DecodingParams& p, long long row, float largest, float sum) {
  if (p.lse != nullptr) p.lse[row] = sum > 0.f ? largest * kLn2 + logf(sum) : -FLASHBWD_INFINITY;
  if (p.max_scores != nullptr) p.max_scores[row] = largest * kLn2;
}

template <int kD, int kM, int kWarps>
class SoftmaxMerge {
 public:
  // `shared` holds out_, stats_, cta_stats_ and cluster_stats_, in this order.
  __device__ explicit SoftmaxMerge(unsigned char* shared)
      : out_(reinterpret_cast<float2*>(shared)),
        stats_(out_ + kWarps * kM * kD / 2),
        cta_stats_(stats_ + kWarps * kM),
        cluster_stats_(cta_stats_ + kM) {}

  // Stores this warp's accumulators (in MMA layout) and statistics to shared memory.
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
    __syncthreads();  // all warps have written; all threads read
  }

  // Merges the warps and the CTAs of the cluster, and writes the rows from first_row.
  template <class T>
  __device__ void finish(const DecodingParams& p, int b, int head_kv, int first_row) {
    static_assert(kM <= kWarps * 32);
    const int pairs = (p.head_dim_v + 1) / 2;
    const int count = min(kM, p.group * p.seqlen_q - first_row);
    const int row_of_thread = threadIdx.x;
    if (row_of_thread < count) {
      cta_stats_[row_of_thread] =
          merge_stats(kWarps, row_of_thread, [&](int warp) { return stats_[warp * kM + row_of_thread]; });
    }
    __syncthreads();  // the first `count` threads have written the weights of all warps; all threads read them
    for (int i = threadIdx.x; i < count * pairs; i += kWarps * 32) {
      const int row = i / pairs, pair = i % pairs;
      const float2 total = weighted_sum(kWarps, row, [&](int warp) { return out_[at(warp * kM + row, pair)]; });
      if (p.cluster == 1) {
        write<T>(p, b, head_kv, first_row + row, pair, total, cta_stats_[row]);
      } else {
        out_[at(row, pair)] = total;  // overwrites the value of warp 0, which only this thread reads
      }
    }
    if (p.cluster == 1) return;
    cluster_barrier();  // all threads of the cluster's CTAs have written their sums; all of them read
    if (row_of_thread < count) {
      cluster_stats_[row_of_thread] = merge_stats(p.cluster, row_of_thread, [&](int cta) {
        return load_cluster(shared_address(cta_stats_ + row_of_thread), cta);
      });
    }
    __syncthreads();  // the first `count` threads have written the weights of all CTAs; all threads read them
    const int rank = blockIdx.y % p.cluster;
    const int pairs_per_cta = (count * pairs + p.cluster - 1) / p.cluster;
    const int end = min(count * pairs, (rank + 1) * pairs_per_cta);
    for (int i = rank * pairs_per_cta + threadIdx.x; i < end; i += kWarps * 32) {
      const int row = i / pairs, pair = i % pairs;
      const float2 total = weighted_sum(
          p.cluster, row, [&](int cta) { return load_cluster(shared_address(out_ + at(row, pair)), cta); });
      write<T>(p, b, head_kv, first_row + row, pair, total, cluster_stats_[row]);
    }
    cluster_barrier();  // all threads have read; no CTA may exit while another CTA reads its shared memory
  }

 private:
  float2* out_;            // (kWarps, kM, kD / 2): pairs of columns
  float2* stats_;          // (kWarps, kM): (max, sum)
  float2* cta_stats_;      // (kM,): (max, sum) of each row over the CTA's warps
  float2* cluster_stats_;  // (kM,): (max, sum) of each row over the cluster's CTAs

  // The index of a pair in out_. With this XOR swizzle, the store of a warp (eight rows, four pairs each) has no bank
  // conflicts.
  __device__ static int at(int row, int pair) { return row * (kD / 2) + (pair ^ row % 8 * 4); }

  // Merges the (max, sum) of a row from `count` warps or CTAs, at most kWarps. Writes to stats_[i].x the factor
  // that rescales the sums of warp or CTA i to the common maximum.
  template <class StatsOf>
  __device__ float2 merge_stats(int count, int row, const StatsOf& stats_of) {
    float largest = -FLASHBWD_INFINITY;
#pragma unroll 8
    for (int i = 0; i < count; ++i) largest = fmaxf(largest, stats_of(i).x);
    const float base = largest == -FLASHBWD_INFINITY ? 0.f : largest;
    float sum = 0.f;
#pragma unroll 8
    for (int i = 0; i < count; ++i) {
      const float2 stat = stats_of(i);
      const float weight = exp2_approx(stat.x - base);
      sum += weight * stat.y;
      stats_[i * kM + row].x = weight;
    }
    return make_float2(largest, sum);
  }

  // The sum of the values of `count` warps or CTAs, weighted by the factors from merge_stats().
  template <class ValueOf>
  __device__ float2 weighted_sum(int count, int row, const ValueOf& value_of) const {
    float2 total = make_float2(0.f, 0.f);
#pragma unroll 8
    for (int i = 0; i < count; ++i) {
      const float weight = stats_[i * kM + row].x;
      const float2 value = value_of(i);
      total.x += weight * value.x;
      total.y += weight * value.y;
    }
    return total;
  }

  // Writes one pair of columns of row `local` of the KV head: normalized, or to a slot of the partial results.
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
      store_out<T>(p, to, row, pair, total.x * norm, total.y * norm);
      if (pair == 0) store_stats(p, row, stat.x, stat.y);
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

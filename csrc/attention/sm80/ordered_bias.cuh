// The gradient of a bias that several heads share, added in one order: the sums of a tile go from head to head through
// global memory, and the last head writes the gradient.
#pragma once

#include <cstdint>

#include "../../common/mma.cuh"
#include "../../common/ordered.cuh"
#include "bias.cuh"

namespace flashbwd::sm80 {

// The position of a head in the order in which heads that share a bias add to its gradient (the order of the work
// tiles), and the plane of the gradient that they share.
struct BiasOrder {
  int32_t number, plane;

  __device__ __forceinline__ BiasOrder(const KernelParams& params, const WorkTile& work, int32_t head) {
    const AttentionBackwardParams& p = params.attention;
    const bool batches = params.bias_gradient.batch_stride == 0, heads = params.bias_gradient.head_stride == 0;
    const int32_t of_group = head - work.head_kv * work.heads_per_kv;
    if (batches) {
      number = heads ? (work.head_kv * p.batch + work.batch) * work.heads_per_kv + of_group : work.batch;
      plane = heads ? 0 : head;
    } else {
      number = head;
      plane = work.batch;
    }
  }
  __device__ __forceinline__ int32_t tile(const KernelParams& params, const WorkTile& work, int32_t query_block) const {
    return (plane * params.schedule.key_blocks + work.key_block) * params.schedule.query_blocks + query_block;
  }
};

template <typename Traits>
struct OrderedBias {
  using T = typename Traits::T;
  using Accumulator = typename ScorePosition<Traits>::Accumulator;
  using Swizzle = VectorSwizzle<Traits::kScoreRowBytes>;
  static constexpr int kVectors = Traits::kKeyTiles * Traits::kScoreTiles;  // 16-byte vectors of a thread's elements
  using Sums = float4[kVectors];
  // Whether the registers allow loading the sums early.
  static constexpr bool kLoadsSumsEarly = Traits::kVariant == Variant::kSharedBias && Traits::kScoreTiles <= 4;

  // Waits until all heads that share the bias and come before this one have added to the tile.
  static __device__ __forceinline__ void wait_for_semaphore(const KernelParams& params, const BiasOrder& order,
                                                            int32_t tile) {
    if (Bias<Traits>::lane_again() == 0) {
      while (load_acquire(params.ordered_bias_sums.counters + tile) != order.number) {
      }
    }
    __syncwarp();  // lane 0 has waited for the semaphore
  }

  // Loads the sums of the heads before this one well before add_in_order needs them, if registers allow it. `sums`:
  // zero on entry.
  static __device__ __forceinline__ void load_sums(const KernelParams& params, const WorkTile& work, int32_t head,
                                                   int32_t query_block, Sums& sums) {
    const BiasOrder order(params, work, head);
    if (!kLoadsSumsEarly || order.number == 0) return;
    const int32_t tile = order.tile(params, work, query_block);
    wait_for_semaphore(params, order, tile);
    const float4* const source = sums_of_tile(params, tile);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) sums[i] = __ldcg(source + i * Traits::kThreads);
  }

  // Adds ds to the sums. Each thread loads and stores its own registers as 16-byte vectors. The last head stores the
  // gradient instead, through this warp's block of the ds tile.
  static __device__ __forceinline__ void add_in_order(const KernelParams& params, const WorkTile& work, int32_t head,
                                                      int32_t query_block, uint8_t* ds_tile, const Accumulator& ds,
                                                      const Sums& sums) {
    const BiasOrder order(params, work, head);
    const int32_t tile = order.tile(params, work, query_block);
    if (!kLoadsSumsEarly && order.number > 0) wait_for_semaphore(params, order, tile);
    const int32_t lane = Bias<Traits>::lane_again();
    float4* const destination = sums_of_tile(params, tile);
    const auto sum_of = [&](int i, int mt, int nt) {
      const float4 sum = kLoadsSumsEarly ? sums[i] : __ldcg(destination + i * Traits::kThreads);
      const float* const x = ds[mt][nt];
      return make_float4(sum.x + x[0], sum.y + x[1], sum.z + x[2], sum.w + x[3]);
    };
    if (!kLoadsSumsEarly && order.number == 0) {
      for_each_vector([&](int i, int mt, int nt) {
        const float* const x = ds[mt][nt];
        __stcg(destination + i * Traits::kThreads, make_float4(x[0], x[1], x[2], x[3]));
      });
    } else if (order.number + 1 < params.ordered_bias_sums.sharers) {
      for_each_vector([&](int i, int mt, int nt) { __stcg(destination + i * Traits::kThreads, sum_of(i, mt, nt)); });
    } else {
      for_each_vector([&](int i, int mt, int nt) {
        const float4 sum = sum_of(i, mt, nt);
        const uint32_t row = Bias<Traits>::warp_row() + mt * 16 + lane / 4;
        const uint32_t byte = lane % 4 * 4;
        store_shared_word(smem_address(ds_tile) + Swizzle::offset(row, Bias<Traits>::warp_vector() + nt) + byte,
                          pack2<T>(sum.x, sum.y));
        store_shared_word(smem_address(ds_tile) + Swizzle::offset(row + 8, Bias<Traits>::warp_vector() + nt) + byte,
                          pack2<T>(sum.z, sum.w));
      });
      Bias<Traits>::store_vectors(params, work, head, query_block, ds_tile);
      __syncwarp();  // all lanes have read the warp's block of the tile, so it may be overwritten
    }
  }

  // Called by one thread after all threads have added.
  static __device__ __forceinline__ void release(const KernelParams& params, const WorkTile& work, int32_t head,
                                                 int32_t query_block) {
    const BiasOrder order(params, work, head);
    store_release(params.ordered_bias_sums.counters + order.tile(params, work, query_block), order.number + 1);
  }

 private:
  template <typename F>
  static __device__ __forceinline__ void for_each_vector(const F& f) {
#pragma unroll
    for (int nt = 0; nt < Traits::kScoreTiles; ++nt) {
#pragma unroll
      for (int mt = 0; mt < Traits::kKeyTiles; ++mt) f(nt * Traits::kKeyTiles + mt, mt, nt);
    }
  }
  static __device__ __forceinline__ float4* sums_of_tile(const KernelParams& params, int32_t tile) {
    return reinterpret_cast<float4*>(params.ordered_bias_sums.sums) +
           int64_t{tile} * (Traits::kBlockM * Traits::kBlockN / 4) + threadIdx.x;
  }
};

}  // namespace flashbwd::sm80

// The kernel for dk and dv of 64 keys. A cluster of two CTAs computes a work tile: rank 0 computes S = K Q^T, P, dS and
// dk, rank 1 computes dP = V dO^T and dv. All scores are transposed (keys, queries). Rank 0 sends P to rank 1, and rank
// 1 sends dP to rank 0. docs/kernels/attention_sm90_d512.md shows one round.
#pragma once

#include "../../../common/launch_overlap.cuh"
#include "epilogue.cuh"
#include "exchange.cuh"
#include "producer.cuh"
#include "scores.cuh"

namespace flashbwd::sm90::head_dim_512 {

enum KeyGradientsRank : int32_t { kRankOfDk = 0, kRankOfDv = 1 };

// Iterations visit the streamed blocks of one query head after the other.
template <typename Traits>
__device__ __forceinline__ int32_t iterations_of(const KernelParams& params, const WorkTile& work) {
  return work.blocks.size() * (params.attention.heads / params.attention.heads_kv);
}

// The producer warp of a CTA.
template <typename Traits, int32_t kRank>
__device__ void load_key_gradients(const KernelParams& params, typename Traits::KeyGradientsStorage& smem) {
  const AttentionBackwardParams& p = params.attention;
  const WorkTile& work = smem.work;
  Loader loader{params, smem.landed};
  const bool packed_k = p.cu_seqlens_k != nullptr, packed_q = p.cu_seqlens_q != nullptr;
  const int32_t heads = p.heads / p.heads_kv, iterations = iterations_of<Traits>(params, work);
  if (iterations == 0) return;
  const TileRows keys = {kRank == kRankOfDk ? &params.k : &params.v, work.kept_begin + work.first_row, work.head,
                         packed_k ? 0 : work.batch, work.valid_rows()};
  loader.load(keys, smem.kept, 0, Traits::kAtoms, &smem.kept_full);
  int32_t head = work.head * heads, block = work.blocks.begin;
#pragma unroll 1
  for (int32_t index = 0; index < iterations; ++index) {
    const int32_t stage = index % kStages;
    const uint32_t phase = index / kStages & 1;
    const TileRows queries = {kRank == kRankOfDk ? &params.q : &params.dout, work.streamed_begin + block * kRows, head,
                              packed_q ? 0 : work.batch, work.valid_rows_of(block)};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool row_values = kRank == kRankOfDk && half == 0;
      mbarrier_wait(&smem.empty[stage][half], phase ^ 1);
      loader.load(queries, smem.streamed[stage] + Traits::first_atom(half) * kAtomBytes, Traits::first_atom(half),
                  Traits::atoms_of(half), &smem.full[stage][half], row_values ? 2 * kRowValueBytes : 0);
      if (row_values && elect_one()) {
        const int64_t row = params.lse_delta.index(work.batch, head, work.streamed_begin) + block * kRows;
        bulk_load(smem.lse_log2[stage], params.lse_delta.lse_log2 + row, kRowValueBytes, &smem.full[stage][half]);
        bulk_load(smem.delta[stage], params.lse_delta.delta + row, kRowValueBytes, &smem.full[stage][half]);
      }
      __syncwarp();
    }
    if (++block == work.blocks.end) {
      block = work.blocks.begin;
      ++head;
    }
  }
}

// Consumer warpgroup kHalf of the CTA of rank kRank. It computes S or dP for iterations kHalf, kHalf + 2, ..., and half
// of the columns of the gradient for all iterations. Two iterations are a round.
template <typename Traits, int32_t kRank, int kHalf>
struct KeyGradientsConsumer {
  using T = typename Traits::T;
  static constexpr int kOwnBytes = Traits::first_atom(kHalf) * kAtomBytes;  // offset of this warpgroup's columns
  static constexpr int kRightBytes = Traits::first_atom(1) * kAtomBytes;
  static constexpr int32_t kOther = 1 - kRank;
  static constexpr uint32_t kReceivedBytes = kRank == kRankOfDk ? Traits::kExchangeBytes : Traits::kPackedBytes;

  const KernelParams& params;
  typename Traits::KeyGradientsStorage& smem;
  const WorkTile& work;
  ThreadPlace place = {};

  __device__ __forceinline__ void run(float (&gradient)[Traits::accumulators(kHalf)]) {
    const int32_t iterations = iterations_of<Traits>(params, work);
#pragma unroll
    for (int i = 0; i < Traits::accumulators(kHalf); ++i) gradient[i] = 0.f;
    if (iterations == 0) return;
    mbarrier_wait(&smem.kept_full, 0);
    const int32_t blocks = work.blocks.size();
    int32_t block = work.blocks.begin + kHalf % blocks;  // of the tile whose scores this warpgroup computes
#pragma unroll 1
    for (int32_t index = 0; index < iterations; index += kStages) {
      const uint32_t phase = index / kStages & 1;
      if (index + kHalf < iterations) {
        if constexpr (kRank == kRankOfDk) {
          compute_ds(block, phase);
        } else {
          compute_dp(phase);
        }
        block += kStages;
        while (block >= work.blocks.end) block -= blocks;
      }
      if (index + 1 < iterations) {
        add_two(gradient, phase);
      } else {
        add_one(gradient, phase);
      }
    }
    fence_registers(gradient);
  }

 private:
  // The product of the kept tile and the streamed tile of stage kHalf, over all columns.
  __device__ __forceinline__ void multiply(float (&s)[kScores], uint32_t phase) {
    const uint32_t kept = smem_address(smem.kept), streamed = smem_address(smem.streamed[kHalf]);
    mbarrier_wait(&smem.full[kHalf][0], phase);
    product<T, 4 * Traits::atoms_of(0), false, RowsOperand, RowsOperand>(s, kept, streamed);
    mbarrier_wait(&smem.full[kHalf][1], phase);
    product<T, 4 * Traits::atoms_of(1), true, RowsOperand, RowsOperand>(s, kept + kRightBytes, streamed + kRightBytes);
    wait_products<0>();
    fence_registers(s);
  }

  // Rank 0: S, P, which it sends, and dS.
  __device__ __forceinline__ void compute_ds(int32_t block, uint32_t phase) {
    float s[kScores], derivative[kScores];
    uint32_t packed[kScores / 2];
    multiply(s, phase);
    probabilities(params.attention, work, block, place, ValuesOfColumns{smem.lse_log2[kHalf] + place.column}, s,
                  derivative);
    pack<T>(packed, s);
    mbarrier_wait(&smem.sent_empty[kHalf], phase ^ 1);
#pragma unroll
    for (int j = 0; j < kScores / 8; ++j) {
      send(j, make_uint4(packed[4 * j], packed[4 * j + 1], packed[4 * j + 2], packed[4 * j + 3]));
    }
    wait_received<kHalf>(phase);
    score_gradients(params.attention, smem.exchange[kHalf], place.thread,
                    ValuesOfColumns{smem.delta[kHalf] + place.column}, s, derivative);
    pack<T>(packed, s);
    store_packed(smem.exchange[kHalf], place.thread, packed);
    mbarrier_arrive(&smem.ds_full[kHalf]);
    arrive_warp(&smem.empty[kHalf][1 - kHalf], place.lane);
  }

  // Rank 1: dP, which it sends.
  __device__ __forceinline__ void compute_dp(uint32_t phase) {
    float dp[kScores];
    multiply(dp, phase);
    arrive_warp(&smem.empty[kHalf][1 - kHalf], place.lane);
    mbarrier_wait(&smem.sent_empty[kHalf], phase ^ 1);
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
      send(j, make_uint4(__float_as_uint(dp[4 * j]), __float_as_uint(dp[4 * j + 1]), __float_as_uint(dp[4 * j + 2]),
                         __float_as_uint(dp[4 * j + 3])));
    }
  }

  // To this thread's slot j in the other CTA.
  __device__ __forceinline__ void send(int j, const uint4& value) {
    store_to_cta(&smem.exchange[kHalf][j][place.thread], &smem.received[kHalf], kOther, value);
  }

  // Waits for what the other CTA sends to a stage. One thread of the stage's warpgroup then expects the next, before
  // this warp says that it has read: the other CTA sends nothing sooner.
  template <int kStage>
  __device__ __forceinline__ void wait_received(uint32_t phase) {
    mbarrier_wait(&smem.received[kStage], phase);
    if (kStage == kHalf && place.thread == 0) mbarrier_arrive_expect(&smem.received[kStage], kReceivedBytes);
    __syncwarp();
  }

  // Issues the product of an iteration for this warpgroup's columns, gradient += A B. A is dS or P of the stage.
  template <int kStage>
  __device__ __forceinline__ void issue(float (&gradient)[Traits::accumulators(kHalf)], uint32_t (&a)[kScores / 2],
                                        uint32_t phase) {
    if constexpr (kRank == kRankOfDk) {
      mbarrier_wait(&smem.ds_full[kStage], phase);
    } else {
      wait_received<kStage>(phase);
    }
    load_packed(a, smem.exchange[kStage], place.thread);
    mbarrier_wait(&smem.full[kStage][kHalf], phase);  // another warpgroup may have waited for it, but not this one
    product<T, true, ColumnsOperand>(gradient, a, smem_address(smem.streamed[kStage]) + kOwnBytes);
    // The product needs the values of `a`, so this warp has read them, and the other CTA may send the next.
    __syncwarp();
    if (place.lane == 0) mbarrier_arrive_in_cta(&smem.sent_empty[kStage], kOther);
  }

  __device__ __forceinline__ void add_one(float (&gradient)[Traits::accumulators(kHalf)], uint32_t phase) {
    uint32_t a[kScores / 2];
    issue<0>(gradient, a, phase);
    wait_products<0>();
    arrive_warp(&smem.empty[0][kHalf], place.lane);
  }

  __device__ __forceinline__ void add_two(float (&gradient)[Traits::accumulators(kHalf)], uint32_t phase) {
    uint32_t first[kScores / 2], second[kScores / 2];
    issue<0>(gradient, first, phase);
    issue<1>(gradient, second, phase);
    wait_products<1>();
    arrive_warp(&smem.empty[0][kHalf], place.lane);
    wait_products<0>();
    arrive_warp(&smem.empty[1][kHalf], place.lane);
  }
};

template <typename Traits, int32_t kRank, int kHalf>
__device__ void compute_key_gradients(const KernelParams& params, typename Traits::KeyGradientsStorage& smem) {
  float gradient[Traits::accumulators(kHalf)];
  KeyGradientsConsumer<Traits, kRank, kHalf>{params, smem, smem.work}.run(gradient);
  if constexpr (kRank == kRankOfDk) {
#pragma unroll
    for (int i = 0; i < Traits::accumulators(kHalf); ++i) gradient[i] *= params.attention.softmax_scale;
  }
  // Each warpgroup stages in the columns of a streamed tile that it alone has read.
  store_gradient<typename Traits::T, Traits::atoms_of(kHalf)>(
      kRank == kRankOfDk ? params.dk : params.dv, smem.work, Traits::first_atom(kHalf) * kAtomColumns,
      smem.streamed[kHalf] + Traits::first_atom(kHalf) * kAtomBytes, kWarpgroupBarrier + kHalf, gradient);
}

template <typename Traits, int32_t kRank>
__device__ void run_key_gradients(const KernelParams& params, typename Traits::KeyGradientsStorage& smem) {
  const int32_t warp = __shfl_sync(0xffffffffu, static_cast<int32_t>(threadIdx.x) / 32, 0);
  if (warp < kWarps) {
    shrink_registers<kProducerRegisters>();
    if (warp == 0) load_key_gradients<Traits, kRank>(params, smem);
  } else if (warp < 2 * kWarps) {
    grow_registers<kConsumerRegisters>();
    compute_key_gradients<Traits, kRank, 0>(params, smem);
  } else {
    grow_registers<kConsumerRegisters>();
    compute_key_gradients<Traits, kRank, 1>(params, smem);
  }
}

template <typename Traits>
__global__ void __cluster_dims__(2) __launch_bounds__(kThreads, 1)
    key_gradients_kernel(const __grid_constant__ KernelParams params) {
  extern __shared__ __align__(1024) uint8_t storage[];
  auto& smem = *reinterpret_cast<typename Traits::KeyGradientsStorage*>(storage);
  const auto rank = static_cast<int32_t>(rank_in_cluster());
  if (threadIdx.x == 0) {
    prefetch_tensor_map(rank == kRankOfDk ? &params.q : &params.dout);
    prefetch_tensor_map(rank == kRankOfDk ? &params.k : &params.v);
    Traits::init_barriers(smem);
    for (uint64_t& received : smem.received) {
      mbarrier_arrive_expect(&received, rank == kRankOfDk ? Traits::kExchangeBytes : Traits::kPackedBytes);
    }
  }
  wait_for_previous_launch();
  allow_next_launch();
  if (threadIdx.x == 0) find_work_tile<true>(smem.work, params.attention, blockIdx.x / 2);
  cluster_sync();  // the barriers of the other CTA are initialized, and the work tile is known
  if (smem.work.exists) {
    if (rank == kRankOfDk) {
      run_key_gradients<Traits, kRankOfDk>(params, smem);
    } else {
      run_key_gradients<Traits, kRankOfDv>(params, smem);
    }
  }
  cluster_sync();  // the other CTA sends nothing any more
}

}  // namespace flashbwd::sm90::head_dim_512

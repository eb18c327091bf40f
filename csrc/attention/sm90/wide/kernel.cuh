// The kernel for head dimensions above 128 and for features: a CTA for 64 keys, or a cluster of two for 128, with a
// warpgroup for each of P, dS and dq.
#pragma once

#include "../../../common/launch_overlap.cuh"
#include "../epilogue.cuh"
#include "../producer.cuh"
#include "mainloop.cuh"

namespace flashbwd::sm90::wide {

// By one thread: adds the chunks of dq tiles into the accumulator, then counts the job as finished.
template <typename Traits>
__device__ void store_dq(const KernelParams& params, typename Traits::SharedStorage& smem,
                         const typename Traits::Work& work, int32_t rank) {
  using DqRing = Ring<Traits::kDqBuffers>;
  const AttentionBackwardParams& p = params.attention;
  int32_t count = 0;  // of chunks of 64 columns
  Turn turn;
  for (Step step(work, 0); step.index < step.end; step.advance()) {
    const bool packed = p.cu_seqlens_q != nullptr;
    int32_t row = step.query_block * Traits::kBlockM;
    // Packed: all heads of a sequence are one run of rows.
    if (packed) row += static_cast<int32_t>(work.sequence.begin_q) * p.heads + step.head * work.sequence.rows_q;
    const int32_t slab = packed ? 0 : work.batch * p.heads + step.head;
    const BlockRange chunks = Traits::chunks_of(rank, step.query_block);
    // The answer comes while the adds before complete.
    const Turn next = look_ahead<Traits>(params, work, rank, step.head, step.query_block);
    finish_turn(params, turn);
    turn = next;
#pragma unroll 1
    for (int32_t chunk = chunks.begin; chunk < chunks.end; ++chunk, ++count) {
      const int32_t buffer = DqRing::stage(count);
      mbarrier_wait(&smem.dq_full[buffer], DqRing::phase(count));
      fence_async_shared();  // what the barrier has shown to this thread, the copy engine sees too
      if (chunk == chunks.begin) begin_turn(params, turn);
#pragma unroll 1
      for (int32_t box = 0; box < 2; ++box) {
        const int32_t column = chunk * kChunkColumns + box * 32;
        if (column >= p.head_dim) continue;
        if (turn.stores) {
          tensor_store_3d(&params.dq_accumulator, smem.dq[buffer][box], column, row, slab);
        } else {
          tensor_reduce_add_3d(&params.dq_accumulator, smem.dq[buffer][box], column, row, slab);
        }
      }
      bulk_commit();
      bulk_wait_read<0>();
      mbarrier_arrive(&smem.dq_empty[buffer]);
    }
  }
  finish_turn(params, turn);
  bulk_wait<0>();
  // Past the rows of the sequence there are jobs that only write zeros to the gradient of a bias.
  if (work.first_key - rank * Traits::kBlockN < work.sequence.rows_k) {
    fence_async_global();
    add_release(params.heads_finished + int64_t{work.batch} * p.heads_kv + work.head_kv, 1);
  }
}

// By one thread: the other CTA's keys, in the columns of dq that this one adds.
template <typename Traits>
__device__ void load_other_keys(const KernelParams& params, typename Traits::SharedStorage& smem,
                                const typename Traits::Work& work, int32_t rank) {
  const bool packed = params.attention.cu_seqlens_k != nullptr;
  const int32_t row = static_cast<int32_t>(work.sequence.begin_k) + work.first_key + other_keys<Traits>(rank);
  mbarrier_arrive_expect(&smem.k_other_full, sizeof(smem.k_other));
#pragma unroll 1
  for (int32_t chunk = 0; chunk < Traits::kOtherChunks; ++chunk) {
    tensor_load_4d(&params.k, &smem.k_other_full, smem.k_other + chunk * Traits::kKeyChunkBytes,
                   (Traits::first_other_chunk(rank) + chunk) * kChunkColumns, row, work.head_kv,
                   packed ? 0 : work.batch);
  }
}

template <typename Traits>
__global__ void __cluster_dims__(Traits::kCtas) __launch_bounds__(kWideThreads, 1)
    backward_kernel(const __grid_constant__ KernelParams params) {
  extern __shared__ __align__(1024) uint8_t storage[];
  using SharedStorage = typename Traits::SharedStorage;
  using T = typename Traits::T;
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(storage);
  const typename Traits::Work& work = smem.work;
  const int32_t warpgroup = __shfl_sync(0xffffffffu, static_cast<int32_t>(threadIdx.x) / kWarpgroupThreads, 0);

  if (threadIdx.x == 32) {
    prefetch_tensor_map(&params.q);
    prefetch_tensor_map(&params.k);
    prefetch_tensor_map(&params.v);
    prefetch_tensor_map(&params.dout);
    prefetch_tensor_map(&params.dq_accumulator);
    Traits::init_barriers(smem);
  }
  const int32_t rank = static_cast<int32_t>(rank_in_cluster());
  wait_for_launch_before();
  let_launch_behind_begin();
  // Jobs that wait for one another are taken in the order in which clusters start: nobody waits for one that has not.
  const bool in_order = params.attention.deterministic;
  if (in_order) {
    if (threadIdx.x == 0 && rank == 0) smem.job = atomicAdd(params.jobs_taken, 1);
    cluster_sync();
  } else {
    cluster_arrive();
  }
  if (threadIdx.x == 0) {
    const int32_t job = in_order ? load_from_cta(&smem.job, 0) : static_cast<int32_t>(blockIdx.x) / Traits::kCtas;
    smem.work.find(params, {{}, job, false});
    smem.work.template take_part<Traits::kBlockN>(rank);
  }
  if (!in_order) cluster_wait();  // the other CTA has its barriers
  __syncthreads();
  if (!work.exists) {  // for the whole cluster: nothing to load, nothing to write
    cluster_sync();    // the job is read
    return;
  }

  if (warpgroup == 0) {
    shrink_registers<Traits::kRegisters.producer>();
    const bool has_steps = work.steps > 0;
    const auto nobody = [] {};  // used k and v before
    if (threadIdx.x == 0 && has_steps) Producer<Traits>::load(params, smem, work, 0, nobody, nobody);
    if (threadIdx.x == 32) store_dq<Traits>(params, smem, work, rank);
    if (Traits::kPairs && threadIdx.x == 64 && has_steps) load_other_keys<Traits>(params, smem, work, rank);
    if constexpr (Traits::kBiasGradient) {
      if (threadIdx.x >= 64) zero_bias_gradient<Traits>(params, work, threadIdx.x - 64, kWarpgroupThreads - 64);
    }
  } else if (warpgroup == 1) {
    grow_registers<Traits::kRegisters.probabilities>();
    float dv[Traits::kHeadDimV / 2];
#pragma unroll
    for (int i = 0; i < Traits::kHeadDimV / 2; ++i) dv[i] = 0.f;
    if (work.steps > 0) {
      Probabilities<Traits>{{params, smem, work}}.run(dv);
      // The last dout serves as staging buffer when dP has been computed from it too.
      const int32_t last = work.steps - 1;
      using DoutRing = Ring<Traits::kDoutStages>;
      mbarrier_wait(&smem.dout_empty[DoutRing::stage(last)], DoutRing::phase(last));
      store_gradient<T, Traits::kQueryChunkBytes>(dv_of(params), work, 0, smem.dout[DoutRing::stage(last)],
                                                  kProbabilityBarrier, dv);
    } else {
      store_gradient<T, Traits::kQueryChunkBytes>(dv_of(params), work, 0, smem.dout[0], kProbabilityBarrier, dv);
    }
  } else if (warpgroup == 2) {
    grow_registers<Traits::kRegisters.score_gradients>();
    float dk[Traits::kHeadDim / 2];
#pragma unroll
    for (int i = 0; i < Traits::kHeadDim / 2; ++i) dk[i] = 0.f;
    if (work.steps > 0) ScoreGradients<Traits>{{params, smem, work}}.run(dk);
#pragma unroll
    for (int i = 0; i < Traits::kHeadDim / 2; ++i) dk[i] *= params.attention.softmax_scale;
    // No product reads q any more: the last S came before the last dS.
    store_gradient<T, Traits::kQueryChunkBytes>(dk_of(params), work, 0, smem.q[0], kScoreGradientBarrier, dk);
  } else {
    shrink_registers<Traits::kRegisters.dq>();
    if (work.steps > 0) QueryGradients<Traits>::run(params, smem, work, rank);
  }
  cluster_sync();  // the other CTA sends and arrives here no more
}

}  // namespace flashbwd::sm90::wide

// The producer warpgroup: `load`, one thread that brings q, dout and row statistics through the copy engine, and
// `store_dq`, one warp for each consumer warpgroup that adds dq tiles into the accumulator.
#pragma once

#include "kernel_params.h"
#include "traits.cuh"
#include "turns.cuh"

namespace flashbwd::sm90 {

template <typename Traits>
struct Producer {
  using SharedStorage = typename Traits::SharedStorage;
  using Work = typename Traits::Work;
  using QueryRing = Ring<Traits::kStages>;
  using DoutRing = Ring<Traits::kDoutStages>;
  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kBlockN = Traits::kBlockN;

  static __device__ void load(const KernelParams& params, SharedStorage& smem, const Work& work) {
    const AttentionBackwardParams& p = params.attention;
    const int32_t key_row = static_cast<int32_t>(work.sequence.begin_k) + work.first_key;
    const int32_t batch = p.cu_seqlens_k != nullptr ? 0 : work.batch;
    const int32_t batch_q = p.cu_seqlens_q != nullptr ? 0 : work.batch;

    load_tile<Traits::kChunks, Traits::kKeyChunkBytes>(&params.k, &smem.k_full, smem.k, key_row, work.head_kv, batch,
                                                       0);
    for (Step step(work); step.index < work.steps; step.advance()) {
      const int32_t stage = QueryRing::stage(step.index), dout_stage = DoutRing::stage(step.index);
      const int32_t first_query = step.query_block * kBlockM;
      const int32_t query_row = static_cast<int32_t>(work.sequence.begin_q) + first_query;
      const int64_t statistic = params.statistics.index(work.batch, step.head, work.sequence.begin_q) + first_query;

      mbarrier_wait(&smem.q_empty[stage], QueryRing::phase(step.index) ^ 1);
      load_tile<Traits::kChunks, Traits::kQueryChunkBytes>(&params.q, &smem.q_full[stage], smem.q[stage], query_row,
                                                           step.head, batch_q, Traits::kStatisticBytes);
      bulk_load(smem.lse_log2[stage], params.statistics.lse_log2 + statistic, Traits::kStatisticBytes,
                &smem.q_full[stage]);
      if (step.index == 0) {
        load_tile<Traits::kChunksV, Traits::kKeyChunkBytes>(&params.v, &smem.v_full, smem.v, key_row, work.head_kv,
                                                            batch, 0);
      }
      mbarrier_wait(&smem.dout_empty[dout_stage], DoutRing::phase(step.index) ^ 1);
      load_tile<Traits::kChunksV, Traits::kQueryChunkBytes>(&params.dout, &smem.dout_full[dout_stage],
                                                            smem.dout[dout_stage], query_row, step.head, batch_q,
                                                            Traits::kStatisticBytes);
      bulk_load(smem.delta[dout_stage], params.statistics.delta + statistic, Traits::kStatisticBytes,
                &smem.dout_full[dout_stage]);
    }
  }

  static __device__ void store_dq(const KernelParams& params, SharedStorage& smem, const Work& work, int32_t warpgroup,
                                  int32_t lane) {
    const AttentionBackwardParams& p = params.attention;
    const bool packed = p.cu_seqlens_q != nullptr;
    const int32_t part_row = warpgroup / Traits::kDqColumnParts * 64;
    const int32_t part_column = warpgroup % Traits::kDqColumnParts * 64;
    Turn turn;
    for (Step step(work); step.index < work.steps; step.advance()) {
      const int32_t row = step.query_block * kBlockM + part_row;
      // Packed: all heads of a sequence are one run of rows.
      const int32_t first =
          packed ? static_cast<int32_t>(work.sequence.begin_q * p.heads + int64_t{step.head} * work.sequence.rows_q)
                 : 0;
      const int32_t slab = packed ? 0 : work.batch * p.heads + step.head;
      // The buffer that this step fills is free: the add of two steps before has read it.
      if (lane == 0) bulk_wait_read<1>();
      __syncwarp();
      named_barrier_arrive(kDqEmptyBarrier + warpgroup, kDqBarrierThreads);
      if (lane == 0) finish_turn(turn);
      named_barrier_sync(kDqFullBarrier + warpgroup, kDqBarrierThreads);
      if (lane == 0) {
        fence_async_shared();  // what the barrier has shown to this thread, the copy engine sees too
        turn = begin_turn<Traits>(params, work, warpgroup, step.head, step.query_block);
        if (row < work.sequence.seqlen_q) {
#pragma unroll
          for (int box = 0; box < 2; ++box) {
            if (part_column + box * 32 < p.head_dim) {
              tensor_reduce_add_3d(&params.dq_accumulator, smem.dq[step.index % 2][warpgroup][box],
                                   part_column + box * 32, first + row, slab);
            }
          }
        }
        bulk_commit();
      }
      __syncwarp();
    }
    if (lane == 0) {
      finish_turn(turn);
      bulk_wait<0>();
    }
  }

 private:
  template <int kChunks, int kChunkBytes>
  static __device__ void load_tile(const CUtensorMap* map, uint64_t* barrier, uint8_t* smem, int32_t row, int32_t head,
                                   int32_t batch, uint32_t extra_bytes) {
    mbarrier_arrive_expect(barrier, kChunks * kChunkBytes + extra_bytes);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      tensor_load_4d(map, barrier, smem + chunk * kChunkBytes, chunk * kChunkColumns, row, head, batch);
    }
  }
};

}  // namespace flashbwd::sm90

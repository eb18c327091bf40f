// The producer warpgroup of wide tiles: a warp loads q and dout, two add dq, and one finds jobs, loads k and v and
// converts dq. Each goes from job to job by itself, as in ../producer.cuh.
#pragma once

#include "../producer.cuh"
#include "mainloop.cuh"

namespace flashbwd::sm90::wide {

template <typename Traits>
struct Producer {
  using SharedStorage = typename Traits::SharedStorage;
  using Work = typename Traits::Work;
  using Loader = sm90::Producer<Traits>;
  static constexpr int kFinder = 1 + kWideAdders;  // the warp that finds jobs

  // One warp. Finds a job when the loader has nothing left to load for the one before, and loads its keys when those
  // before are no longer needed. In between it converts dq.
  static __device__ void find_jobs(const KernelParams& params, SharedStorage& smem, int32_t rank, int32_t lane) {
    JobCursor& cursor = smem.cursor;
    Converter<Traits> converter{params, smem.conversions[kFinder], lane};
    if (lane == 0) {
      cursor = {};
      cursor.second = false;
    }
    __syncwarp();
    do {
      converter.advance_until(&smem.work_empty[cursor.slot.index()], cursor.slot.phase() ^ 1);
      converter.advance_until(&smem.work_wanted,
                              ~cursor.slot.jobs_before % 2);  // the first job is wanted from the start
      __syncwarp();
      if (lane == 0) find_job(params, smem, rank);
      __syncwarp();
      const Work& work = smem.work[cursor.slot.index()];
      if (!work.exhausted) load_keys(params, smem, work, rank);
      __syncwarp();
      if (lane == 0) cursor.slot.advance();
      __syncwarp();
    } while (cursor.job < params.jobs);
    converter.finish();
  }

  // One thread.
  static __device__ void load_queries(const KernelParams& params, SharedStorage& smem) {
    for (JobSlot slot;; slot.advance()) {
      mbarrier_wait(&smem.work_full[slot.index()], slot.phase());
      const Work& work = smem.work[slot.index()];
      if (work.exhausted) return;
      if (work.steps > 0) Loader::load_queries(params, smem, work, [] {});
      mbarrier_arrive(&smem.work_wanted);
      mbarrier_arrive(&smem.work_empty[slot.index()]);
    }
  }

  // One thread of kWideAdders: adds the dq tiles of every other step into the accumulator, and counts each job as
  // finished.
  static __device__ void store_dq(const KernelParams& params, SharedStorage& smem, int32_t rank, int32_t adder) {
    int32_t count = 0;    // of chunks of 64 columns, of all adders
    uint32_t phases = 0;  // of each buffer, of this adder
    for (JobSlot slot;; slot.advance()) {
      mbarrier_wait(&smem.work_full[slot.index()], slot.phase());
      const Work& work = smem.work[slot.index()];
      if (work.exhausted) break;
      store_job_dq(params, smem, work, rank, adder, count, phases);
      bulk_wait<0>();
      fence_async_global();
      add_release(params.finished + int64_t{work.batch} * params.attention.heads_kv + work.head_kv, 1);
      mbarrier_arrive(&smem.work_empty[slot.index()]);
    }
  }

 private:
  static __device__ __forceinline__ void find_job(const KernelParams& params, SharedStorage& smem, int32_t rank) {
    JobCursor& cursor = smem.cursor;
    Work& work = smem.work[cursor.slot.index()];
    do {
      cursor.job = take_job(params, smem, rank, cursor.taken++);
      work.find(params, cursor);
    } while (!work.settled());
    Loader::wait_for_rows(params, work);
    work.slot = cursor.slot;
    if (!work.exhausted) {
      work.template take_part<Traits::kBlockN>(rank);
      work.first_index = cursor.steps_before;
      work.keys_phase = cursor.keys_phase;
      cursor.steps_before += work.steps;
      cursor.keys_phase ^= work.steps > 0;
    }
    mbarrier_arrive(&smem.work_full[cursor.slot.index()]);
  }

  // By the warp. The barriers of k and v complete a phase for each work tile with query blocks, and for no other:
  // consumers finish a work tile without query blocks by themselves, so a barrier at which they also arrived could be
  // two phases ahead of this warp, which would then wait for ever.
  static __device__ __forceinline__ void load_keys(const KernelParams& params, SharedStorage& smem, const Work& work,
                                                   int32_t rank) {
    if (work.steps == 0 || !elect_one()) return;
    mbarrier_wait(&smem.k_empty, work.keys_phase ^ 1);
    Loader::load_k(params, smem, work);
    if constexpr (Traits::kPairs) {
      mbarrier_wait(&smem.k_other_empty, work.keys_phase ^ 1);
      load_other_keys(params, smem, work, rank);
    }
    mbarrier_wait(&smem.v_empty, work.keys_phase ^ 1);
    Loader::load_v(params, smem, work);
  }

  // The next number of the counter. In turn, jobs of a ring wait for one another, so nobody may have two of a wave: who
  // comes early waits until all of the wave before are taken.
  static __device__ __forceinline__ int32_t next_number(const KernelParams& params, uint32_t taken) {
    if (params.cooperative) {
      while (load_relaxed(params.jobs_taken) < static_cast<int32_t>(taken) * params.wave_size) __nanosleep(32);
    }
    return atomicAdd(params.jobs_taken, 1);
  }

  // The CTA of rank 0 takes the number of a job and sends it to the other.
  static __device__ __forceinline__ int32_t take_job(const KernelParams& params, SharedStorage& smem, int32_t rank,
                                                     uint32_t taken) {
    if (!Traits::kPairs) return next_number(params, taken);
    int32_t job;
    if (rank == 0) {
      job = next_number(params, taken);
      mbarrier_wait(&smem.job_empty, ~taken % 2);
      store_to_cta(&smem.job, &smem.job_full, 1, job);
    } else {
      mbarrier_arrive_expect(&smem.job_full, sizeof(smem.job));
      mbarrier_wait(&smem.job_full, taken % 2);
      job = smem.job;
      mbarrier_arrive_in_cta(&smem.job_empty, 0);
    }
    return job;
  }

  // The other CTA's keys, in the columns of dq that this one adds.
  static __device__ __forceinline__ void load_other_keys(const KernelParams& params, SharedStorage& smem,
                                                         const Work& work, int32_t rank) {
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

  static __device__ __forceinline__ void store_job_dq(const KernelParams& params, SharedStorage& smem, const Work& work,
                                                      int32_t rank, int32_t adder, int32_t& count, uint32_t& phases) {
    using DqRing = Ring<Traits::kDqBuffers>;
    const AttentionBackwardParams& p = params.attention;
    Turn turn;
    for (Step step(work, work.first_index); step.index < step.end; step.advance_in(work)) {
      const BlockRange chunks = Traits::chunks_of(rank, step.query_block);
      if (step.index % kWideAdders != adder) {
        count += chunks.size();
        continue;
      }
      const bool packed = p.cu_seqlens_q != nullptr;
      int32_t row = step.query_block * Traits::kBlockM;
      // Packed: all heads of a sequence are one run of rows.
      if (packed) row += static_cast<int32_t>(work.sequence.begin_q) * p.heads + step.head * work.sequence.rows_q;
      const int32_t slab = packed ? 0 : work.batch * p.heads + step.head;
      change_turns<Traits>(params, turn, work, rank, step.head, step.query_block);
      // In turn, which of dq and the turn comes first does not matter.
      if (p.deterministic) begin_turn(params, turn);
#pragma unroll 1
      for (int32_t chunk = chunks.begin; chunk < chunks.end; ++chunk, ++count) {
        const int32_t buffer = DqRing::stage(count);
        mbarrier_wait(&smem.dq_full[adder][buffer], phases >> buffer & 1);
        phases ^= 1u << buffer;
        fence_async_shared();  // what the barrier has shown to this thread, the copy engine sees too
        if (chunk == chunks.begin && !p.deterministic) begin_turn(params, turn);
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
  }
};

}  // namespace flashbwd::sm90::wide

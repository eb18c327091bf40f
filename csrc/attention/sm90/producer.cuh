// The producer warpgroup. `schedule_tiles`: one thread that finds work tiles. `load_tiles`: one thread that loads k, v,
// q, dout and row statistics with TMA. `store_dq`: two warps that add dq tiles to the accumulator, every other
// iteration each. Each role goes from work tile to work tile by itself.
#pragma once

#include "../../common/ordered.cuh"
#include "dq_semaphores.cuh"
#include "kernel_params.h"
#include "traits.cuh"

namespace flashbwd::sm90 {

template <typename Traits>
struct Producer {
  using SharedStorage = typename Traits::SharedStorage;
  using WorkTile = typename Traits::WorkTile;
  using Iterator = typename WorkTile::Iterator;
  using QueryRing = Ring<Traits::kStages>;
  using DoutRing = Ring<Traits::kDoutStages>;
  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr uint32_t kBiasBytes = Traits::kBias ? sizeof(SharedStorage::ds[0]) : 0;

  // One thread. It takes a work tile when the loader has nothing left to load for the one before, or a few iterations
  // sooner: early enough that the tile is there in time, late enough that tiles go to the CTAs that are really done.
  static __device__ void schedule_tiles(const KernelParams& params, SharedStorage& smem) {
    SchedulerState& state = smem.scheduler;
    const Schedule& schedule = params.schedule;
    state = {};
    state.tile = static_cast<int32_t>(blockIdx.x) - schedule.ctas;
    do {
      mbarrier_wait(&smem.work_empty[state.slot.index()], state.slot.phase() ^ 1);
      mbarrier_wait(&smem.work_wanted, ~state.slot.tiles_before % 2);  // the first tile is wanted from the start
      do {
        state.second = schedule.mirrored_pairs && !state.second;
        if (!state.second) {
          state.tile =
              schedule.dispatch == Dispatch::kStatic ? state.tile + schedule.ctas : atomicAdd(params.tiles_taken, 1);
        }
        smem.work[state.slot.index()].find(params, state);
      } while (!smem.work[state.slot.index()].settled());
      wait_for_rows(params, smem.work[state.slot.index()]);
      WorkTile::forget_registers();
      smem.work[state.slot.index()].first_index = state.iterations_before;
      smem.work[state.slot.index()].keys_phase = state.keys_phase;
      if (!smem.work[state.slot.index()].exhausted) {
        state.iterations_before += smem.work[state.slot.index()].iterations;
        state.keys_phase ^= smem.work[state.slot.index()].iterations > 0;
      }
      mbarrier_arrive(&smem.work_full[state.slot.index()]);
      state.slot.advance();
    } while (state.tile < schedule.work_tiles);
  }

  // One thread.
  static __device__ void load_tiles(const KernelParams& params, SharedStorage& smem) {
    for (TileSlot slot;; slot.advance()) {
      mbarrier_wait(&smem.work_full[slot.index()], slot.phase());
      const WorkTile& work = smem.work[slot.index()];
      if (work.exhausted) return;
      if (work.iterations > 0) {
        load_queries(params, smem, work, [&] {
          mbarrier_wait(&smem.v_empty, work.keys_phase ^ 1);
          load_v(params, smem, work);
          mbarrier_wait(&smem.k_empty, work.keys_phase ^ 1);
          load_k(params, smem, work);
        });
      }
      if (!fetches_early(params) || work.iterations == 0) mbarrier_arrive(&smem.work_wanted);
      mbarrier_arrive(&smem.work_empty[slot.index()]);
    }
  }

  // The loader wants the next work tile while it still has kEarlySteps iterations to load.
  static __device__ __forceinline__ bool fetches_early(const KernelParams& params) {
    return Traits::kEarlySteps > 0 && params.schedule.fetches_early;
  }

  static __device__ __forceinline__ void load_k(const KernelParams& params, SharedStorage& smem, const WorkTile& work) {
    load_tile<Traits::kChunks, Traits::kKeyChunkBytes>(&params.maps.k, &smem.k_full, smem.k, key_row(work),
                                                       work.head_kv, batch_k(params, work), 0);
  }

  static __device__ __forceinline__ void load_v(const KernelParams& params, SharedStorage& smem, const WorkTile& work) {
    load_tile<Traits::kChunksV, Traits::kKeyChunkBytes>(&params.maps.v, &smem.v_full, smem.v, key_row(work),
                                                        work.head_kv, batch_k(params, work), 0);
  }

  // One thread: loads q, dout and row statistics of a work tile. `after_first_q` is called when k and v may follow.
  template <typename LoadKeys>
  static __device__ __forceinline__ void load_queries(const KernelParams& params, SharedStorage& smem,
                                                      const WorkTile& work, LoadKeys after_first_q) {
    const int32_t batch_q = params.attention.cu_seqlens_q != nullptr ? 0 : work.batch;
    const int32_t first_index = work.first_index;

    for (Iterator step(work, first_index); step.index < step.end; step.advance(work)) {
      const int32_t stage = QueryRing::stage(step.index), dout_stage = DoutRing::stage(step.index);
      const int32_t first_query = step.query_block * kBlockM, head = step.head;
      const int32_t query_row = static_cast<int32_t>(work.sequence.begin_q) + first_query;
      const int64_t statistic = params.statistics.index(work.batch, head, work.sequence.begin_q) + first_query;

      if (fetches_early(params) && step.end - step.index == min(Traits::kEarlySteps, work.iterations)) {
        mbarrier_arrive(&smem.work_wanted);
      }
      mbarrier_wait(&smem.q_empty[stage], QueryRing::phase(step.index) ^ 1);
      if constexpr (WorkTile::kListed) smem.listed.entries[stage] = {step.query_block, head, step.bits, 0};
      load_tile<Traits::kChunks, Traits::kQueryChunkBytes>(&params.maps.q, &smem.q_full[stage], smem.q[stage],
                                                           query_row, head, batch_q,
                                                           Traits::kStatisticBytes + kBiasBytes);
      if constexpr (Traits::kBias) {
#pragma unroll
        for (int chunk = 0; chunk < Traits::kDsChunks; ++chunk) {
          tensor_load_4d(&params.maps.bias, &smem.q_full[stage], smem.ds[stage][chunk],
                         work.first_key + chunk * kChunkColumns, first_query,
                         params.attention.bias.head_stride != 0 ? head : 0,
                         params.attention.bias.batch_stride != 0 ? work.batch : 0, params.features.bias_cache_hint);
        }
      }
      bulk_load(smem.lse_log2[stage], params.statistics.lse_log2 + statistic, Traits::kStatisticBytes,
                &smem.q_full[stage]);
      if (step.index == first_index) after_first_q();
      mbarrier_wait(&smem.dout_empty[dout_stage], DoutRing::phase(step.index) ^ 1);
      load_tile<Traits::kChunksV, Traits::kQueryChunkBytes>(&params.maps.dout, &smem.dout_full[dout_stage],
                                                            smem.dout[dout_stage], query_row, head, batch_q,
                                                            Traits::kStatisticBytes);
      bulk_load(smem.delta[dout_stage], params.statistics.delta + statistic, Traits::kStatisticBytes,
                &smem.dout_full[dout_stage]);
    }
  }

  // One of kStoreWarps warps: it has one of the buffers of dq and every other iteration.
  template <int kBuffer>
  static __device__ void store_dq(const KernelParams& params, SharedStorage& smem, int32_t lane) {
    // The counts lie in shared memory because the warp has few registers.
    StoreWarpCounts& counts = smem.store_warps[kBuffer];
    while (true) {
      {
        const TileSlot slot{counts.tiles};
        mbarrier_wait(&smem.work_full[slot.index()], slot.phase());
        const WorkTile& work = smem.work[slot.index()];
        if (work.exhausted) break;
        store_dq_of_tile<kBuffer>(params, smem, work, lane);
      }
      const TileSlot slot{counts.tiles};  // read again, because registers are few
      const WorkTile& work = smem.work[slot.index()];
      __syncwarp();  // all lanes have read what lane 0 and the scheduler may overwrite
      if (lane == 0) {
        if (!Traits::kLastWritesDq || !params.schedule.last_add_writes_dq) {
          bulk_wait<0>();  // the adds of this work tile are complete
          fence_async_global();
          add_release(params.dq.finished + work.batch * params.attention.heads_kv + work.head_kv, 1);
        }
        counts.tiles = slot.tiles_before + 1;
      }
      mbarrier_arrive(&smem.work_empty[slot.index()]);
      __syncwarp();
    }
    if (lane == 0) bulk_wait<0>();
  }

  // By one thread: returns when the row statistics of a work tile are written. An overlapped preprocess is for calls
  // with one query head per KV head.
  static __device__ __forceinline__ void wait_for_rows(const KernelParams& params, const WorkTile& work) {
    if (params.preprocess.words == nullptr || work.exhausted || work.iterations == 0) return;
    for (int32_t word = work.first_flag / 4; word <= work.last_flag / 4; ++word) {
      uint32_t mask = ~0u;
      if (word == work.first_flag / 4) mask = ~0u << work.first_flag % 4 * 8;
      if (word == work.last_flag / 4) mask &= ~0u >> (3 - work.last_flag % 4) * 8;
      while (~load_relaxed(params.preprocess.words + word) & mask) __nanosleep(32);
    }
    __threadfence();       // the flags were read in any order
    fence_async_global();  // TMA sees what this thread sees
  }

 private:
  static __device__ __forceinline__ int32_t adds_before(const ListIterator& step) { return step.adds_before; }
  static __device__ __forceinline__ int32_t adds_before(const QueryIterator&) { return 0; }

  template <int kBuffer>
  static __device__ __forceinline__ void store_dq_of_tile(const KernelParams& params, SharedStorage& smem,
                                                          const WorkTile& work, int32_t lane) {
    DqTurn turn_of_lane;
    DqTurn& turn = Traits::kLastWritesDq ? smem.turns[kBuffer] : turn_of_lane;  // that kernel has no registers left
    if (Traits::kLastWritesDq && lane == 0) turn = DqTurn();
    const auto advance = [&](Iterator& it) {
      if constexpr (Traits::kLastWritesDq) {
        it.advance_rereading(work);
      } else {
        it.advance(work);
      }
    };
    Iterator step(work, work.first_index);
    for (; step.index < (Traits::kLastWritesDq ? work.first_index + work.iterations : step.end); advance(step)) {
      if (step.index % kStoreWarps != kBuffer) continue;
      bool writes_dq = false;
      if constexpr (Traits::kLastWritesDq) {
        writes_dq = offer_in_turn<kBuffer>(params, smem, work, step, lane);
      } else {
        offer_buffer<kBuffer>(lane);
        if (lane == 0) {
          change_turns<Traits>(params, turn, work, 0, step.head, step.query_block, adds_before(step));
          // Counted adds may wait for their turn before dq is ready.
          if (params.schedule.counts_adds()) begin_turn(params, turn);
        }
      }
      named_barrier_sync(kDqFullBarrier + kBuffer, kDqFullThreads);
      if (lane == 0) {
        fence_async_shared();  // TMA sees what the barrier has shown to this thread
        if (!Traits::kLastWritesDq && !params.schedule.counts_adds()) begin_turn(params, turn);
        if (is_alone()) {
          if (writes_dq) {
            store_dq16<0>(params, smem.dq[kBuffer][0], work, step);
            store_dq16<1>(params, smem.dq[kBuffer][1], work, step);
          } else {
            add_dq<0>(params, smem.dq[kBuffer][0], work, step, turn.stores);
            add_dq<1>(params, smem.dq[kBuffer][1], work, step, turn.stores);
          }
          bulk_commit();
        }
      }
      __syncwarp();
    }
    if (!work.tma_dkdv) {
      if (lane == 0) finish_turn(params, turn);
      return;
    }
    // dv and dk pass through the buffers of dq, as two more iterations.
    offer_buffer<kBuffer>(lane);
    if (lane == 0) finish_turn(params, turn);
    named_barrier_sync(kDqFullBarrier + kBuffer, kDqFullThreads);
    if (lane == 0) {
      fence_async_shared();
      const CUtensorMap* const map = step.end % kStoreWarps == kBuffer ? &params.maps.dv : &params.maps.dk;
      if (is_alone()) {
        store_dkdv(map, smem.dq[kBuffer][0], params, work, 0);
        store_dkdv(map, smem.dq[kBuffer][1], params, work, 64);
        bulk_commit();
      }
    }
    __syncwarp();
  }

  // Called by a store warp: offers its buffer to the consumers when TMA has read what was in it.
  template <int kBuffer>
  static __device__ __forceinline__ void offer_buffer(int32_t lane) {
    if (lane == 0) bulk_wait_read<0>();
    __syncwarp();
#pragma unroll
    for (int warpgroup = 0; warpgroup < kConsumerWarpgroups; ++warpgroup) {
      named_barrier_arrive(kDqEmptyBarrier + 2 * kBuffer + warpgroup, kDqEmptyThreads);
    }
  }

  // The same if adds are counted: returns when the turn of this iteration has come. If this is the last add to the tile
  // and writes dq (the result is true), the sums so far are loaded into the buffer first.
  template <int kBuffer>
  static __device__ __forceinline__ bool offer_in_turn(const KernelParams& params, SharedStorage& smem,
                                                       const WorkTile& work, const Iterator& step, int32_t lane) {
    DqTurn& turn = smem.turns[kBuffer];
    DqTurn next;
    if (lane == 0 && params.dq.semaphores != nullptr) {
      next = next_turn<Traits>(params, work, 0, step.head, step.query_block);
      number_turn<Traits>(params, work, step.query_block, next);
    }
    if (!__any_sync(0xffffffffu, next.is_last)) {
      offer_buffer<kBuffer>(lane);
      if (lane == 0) {
        finish_turn(params, turn);
        if (next.semaphore >= 0) await_turn(params, next);
        turn = next;
      }
      return false;
    }
    uint32_t& last_adds = smem.store_warps[kBuffer].last_adds;
    if (lane == 0) {
      bulk_wait_read<0>();
      const bool open = load_acquire(params.dq.semaphores + next.semaphore) >= next.number;
      if (open && is_alone()) load_sums<kBuffer>(params, smem, work, step, next.number > 0);
      finish_turn(params, turn);
      if (!open) {
        await_turn(params, next);
        if (is_alone()) load_sums<kBuffer>(params, smem, work, step, true);
      }
      turn.semaphore = -1;  // no other add waits for the last one
    }
    mbarrier_wait(&smem.sums_full[kBuffer], last_adds % 2);
    __syncwarp();
    if (lane == 0) ++last_adds;
    offer_buffer<kBuffer>(lane);
    drop_sums(params, work, step, lane);
    return true;
  }

  // Called by one thread. `any`: there are sums; else TMA loads zeros from past the end of the tensor.
  template <int kBuffer>
  static __device__ __forceinline__ void load_sums(const KernelParams& params, SharedStorage& smem,
                                                   const WorkTile& work, const Iterator& step, bool any) {
    fence_async_global();  // TMA sees the adds that are complete
    mbarrier_arrive_expect(&smem.sums_full[kBuffer], sizeof(smem.dq[kBuffer]));
    const int32_t slab = (any ? work.batch : params.attention.batch) * params.attention.heads + step.head;
#pragma unroll
    for (int box = 0; box < 4; ++box) {
      const int part = box / 2;  // of a warpgroup
      tensor_load_3d(&params.maps.dq_accumulator, &smem.sums_full[kBuffer], smem.dq[kBuffer][part][box % 2],
                     part % Traits::kDqColumnParts * 64 + box % 2 * 32,
                     step.query_block * kBlockM + part / Traits::kDqColumnParts * 64, slab);
    }
  }

  // Called by the warp: the sums need not be written to memory any more.
  static __device__ __forceinline__ void drop_sums(const KernelParams& params, const WorkTile& work,
                                                   const Iterator& step, int32_t lane) {
    const AttentionBackwardParams& p = params.attention;
    const int32_t row = step.query_block * kBlockM, rows = min(kBlockM, p.seqlen_q - row);
    const int32_t slab = work.batch * p.heads + step.head;
    const float* const sums = params.dq.accumulator + (int64_t{slab} * p.seqlen_q + row) * params.dq.row_stride;
    discard_lines(sums, rows * params.dq.row_stride, lane);
  }

  template <int kWarpgroup>
  static __device__ __forceinline__ void store_dq16(const KernelParams& params, const float (*boxes)[64 * 32],
                                                    const WorkTile& work, const Iterator& step) {
    constexpr int32_t kColumn = kWarpgroup % Traits::kDqColumnParts * 64;
    const int32_t row = step.query_block * kBlockM + kWarpgroup / Traits::kDqColumnParts * 64;
    if (kColumn < params.attention.head_dim) {
      tensor_store_4d(&params.maps.dq, boxes, kColumn, row, step.head, work.batch);
    }
  }

  static __device__ __forceinline__ void store_dkdv(const CUtensorMap* map, const float (*chunks)[64 * 32],
                                                    const KernelParams& params, const WorkTile& work,
                                                    int32_t part_row) {
    const int32_t row = work.first_key + part_row;
    if (row >= work.sequence.rows_k) return;
    const bool packed = params.attention.cu_seqlens_k != nullptr;
#pragma unroll
    for (int chunk = 0; chunk < Traits::kGradientChunks; ++chunk) {
      tensor_store_4d(map, chunks[chunk], chunk * kChunkColumns, static_cast<int32_t>(work.sequence.begin_k) + row,
                      work.gradient_head, packed ? 0 : work.batch);
    }
  }

  template <int kWarpgroup>
  static __device__ __forceinline__ void add_dq(const KernelParams& params, const float (*boxes)[64 * 32],
                                                const WorkTile& work, const Iterator& step, bool stores) {
    const AttentionBackwardParams& p = params.attention;
    int32_t row = step.query_block * kBlockM + kWarpgroup / Traits::kDqColumnParts * 64;
    if (row >= work.sequence.seqlen_q) return;
    const int32_t head = step.head;
    int32_t slab = work.batch * p.heads + head;
    if (p.cu_seqlens_q != nullptr) {  // packed: all heads of a sequence are one run of rows
      row += static_cast<int32_t>(work.sequence.begin_q) * p.heads + head * work.sequence.rows_q;
      slab = 0;
    }
    const int32_t column = kWarpgroup % Traits::kDqColumnParts * 64;
#pragma unroll
    for (int box = 0; box < 2; ++box) {
      if (column + box * 32 >= p.head_dim) continue;
      if (stores) {
        tensor_store_3d(&params.maps.dq_accumulator, boxes[box], column + box * 32, row, slab);
      } else {
        tensor_reduce_add_3d(&params.maps.dq_accumulator, boxes[box], column + box * 32, row, slab);
      }
    }
  }

  static __device__ __forceinline__ int32_t key_row(const WorkTile& work) {
    return static_cast<int32_t>(work.sequence.begin_k) + work.first_key;
  }
  static __device__ __forceinline__ int32_t batch_k(const KernelParams& params, const WorkTile& work) {
    return params.attention.cu_seqlens_k != nullptr ? 0 : work.batch;
  }

  template <int kChunks, int kChunkBytes>
  static __device__ void load_tile(const CUtensorMap* map, uint64_t* barrier, uint8_t* smem, int32_t row, int32_t head,
                                   int32_t batch, uint32_t extra_bytes) {
    mbarrier_arrive_expect(barrier, kChunks * kChunkBytes + extra_bytes);
#pragma unroll(kChunks <= 3 ? kChunks : 1)  // else the addresses do not fit in the registers of the producer
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      tensor_load_4d(map, barrier, smem + chunk * kChunkBytes, chunk * (row_bytes(Traits::kTile) / 2), row, head,
                     batch);
    }
  }
};

}  // namespace flashbwd::sm90

// Two roles of the producer warpgroup. `schedule_tiles`: one thread that finds work tiles. `load_tiles`: one thread
// that loads k, v, q, dout, lse and delta with TMA. Each goes from work tile to work tile by itself. The third role
// adds dq (dq_accumulate.cuh).
#pragma once

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
  static constexpr int kBatchEntries = Traits::kBatchEntries;
  // With a block mask, the loader also puts the bits of a tile where the consumers will write dS (BitMask).
  static constexpr bool kLoadsBits = WorkTile::kListed && !is_large(Traits::kTile);
  static constexpr uint32_t kBiasBytes = Traits::kBias ? sizeof(SharedStorage::ds[0]) / kBatchEntries : 0;

  // One thread. It takes the next work tile when the loader has finished the current one, or kEarlyIterations before,
  // to hide the latency. Taken still earlier, tiles would be distributed less evenly.
  static __device__ void schedule_tiles(const KernelParams& params, SharedStorage& smem) {
    SchedulerState& state = smem.scheduler;
    const Schedule& schedule = params.schedule;
    state = {};
    do {
      mbarrier_wait(&smem.work_empty[state.slot.index()], state.slot.phase() ^ 1);
      mbarrier_wait(&smem.work_wanted, ~state.slot.tiles_before % 2);  // the first tile is wanted from the start
      do {
        state.second = schedule.mirrored_pairs && !state.second;
        if (!state.second) {
          state.tile = schedule.dispatch == Dispatch::kStatic ? static_tile(schedule, blockIdx.x, state.taken++)
                                                              : atomicAdd(params.tiles_taken, 1);
        }
        smem.work[state.slot.index()].find(params, state);
      } while (!smem.work[state.slot.index()].is_final());
      wait_for_rows(params, smem.work[state.slot.index()]);
      WorkTile::reload_from_smem();
      smem.work[state.slot.index()].assign_indices(state);
      mbarrier_arrive(&smem.work_full[state.slot.index()]);
      state.slot.advance();
    } while (state.tile < schedule.work_tiles);
  }

  // One thread.
  static __device__ void load_tiles(const KernelParams& params, SharedStorage& smem) {
    for_each_work_tile(smem, [&](const WorkTile& work) {
      if (work.iterations > 0) {
        load_queries(params, smem, work, [&] {
          mbarrier_wait(&smem.v_empty, work.keys_phase ^ 1);
          load_v(params, smem, work);
          mbarrier_wait(&smem.k_empty, work.keys_phase ^ 1);
          load_k(params, smem, work);
        });
      }
      if (!fetches_early(params) || work.iterations == 0) mbarrier_arrive(&smem.work_wanted);
    });
  }

  // The loader wants the next work tile while it still has kEarlyIterations iterations to load.
  static __device__ __forceinline__ bool fetches_early(const KernelParams& params) {
    return Traits::kEarlyIterations > 0 && params.schedule.fetches_early;
  }

  static __device__ __forceinline__ void load_k(const KernelParams& params, SharedStorage& smem, const WorkTile& work) {
    load_tile<Traits::kAtoms, Traits::kKeyAtomBytes, kBatchEntries>(&params.maps.k, &smem.k_full, smem.k, key_row(work),
                                                                    work.head_kv, batch_k(params, work), 0);
  }

  static __device__ __forceinline__ void load_v(const KernelParams& params, SharedStorage& smem, const WorkTile& work) {
    load_tile<Traits::kAtomsV, Traits::kKeyAtomBytes, kBatchEntries>(
        &params.maps.v, &smem.v_full, smem.v, key_row(work), work.head_kv, batch_k(params, work), 0);
  }

  // One thread: loads q, dout, lse and delta of a work tile. `after_first_q` is called when k and v may follow.
  template <typename LoadKeys>
  static __device__ __forceinline__ void load_queries(const KernelParams& params, SharedStorage& smem,
                                                      const WorkTile& work, LoadKeys after_first_q) {
    const int32_t batch_q = params.attention.cu_seqlens_q != nullptr ? 0 : work.batch;
    const int32_t first_index = work.first_index;

    for (Iterator it(work); it.index < it.end; it.advance(work)) {
      const int32_t stage = QueryRing::stage(it.index), dout_stage = DoutRing::stage(it.index);
      const int32_t first_query = it.query_block() * kBlockM, head = it.head();
      const int32_t query_row = static_cast<int32_t>(work.sequence.begin_q) + first_query;
      const int64_t first_row = params.lse_delta.index(work.batch, head, work.sequence.begin_q) + first_query;

      if (fetches_early(params) && it.end - it.index == min(Traits::kEarlyIterations, work.iterations)) {
        mbarrier_arrive(&smem.work_wanted);
      }
      if (WorkTile::kStaggers) prefetch_queries(params, work, it.query_block(), query_row, first_row, head, batch_q);
      mbarrier_wait(&smem.q_empty[stage], QueryRing::phase(it.index) ^ 1);
      if constexpr (WorkTile::kListed) smem.listed[stage] = {it.query_block(), head, it.entry.bits, 0};
      load_tile<Traits::kAtoms, Traits::kQueryAtomBytes, kBatchEntries>(
          &params.maps.q, &smem.q_full[stage], smem.q[stage], query_row, head, batch_q,
          kBatchEntries * Traits::kRowValueBytes + kBiasBytes);
      if constexpr (Traits::kBias) {
#pragma unroll
        for (int atom = 0; atom < Traits::kDsAtoms; ++atom) {
          tensor_load_4d(&params.maps.bias, &smem.q_full[stage], smem.ds[stage][atom],
                         work.first_key + atom * kAtomColumns, first_query,
                         params.attention.bias.head_stride != 0 ? head : 0,
                         params.attention.bias.batch_stride != 0 ? work.batch : 0, params.features.bias_cache_hint);
        }
      }
      load_row_values(params, work, smem.lse_log2[stage], params.lse_delta.lse_log2 + first_row, &smem.q_full[stage]);
      if (it.index == first_index) after_first_q();
      mbarrier_wait(&smem.dout_empty[dout_stage], DoutRing::phase(it.index) ^ 1);
      load_tile<Traits::kAtomsV, Traits::kQueryAtomBytes, kBatchEntries>(
          &params.maps.dout, &smem.dout_full[dout_stage], smem.dout[dout_stage], query_row, head, batch_q,
          kBatchEntries * Traits::kRowValueBytes + bytes_of_bits(it));
      load_row_values(params, work, smem.delta[dout_stage], params.lse_delta.delta + first_row,
                      &smem.dout_full[dout_stage]);
      if constexpr (kLoadsBits) {
        TileMask<Traits>::load(params.attention.block_mask.bits, it.entry.bits, smem.ds[stage][0],
                               &smem.dout_full[dout_stage]);
      }
    }
  }

  // Bytes of the bits that are loaded with dout, because the consumers need them as late. 0 without a block mask.
  static __device__ __forceinline__ uint32_t bytes_of_bits(const Iterator& it) {
    if constexpr (kLoadsBits) {
      return TileMask<Traits>::bytes(it.entry.bits);
    } else {
      return 0;
    }
  }

  // Loads lse or delta of an iteration. `source`: of the first batch entry. A second entry past the end of the batch
  // gets the numbers of the first one.
  static __device__ __forceinline__ void load_row_values(const KernelParams& params, const WorkTile& work,
                                                         float* destination, const float* source, uint64_t* barrier) {
    bulk_load(destination, source, Traits::kRowValueBytes, barrier);
    if constexpr (kBatchEntries > 1) {
      const int64_t to_next = params.lse_delta.index(1, 0, 0) - params.lse_delta.index(0, 0, 0);
      const float* const second = work.batch + 1 < params.attention.batch ? source + to_next : source;
      bulk_load(destination + kBlockM, second, Traits::kRowValueBytes, barrier);
    }
  }

  // Called by the scheduler: returns when an overlapped preprocess has written lse and delta of the rows of a work
  // tile.
  static __device__ __forceinline__ void wait_for_rows(const KernelParams& params, const WorkTile& work) {
    if (params.preprocess.words == nullptr || work.exhausted || work.iterations == 0) return;
    params.preprocess.wait(work.first_flag, work.last_flag);
  }

  // If a head has more key blocks than run at the same time, the last key block of a wave starts furthest on. It is the
  // first to load the query blocks from there to the end, and in ring order the others add to them after it. Prefetches
  // them to L2, so that it does not wait for memory. In other calls this does no harm.
  static __device__ __forceinline__ void prefetch_queries(const KernelParams& params, const WorkTile& work,
                                                          int32_t query_block, int32_t query_row, int64_t first_row,
                                                          int32_t head, int32_t batch) {
    constexpr int32_t kPrefetchedBlocks = 4;  // longer than the latency of memory
    if (params.schedule.dispatch != Dispatch::kStatic || work.in_wave.rank != work.in_wave.size - 1) return;
    const int32_t blocks = work.query_range.size(), ahead = min(kPrefetchedBlocks, blocks);
    const int32_t rows = (ahead - (query_block + ahead >= work.query_range.end ? blocks : 0)) * kBlockM;
#pragma unroll 1
    for (int atom = 0; atom < max(Traits::kAtoms, Traits::kAtomsV); ++atom) {
      const int32_t column = atom * (row_bytes(Traits::kTile) / 2);
      if (atom < Traits::kAtoms) tensor_prefetch_4d(&params.maps.q, column, query_row + rows, head, batch);
      if (atom < Traits::kAtomsV) tensor_prefetch_4d(&params.maps.dout, column, query_row + rows, head, batch);
    }
    bulk_prefetch(params.lse_delta.lse_log2 + first_row + rows, Traits::kRowValueBytes);
    bulk_prefetch(params.lse_delta.delta + first_row + rows, Traits::kRowValueBytes);
  }

  static __device__ __forceinline__ int32_t key_row(const WorkTile& work) {
    return static_cast<int32_t>(work.sequence.begin_k) + work.first_key;
  }
  static __device__ __forceinline__ int32_t batch_k(const KernelParams& params, const WorkTile& work) {
    return params.attention.cu_seqlens_k != nullptr ? 0 : work.batch;
  }

  // `batch`: the first of kEntries. `extra_bytes`: of other loads that complete on the same barrier.
  template <int kAtoms, int kAtomBytes, int kEntries = 1>
  static __device__ void load_tile(const CUtensorMap* map, uint64_t* barrier, uint8_t* smem, int32_t row, int32_t head,
                                   int32_t batch, uint32_t extra_bytes, int32_t first_atom = 0) {
    mbarrier_arrive_expect(barrier, kEntries * kAtoms * kAtomBytes + extra_bytes);
#pragma unroll
    for (int entry = 0; entry < kEntries; ++entry) {
#pragma unroll(kAtoms <= 3 ? kAtoms : 1)  // else the addresses do not fit in the registers of the producer
      for (int atom = 0; atom < kAtoms; ++atom) {
        tensor_load_4d(map, barrier, smem + (entry * kAtoms + atom) * kAtomBytes,
                       (first_atom + atom) * (row_bytes(Traits::kTile) / 2), row, head, batch + entry);
      }
    }
  }
};

}  // namespace flashbwd::sm90

// The producer warpgroup for large head dimensions: a warp loads q and dout, two add dq, and one finds work tiles and
// loads k and v. Each goes from work tile to work tile by itself, as in ../producer.cuh.
#pragma once

#include "../dq_semaphores.cuh"
#include "../producer.cuh"
#include "mainloop.cuh"

namespace flashbwd::sm90::large_head_dim {

template <typename Traits>
struct Producer {
  using SharedStorage = typename Traits::SharedStorage;
  using WorkTile = typename Traits::WorkTile;
  using Loader = sm90::Producer<Traits>;

  // One warp. It finds a work tile when the loader has nothing left to load for the one before, and loads its keys when
  // the keys before are no longer needed.
  static __device__ void schedule_tiles(const KernelParams& params, SharedStorage& smem, int32_t rank, int32_t lane) {
    SchedulerState& state = smem.scheduler;
    if (lane == 0) {
      state = {};
      state.second = false;
    }
    __syncwarp();
    do {
      mbarrier_wait(&smem.work_empty[state.slot.index()], state.slot.phase() ^ 1);
      mbarrier_wait(&smem.work_wanted, ~state.slot.tiles_before % 2);  // the first tile is wanted from the start
      __syncwarp();
      if (lane == 0) find_tile(params, smem, rank);
      __syncwarp();
      const WorkTile& work = smem.work[state.slot.index()];
      if (!work.exhausted) load_keys(params, smem, work, rank);
      __syncwarp();
      if (lane == 0) state.slot.advance();
      __syncwarp();
    } while (state.tile < params.schedule.work_tiles);
  }

  // One thread.
  static __device__ void load_queries(const KernelParams& params, SharedStorage& smem) {
    for_each_work_tile(smem, [&](const WorkTile& work) {
      if (work.iterations > 0) Loader::load_queries(params, smem, work, [] {});
      mbarrier_arrive(&smem.work_wanted);
    });
  }

  // One of kDqAdders threads: adds the dq tiles of every other iteration to the accumulator, and counts each work
  // tile as finished.
  static __device__ void store_dq(const KernelParams& params, SharedStorage& smem, int32_t rank, int32_t adder) {
    int32_t count = 0;    // atoms of 64 columns so far, of all adders
    uint32_t phases = 0;  // a bit for each buffer, of this adder
    for_each_work_tile(smem, [&](const WorkTile& work) {
      store_dq_of_tile(params, smem, work, rank, adder, count, phases);
      bulk_wait<0>();
      fence_async_global();
      add_release(params.dq.finished + int64_t{work.batch} * params.attention.heads_kv + work.head_kv, 1);
    });
  }

 private:
  static __device__ __forceinline__ void find_tile(const KernelParams& params, SharedStorage& smem, int32_t rank) {
    SchedulerState& state = smem.scheduler;
    WorkTile& work = smem.work[state.slot.index()];
    do {
      state.tile = take_tile(params, smem, rank, state.taken++);
      work.find(params, state);
    } while (!work.is_final());
    Loader::wait_for_rows(params, work);
    if (!work.exhausted) work.template narrow_to_cta<Traits::kBlockN>(rank);
    work.assign_indices(state);
    mbarrier_arrive(&smem.work_full[state.slot.index()]);
  }

  // Called by the warp. SchedulerState::keys_phase says why a work tile without query blocks loads nothing.
  static __device__ __forceinline__ void load_keys(const KernelParams& params, SharedStorage& smem,
                                                   const WorkTile& work, int32_t rank) {
    if (work.iterations == 0 || !elect_one()) return;
    mbarrier_wait(&smem.k_empty, work.keys_phase ^ 1);
    Loader::load_k(params, smem, work);
    if constexpr (Traits::kPairs) {
      mbarrier_wait(&smem.k_other_empty, work.keys_phase ^ 1);
      load_other_keys(params, smem, work, rank);
    }
    mbarrier_wait(&smem.v_empty, work.keys_phase ^ 1);
    Loader::load_v(params, smem, work);
  }

  // Dynamic dispatch: the CTA of rank 0 takes a work tile from the counter and sends its index to the other CTA.
  static __device__ __forceinline__ int32_t take_tile(const KernelParams& params, SharedStorage& smem, int32_t rank,
                                                      uint32_t taken) {
    if (WorkTile::kStaggers && params.schedule.dispatch == Dispatch::kStatic) {
      return static_tile(params.schedule, blockIdx.x / Traits::kCtas, taken);
    }
    if (!Traits::kPairs) return atomicAdd(params.tiles_taken, 1);
    int32_t tile;
    if (rank == 0) {
      tile = atomicAdd(params.tiles_taken, 1);
      mbarrier_wait(&smem.tile_empty, ~taken % 2);
      store_to_cta(&smem.tile, &smem.tile_full, 1, tile);
    } else {
      mbarrier_arrive_expect(&smem.tile_full, sizeof(smem.tile));
      mbarrier_wait(&smem.tile_full, taken % 2);
      tile = smem.tile;
      if (tile >= 0) mbarrier_arrive_in_cta(&smem.tile_empty, 0);  // always true, but needs the value: it has been read
    }
    return tile;
  }

  // Loads the other CTA's keys, in the columns of dq that this CTA adds.
  static __device__ __forceinline__ void load_other_keys(const KernelParams& params, SharedStorage& smem,
                                                         const WorkTile& work, int32_t rank) {
    Loader::template load_tile<Traits::kOtherAtoms, Traits::kKeyAtomBytes>(
        &params.maps.k, &smem.k_other_full, smem.k_other, Loader::key_row(work) + other_keys<Traits>(rank),
        work.head_kv, Loader::batch_k(params, work), 0, Traits::first_other_atom(rank));
  }

  static __device__ __forceinline__ void store_dq_of_tile(const KernelParams& params, SharedStorage& smem,
                                                          const WorkTile& work, int32_t rank, int32_t adder,
                                                          int32_t& count, uint32_t& phases) {
    using DqRing = Ring<Traits::kDqBuffers>;
    DqAdd add;
    for (typename WorkTile::Iterator it(work); it.index < it.end; it.advance(work)) {
      const BlockRange atoms = Traits::atoms_of(rank, it.query_block());
      if (it.index % kDqAdders != adder) {
        count += atoms.size();
        continue;
      }
      const DqRows rows = dq_rows(params, work, it.head(), it.query_block() * Traits::kBlockM);
      next_add<Traits>(params, add, work, rank, it.head(), it.query_block(), listed_entry(it));
      // Counted adds may wait for the adds before them while dq is not ready yet.
      if (params.schedule.counts_adds()) begin_add(params, add);
#pragma unroll 1
      for (int32_t atom = atoms.begin; atom < atoms.end; ++atom, ++count) {
        const int32_t buffer = DqRing::stage(count);
        mbarrier_wait(&smem.dq_full[adder][buffer], phases >> buffer & 1);
        phases ^= 1u << buffer;
        fence_async_shared();  // TMA sees what the barrier has shown to this thread
        if (atom == atoms.begin && !params.schedule.counts_adds()) begin_add(params, add);
#pragma unroll 1
        for (int32_t box = 0; box < 2; ++box) {
          add_dq_box(params, smem.dq[buffer][box], atom * kAtomColumns + box * 32, rows, add.stores);
        }
        bulk_commit();
        bulk_wait_read<0>();
        mbarrier_arrive(&smem.dq_empty[buffer]);
      }
    }
    finish_add(params, add);
  }
};

}  // namespace flashbwd::sm90::large_head_dim

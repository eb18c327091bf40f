// How the fp32 dq of an iteration reaches the accumulator. Each consumer warpgroup writes its part to a buffer in
// shared memory (DqHandover). A store warp, which owns the buffer and every other iteration, adds it with TMA
// (StoreWarps). docs/kernels/attention_sm90.md, "The order of dq adds", explains the last add to a tile, which may
// write dq.
#pragma once

#include "../../common/ordered.cuh"
#include "../pre_post/dq_boxes.cuh"
#include "dq_semaphores.cuh"
#include "kernel_params.h"
#include "traits.cuh"

namespace flashbwd::sm90 {

// The consumers' half. `c` is the consumer warpgroup (Mainloop).
template <typename Traits>
struct DqHandover {
  // Waits for the buffer of this iteration. Returns true if this is the last add to its tile: then the buffer holds
  // the sums of the earlier adds. The answer arrives while products run.
  template <typename Consumer>
  static __device__ __forceinline__ bool wait_buffer(const Consumer& c, int32_t index) {
    if constexpr (!Traits::kLastWritesDq) return false;
    const int32_t buffer = index % kStoreWarps;
    named_barrier_sync(kDqEmptyBarrier + 2 * buffer + c.warpgroup, kDqEmptyThreads);
    const bool is_last = mbarrier_test(&c.smem.sums_full[buffer], c.last_turns >> buffer & 1);
    c.last_turns ^= static_cast<uint32_t>(is_last) << buffer;
    return is_last;
  }

  // Writes dq to the buffer of this iteration when the store warp has released it.
  template <typename Consumer, int kValues>
  static __device__ __forceinline__ void write(const Consumer& c, float (&dq)[kValues], int32_t index, bool is_last) {
    fence_registers(dq);
    const int32_t buffer = index % kStoreWarps;
    if constexpr (!Traits::kLastWritesDq) {
      named_barrier_sync(kDqEmptyBarrier + 2 * buffer + c.warpgroup, kDqEmptyThreads);
    }
    if (Traits::kLastWritesDq && is_last) {
      finish(c, dq, c.smem.dq[buffer][c.warpgroup]);
    } else {
      store_dq_boxes(c.smem.dq[buffer][c.warpgroup], dq, columns(c), c.warp, c.lane);
    }
    named_barrier_arrive(kDqFullBarrier + buffer, kDqFullThreads);
  }

 private:
  // Columns of the head dimension from the first one of this warpgroup's part of dq on.
  template <typename Consumer>
  static __device__ __forceinline__ int32_t columns(const Consumer& c) {
    return c.params.attention.head_dim - c.warpgroup % Traits::kDqColumnParts * 64;
  }

  // Adds the sums of the earlier adds and writes dq in 16 bits: one chunk of 64 columns in place of the first box. A
  // warp overwrites only its own rows.
  template <typename Consumer, int kValues>
  static __device__ __forceinline__ void finish(const Consumer& c, float (&dq)[kValues], float (*boxes)[64 * 32]) {
    add_dq_boxes(dq, boxes, columns(c), c.warp, c.lane);
#pragma unroll
    for (float& value : dq) value *= c.params.gradient_scale;
    __syncwarp();
    stage_16bit<typename Traits::T, 64 * kChunkRowBytes, 0, 1>(reinterpret_cast<uint8_t*>(boxes), dq);
  }
};

template <typename Traits>
struct StoreWarps {
  using SharedStorage = typename Traits::SharedStorage;
  using WorkTile = typename Traits::WorkTile;
  using Iterator = typename WorkTile::Iterator;
  static constexpr int kBlockM = Traits::kBlockM;

  // One of kStoreWarps warps: it has one of the buffers of dq and every other iteration.
  template <int kBuffer>
  static __device__ void store_dq(const KernelParams& params, SharedStorage& smem, int32_t lane) {
    for_each_work_tile(smem, [&](const WorkTile& work) {
      store_dq_of_tile<kBuffer>(params, smem, work, lane);
      if (lane == 0 && (!Traits::kLastWritesDq || !params.schedule.last_add_writes_dq)) {
        bulk_wait<0>();  // the adds of this work tile are complete
        fence_async_global();
        add_release(params.dq.finished + work.batch * params.attention.heads_kv + work.head_kv, 1);
      }
      __syncwarp();
    });
    if (lane == 0) bulk_wait<0>();
  }

 private:
  static __device__ __forceinline__ int32_t adds_before(const ListIterator& step) { return step.entry.adds_before; }
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
    Iterator step(work);
    for (; step.index < (Traits::kLastWritesDq ? work.first_index + work.iterations : step.end); advance(step)) {
      if (step.index % kStoreWarps != kBuffer) continue;
      bool writes_dq = false;
      if constexpr (Traits::kLastWritesDq) {
        writes_dq = offer_in_turn<kBuffer>(params, smem, work, step, lane);
      } else {
        offer_buffer<kBuffer>(lane);
        if (lane == 0) {
          change_turns<Traits>(params, turn, work, 0, step.head(), step.query_block(), adds_before(step));
          // Counted adds may wait for their turn before dq is ready.
          if (params.schedule.counts_adds()) begin_turn(params, turn);
        }
      }
      named_barrier_sync(kDqFullBarrier + kBuffer, kDqFullThreads);
      if (lane == 0) {
        fence_async_shared();  // TMA sees what the barrier has shown to this thread
        if (!Traits::kLastWritesDq && !params.schedule.counts_adds()) begin_turn(params, turn);
        if (is_alone()) {
#pragma unroll
          for (int part = 0; part < kConsumerWarpgroups; ++part) {
            if (writes_dq) {
              store_dq16(params, smem.dq[kBuffer][part], work, step, part);
            } else {
              add_dq(params, smem.dq[kBuffer][part], work, step, part, turn.stores);
            }
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
      next = next_turn<Traits>(params, work, 0, step.head(), step.query_block());
      number_turn<Traits>(params, work, step.query_block(), next);
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
    uint32_t& last_adds = smem.last_adds[kBuffer];
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
    const int32_t slab = (any ? work.batch : params.attention.batch) * params.attention.heads + step.head();
#pragma unroll
    for (int box = 0; box < 4; ++box) {
      const int part = box / 2;  // of a warpgroup
      tensor_load_3d(&params.maps.dq_accumulator, &smem.sums_full[kBuffer], smem.dq[kBuffer][part][box % 2],
                     part % Traits::kDqColumnParts * 64 + box % 2 * 32,
                     step.query_block() * kBlockM + part / Traits::kDqColumnParts * 64, slab);
    }
  }

  // Called by the warp: the sums need not be written to memory any more.
  static __device__ __forceinline__ void drop_sums(const KernelParams& params, const WorkTile& work,
                                                   const Iterator& step, int32_t lane) {
    const AttentionBackwardParams& p = params.attention;
    const int32_t row = step.query_block() * kBlockM, rows = min(kBlockM, p.seqlen_q - row);
    const int32_t slab = work.batch * p.heads + step.head();
    const float* const sums = params.dq.accumulator + (int64_t{slab} * p.seqlen_q + row) * params.dq.row_stride;
    discard_lines(sums, rows * params.dq.row_stride, lane);
  }

  // `part`: the consumer warpgroup that wrote these boxes.
  static __device__ __forceinline__ void store_dq16(const KernelParams& params, const float (*boxes)[64 * 32],
                                                    const WorkTile& work, const Iterator& step, int part) {
    const int32_t column = part % Traits::kDqColumnParts * 64;
    const int32_t row = step.query_block() * kBlockM + part / Traits::kDqColumnParts * 64;
    if (column < params.attention.head_dim) {
      tensor_store_4d(&params.maps.dq, boxes, column, row, step.head(), work.batch);
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

  static __device__ __forceinline__ void add_dq(const KernelParams& params, const float (*boxes)[64 * 32],
                                                const WorkTile& work, const Iterator& step, int part, bool stores) {
    const int32_t row = step.query_block() * kBlockM + part / Traits::kDqColumnParts * 64;
    if (row >= work.sequence.seqlen_q) return;
    const DqRows rows = dq_rows(params, work, step.head(), row);
#pragma unroll
    for (int box = 0; box < 2; ++box) {
      add_dq_box(params, boxes[box], part % Traits::kDqColumnParts * 64 + box * 32, rows, stores);
    }
  }
};

}  // namespace flashbwd::sm90

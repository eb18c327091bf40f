// The path of fp32 dq: a consumer warpgroup writes its elements to a buffer in shared memory (DqBuffer), and a store
// warp adds it to the accumulator with TMA (StoreWarps). docs/kernels/attention_sm90.md: "The order of dq adds".
#pragma once

#include "../../common/ordered.cuh"
#include "dq_boxes.cuh"
#include "dq_semaphores.cuh"
#include "kernel_params.h"
#include "traits.cuh"

namespace flashbwd::sm90 {

// The parities that a consumer thread expects next at the barriers of the dq buffers. Each warp waits on its own: a
// named barrier would also make the warps of a warpgroup wait for one another.
struct DqPhases {
  uint32_t bits = 0;  // bit `buffer`: dq_empty; bit kDqAdders + `buffer`: sums_full

  __device__ __forceinline__ void wait_empty(uint64_t (&dq_empty)[kDqAdders], int32_t buffer) {
    mbarrier_wait(&dq_empty[buffer], bits >> buffer & 1);
    bits ^= 1u << buffer;
  }
  // True if the buffer holds the sums of earlier adds.
  __device__ __forceinline__ bool take_sums(uint64_t (&sums_full)[kDqAdders], int32_t buffer) {
    const bool full = mbarrier_test(&sums_full[buffer], bits >> (kDqAdders + buffer) & 1);
    bits ^= static_cast<uint32_t>(full) << (kDqAdders + buffer);
    return full;
  }
};

// The consumers' half. `c` is the consumer warpgroup (Mainloop).
template <typename Traits>
struct DqBuffer {
  // Waits for the buffer of this iteration. Returns true if this is the last add to its tile: then the buffer holds
  // the sums of the earlier adds. The answer arrives while products run.
  template <typename Consumer>
  static __device__ __forceinline__ bool wait_buffer(const Consumer& c, int32_t index) {
    if constexpr (!Traits::kLastWritesDq) return false;
    const int32_t buffer = index % kDqAdders;
    c.dq_phases.wait_empty(c.smem.dq_empty, buffer);
    return c.dq_phases.take_sums(c.smem.sums_full, buffer);
  }

  // Writes dq to the buffer of this iteration when the store warp has released it.
  template <typename Consumer, int kValues>
  static __device__ __forceinline__ void write(const Consumer& c, float (&dq)[kValues], int32_t index, bool is_last) {
    fence_registers(dq);
    const int32_t buffer = index % kDqAdders;
    if constexpr (!Traits::kLastWritesDq) c.dq_phases.wait_empty(c.smem.dq_empty, buffer);
    if constexpr (Traits::kMeetsAtDq) {
      named_barrier_sync(kWarpgroupBarrier + c.warpgroup, kWarpgroupThreads);
    }
    if (Traits::kLastWritesDq && is_last) {
      finish(c, dq, c.smem.dq[buffer][c.warpgroup]);
    } else {
      store_dq_boxes(c.smem.dq[buffer][c.warpgroup], dq, columns(c), c.warp, c.lane);
    }
    named_barrier_arrive(kDqFullBarrier + buffer, kDqFullThreads);
  }

 private:
  // Columns of the head dimension from this warpgroup's first column of dq on.
  template <typename Consumer>
  static __device__ __forceinline__ int32_t columns(const Consumer& c) {
    return c.params.attention.head_dim - c.warpgroup % Traits::kDqColumnTiles * 64;
  }

  // Adds the sums of the earlier adds and writes dq in 16 bits: one atom of 64 columns, which replaces the first box. A
  // warp overwrites only its own rows.
  template <typename Consumer, int kValues>
  static __device__ __forceinline__ void finish(const Consumer& c, float (&dq)[kValues], float (*boxes)[64 * 32]) {
    add_dq_boxes(dq, boxes, columns(c), c.warp, c.lane);
#pragma unroll
    for (float& value : dq) value *= c.params.gradient_scale;
    __syncwarp();
    stage_16bit<typename Traits::T, 64 * kAtomRowBytes, 0, 1>(reinterpret_cast<uint8_t*>(boxes), dq);
  }
};

template <typename Traits>
struct StoreWarps {
  using SharedStorage = typename Traits::SharedStorage;
  using WorkTile = typename Traits::WorkTile;
  using Iterator = std::conditional_t<WorkTile::kListed && Traits::kLastWritesDq, SmallListIterator<WorkTile>,
                                      typename WorkTile::Iterator>;
  static constexpr int kBlockM = Traits::kBlockM;
  // Buffers that dv and dk of a work tile fill: at most one per store warp.
  static constexpr int kPasses = Traits::kBatchEntries * (Traits::kGradientsShareBuffer ? 1 : 2);
  static_assert(kPasses <= kDqAdders, "a store warp has at most one pass");

  // Store warp kBuffer handles the iterations with index % kDqAdders == kBuffer, in dq buffer kBuffer.
  template <int kBuffer>
  static __device__ void store_dq(const KernelParams& params, SharedStorage& smem, int32_t lane) {
    for_each_work_tile(smem, [&](const WorkTile& work) {
      store_dq_of_tile<kBuffer>(params, smem, work, lane);
      if (lane == 0 && (!Traits::kLastWritesDq || !params.schedule.last_add_writes_dq)) {
        bulk_wait<0>();  // the adds of this work tile are complete
        fence_async_global();
        add_release(params.dq.finished + work.batch * params.attention.heads_kv + work.head_kv, 1);
        if constexpr (Traits::kBatchEntries > 1) {
          if (work.batch + 1 < params.attention.batch) {
            add_release(params.dq.finished + (work.batch + 1) * params.attention.heads_kv + work.head_kv, 1);
          }
        }
      }
      __syncwarp();
    });
    if (lane == 0) bulk_wait<0>();
  }

 private:
  // The index after the last iteration; read again by the kernel that has no registers left.
  static __device__ __forceinline__ int32_t past_index(const WorkTile& work, const Iterator& it) {
    if constexpr (Traits::kLastWritesDq) {
      return work.first_index + work.iterations;
    } else {
      return it.end;
    }
  }

  template <int kBuffer>
  static __device__ __forceinline__ void store_dq_of_tile(const KernelParams& params, SharedStorage& smem,
                                                          const WorkTile& work, int32_t lane) {
    DqAdd add_of_lane;
    DqAdd& add = Traits::kLastWritesDq ? smem.adds[kBuffer] : add_of_lane;  // that kernel has no registers left
    if (Traits::kLastWritesDq && lane == 0) add = DqAdd();
    const auto advance = [&](Iterator& it) {
      if constexpr (Traits::kLastWritesDq) {
        it.advance_rereading(work);
      } else {
        it.advance(work);
      }
    };
    Iterator it(work);
    for (; it.index < past_index(work, it); advance(it)) {
      if (it.index % kDqAdders != kBuffer) continue;
      bool writes_dq = false;
      if constexpr (Traits::kLastWritesDq) {
        writes_dq = offer_in_order<kBuffer>(params, smem, work, it, lane);
      } else {
        offer_buffer<kBuffer>(smem, lane);
        if (lane == 0) {
          next_add<Traits>(params, add, work, 0, it.head(), it.query_block(), listed_entry(it));
          // Counted adds may wait for the adds before them while dq is not ready yet.
          if (params.schedule.counts_adds()) begin_add(params, add);
        }
      }
      named_barrier_sync(kDqFullBarrier + kBuffer, kDqFullThreads);
      if (lane == 0) {
        fence_async_shared();  // TMA sees what the barrier has shown to this thread
        if (!Traits::kLastWritesDq && !params.schedule.counts_adds()) begin_add(params, add);
        if (assume_single_lane()) {
#pragma unroll
          for (int warpgroup = 0; warpgroup < kConsumerWarpgroups; ++warpgroup) {
            if (writes_dq) {
              store_dq16(params, smem.dq[kBuffer][warpgroup], work, it, warpgroup);
            } else {
              add_dq(params, smem.dq[kBuffer][warpgroup], work, it, warpgroup, add.stores);
            }
          }
          bulk_commit();
        }
      }
      __syncwarp();
    }
    // dv and dk pass through the buffers of dq, as if they were dq of one or two more iterations.
    const int pass = past_index(work, it) % kDqAdders == kBuffer ? 0 : 1;
    const bool stores_dkdv = work.tma_dkdv && pass < kPasses;
    if (stores_dkdv) offer_buffer<kBuffer>(smem, lane);
    if (lane == 0) finish_add(params, add);
    if (stores_dkdv) store_dkdv<kBuffer>(params, smem, work, lane, pass);
  }

  // Stores what the consumers have passed in the buffer: dv and dk of batch entry `pass` if they share it, else dv in
  // pass 0 or dk in pass 1.
  template <int kBuffer>
  static __device__ __forceinline__ void store_dkdv(const KernelParams& params, SharedStorage& smem,
                                                    const WorkTile& work, int32_t lane, int pass) {
    named_barrier_sync(kDqFullBarrier + kBuffer, kDqFullThreads);
    if (lane == 0) {
      fence_async_shared();
      if (assume_single_lane()) {
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          const float (*const boxes)[64 * 32] = smem.dq[kBuffer][part];
          if constexpr (Traits::kGradientsShareBuffer) {
            store_part(&params.maps.dv, boxes[0], params, work, part, pass);
            store_part(&params.maps.dk, boxes[1], params, work, part, pass);
          } else {
            store_part(pass == 0 ? &params.maps.dv : &params.maps.dk, boxes[0], params, work, part, 0);
          }
        }
        bulk_commit();
      }
    }
    __syncwarp();
  }

  // Called by a store warp: offers its buffer to the consumers when TMA has read what was in it.
  template <int kBuffer>
  static __device__ __forceinline__ void offer_buffer(SharedStorage& smem, int32_t lane) {
    if (lane == 0) {
      bulk_wait_read<0>();
      mbarrier_arrive(&smem.dq_empty[kBuffer]);
    }
    __syncwarp();
  }

  // Like offer_buffer, for counted adds: returns when the adds before this one are complete. Returns true if this is
  // the last add and it writes dq; the sums of the earlier adds are then in the buffer.
  template <int kBuffer>
  static __device__ __forceinline__ bool offer_in_order(const KernelParams& params, SharedStorage& smem,
                                                        const WorkTile& work, const Iterator& it, int32_t lane) {
    DqAdd& add = smem.adds[kBuffer];
    DqAdd next;
    if (lane == 0 && params.dq.semaphores != nullptr) {
      next = add_of_tile<Traits>(params, work, 0, it.head(), it.query_block());
      count_adds_before<Traits>(params, work, it.query_block(), next, listed_entry(it));
    }
    if (!__any_sync(0xffffffffu, next.is_last)) {
      offer_buffer<kBuffer>(smem, lane);
      if (lane == 0) {
        finish_add(params, add);
        if (next.semaphore >= 0) await_adds_before(params, next);
        add = next;
      }
      return false;
    }
    uint32_t& last_adds = smem.last_adds[kBuffer];
    if (lane == 0) {
      bulk_wait_read<0>();
      const bool open = load_acquire(params.dq.semaphores + next.semaphore) >= next.required;
      if (open && assume_single_lane()) load_sums<kBuffer>(params, smem, work, it, next.required > 0);
      finish_add(params, add);
      if (!open) {
        await_adds_before(params, next);
        if (assume_single_lane()) load_sums<kBuffer>(params, smem, work, it, true);
      }
      add.semaphore = -1;  // no other add waits for the last one
    }
    mbarrier_wait(&smem.sums_full[kBuffer], last_adds % 2);
    __syncwarp();
    if (lane == 0) ++last_adds;
    offer_buffer<kBuffer>(smem, lane);
    drop_sums(params, work, it, lane);
    return true;
  }

  // Called by one thread. `any`: there are earlier adds; else TMA loads zeros from past the end of the accumulator.
  template <int kBuffer>
  static __device__ __forceinline__ void load_sums(const KernelParams& params, SharedStorage& smem,
                                                   const WorkTile& work, const Iterator& it, bool any) {
    fence_async_global();  // TMA sees the adds that are complete
    mbarrier_arrive_expect(&smem.sums_full[kBuffer], sizeof(smem.dq[kBuffer]));
    const int32_t slab = (any ? work.batch : params.attention.batch) * params.attention.heads + it.head();
#pragma unroll
    for (int box = 0; box < 4; ++box) {
      const int warpgroup = box / 2;
      tensor_load_3d(&params.maps.dq_accumulator, &smem.sums_full[kBuffer], smem.dq[kBuffer][warpgroup][box % 2],
                     warpgroup % Traits::kDqColumnTiles * 64 + box % 2 * 32,
                     it.query_block() * kBlockM + warpgroup / Traits::kDqColumnTiles * 64, slab);
    }
  }

  // Called by the warp: drops the lines of the sums, which are no longer needed, from L2 before they are written back.
  static __device__ __forceinline__ void drop_sums(const KernelParams& params, const WorkTile& work, const Iterator& it,
                                                   int32_t lane) {
    const AttentionBackwardParams& p = params.attention;
    const int32_t row = it.query_block() * kBlockM, rows = min(kBlockM, p.seqlen_q - row);
    const int32_t slab = work.batch * p.heads + it.head();
    const float* const sums = params.dq.accumulator + (int64_t{slab} * p.seqlen_q + row) * params.dq.row_stride;
    discard_lines(sums, rows * params.dq.row_stride, lane);
  }

  // `warpgroup`: the consumer warpgroup that wrote these boxes.
  static __device__ __forceinline__ void store_dq16(const KernelParams& params, const float (*boxes)[64 * 32],
                                                    const WorkTile& work, const Iterator& it, int warpgroup) {
    const int32_t column = warpgroup % Traits::kDqColumnTiles * 64;
    const int32_t row = it.query_block() * kBlockM + warpgroup / Traits::kDqColumnTiles * 64;
    if (column < params.attention.head_dim) {
      tensor_store_4d(&params.maps.dq, boxes, column, row, it.head(), work.batch);
    }
  }

  // Stores 64 keys of a gradient, the first or the second half of the key block.
  static __device__ __forceinline__ void store_part(const CUtensorMap* map, const float* atoms,
                                                    const KernelParams& params, const WorkTile& work, int part,
                                                    int entry) {
    const int32_t row = work.first_key + part * 64;
    if (row >= work.sequence.rows_k) return;
    const bool packed = params.attention.cu_seqlens_k != nullptr;
#pragma unroll
    for (int atom = 0; atom < Traits::kGradientAtoms; ++atom) {
      tensor_store_4d(map, atoms + atom * 64 * 32, atom * kAtomColumns,
                      static_cast<int32_t>(work.sequence.begin_k) + row, work.gradient_head,
                      packed ? 0 : work.batch + entry);
    }
  }

  static __device__ __forceinline__ void add_dq(const KernelParams& params, const float (*boxes)[64 * 32],
                                                const WorkTile& work, const Iterator& it, int warpgroup, bool stores) {
    constexpr bool kEntries = Traits::kBatchEntries > 1;  // each warpgroup has dq of one; TMA drops it past the last
    const int32_t row = it.query_block() * kBlockM + (kEntries ? 0 : warpgroup / Traits::kDqColumnTiles * 64);
    if (row >= work.sequence.seqlen_q) return;
    const DqRows rows = dq_rows(params, work, it.head() + (kEntries ? warpgroup * params.attention.heads : 0), row);
#pragma unroll
    for (int box = 0; box < 2; ++box) {
      add_dq_box(params, boxes[box], warpgroup % Traits::kDqColumnTiles * 64 + box * 32, rows, stores);
    }
  }
};

}  // namespace flashbwd::sm90

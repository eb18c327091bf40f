// The order of adds to a dq tile, by a semaphore (Schedule::dq_order). Each CTA of a cluster adds its own columns
// and has a semaphore of its own.
// docs/kernels/attention_sm90.md, "The order of dq adds", says what the semaphore counts in each order.
#pragma once

#include "../../common/hopper.cuh"
#include "../../common/ordered.cuh"
#include "kernel_params.h"
#include "tile_scheduler.cuh"

namespace flashbwd::sm90 {

// Where the dq tile of an iteration lies in the accumulator, as TensorMaps::dq_accumulator counts.
struct DqRows {
  int32_t row, slab;
};

template <typename WorkTile>
__device__ __forceinline__ DqRows dq_rows(const KernelParams& params, const WorkTile& work, int32_t head,
                                          int32_t query) {
  const int32_t heads = params.attention.heads;
  if (params.attention.cu_seqlens_q == nullptr) return {query, work.batch * heads + head};
  // Packed: all heads of a sequence are one run of rows.
  return {query + static_cast<int32_t>(work.sequence.begin_q) * heads + head * work.sequence.rows_q, 0};
}

// Called by one thread: adds 64 rows and 32 columns of dq, or stores them.
inline __device__ void add_dq_box(const KernelParams& params, const float* box, int32_t column, const DqRows& rows,
                                  bool stores) {
  if (column >= params.attention.head_dim) return;
  if (stores) {
    tensor_store_3d(&params.maps.dq_accumulator, box, column, rows.row, rows.slab);
  } else {
    tensor_reduce_add_3d(&params.maps.dq_accumulator, box, column, rows.row, rows.slab);
  }
}

// The add to the dq tile of an iteration, and its position in the order of adds.
struct DqAdd {
  int32_t semaphore = -1;  // index; -1: no other add waits for this one
  int32_t required = 0;    // value of the semaphore at which the add may begin
  bool may_begin = true;
  bool stores = false;   // the tile is stored instead of added to
  bool is_last = false;  // the last add to the tile, which writes dq
};

// The entry of an iteration, if a block mask lists it.
template <typename Iterator>
__device__ __forceinline__ QueryBlockEntry listed_entry(const Iterator& it) {
  if constexpr (std::is_same_v<Iterator, QueryIterator>) {
    return {};
  } else {
    return it.entry;
  }
}

// The number of adds to dq tile `query_block` before that of `work`. `key_blocks` attend to the tile.
template <typename WorkTile>
__device__ __forceinline__ int32_t adds_before(const KernelParams& params, const WorkTile& work, int32_t query_block,
                                               const BlockRange& key_blocks) {
  if (WorkTile::kStaggers && params.schedule.query_blocks_apart > 0) {
    return adds_before_in_ring(work.in_wave, query_block, params.schedule.query_blocks_apart,
                               params.schedule.query_blocks);
  }
  const int32_t key_block = work.first_key / WorkTile::kKeys;
  if (!WorkTile::kByHeads && params.schedule.mirrored_pairs) {  // heads are outermost in windows only
    return adds_before_in_pairs(work.in_wave, work.second, key_blocks.end, params.schedule.key_blocks);
  }
  return work.reversed ? adds_before_descending(key_blocks, key_block) : adds_before_ascending(key_blocks, key_block);
}

template <typename Traits>
__device__ __forceinline__ DqAdd add_of_tile(const KernelParams& params, const typename Traits::WorkTile& work,
                                             int32_t rank, int32_t head, int32_t query_block) {
  const int32_t tile = (work.batch * params.attention.heads + head) * params.schedule.query_blocks + query_block;
  DqAdd add;
  add.semaphore = tile * Traits::kSemaphores + rank;  // less than the rows of q, so it fits in 32 bits
  return add;
}

// Fills in the number of adds before this one. Only if Schedule::counts_adds().
template <typename Traits>
__device__ __forceinline__ void count_adds_before(const KernelParams& params, const typename Traits::WorkTile& work,
                                                  int32_t query_block, DqAdd& add, const QueryBlockEntry& listed) {
  bool is_last;
  if constexpr (Traits::WorkTile::kListed) {
    add.required = work.reversed ? listed.adds_after() : listed.adds_before();
    is_last = (work.reversed ? listed.adds_before() : listed.adds_after()) == 0;
  } else {
    const Visibility& v = work.visibility;
    const int32_t first_query = query_block * Traits::kBlockM;
    const int32_t past_query = min(first_query + Traits::kBlockM, v.seqlen_q);
    constexpr int kKeys = Traits::WorkTile::kKeys;
    // index/visibility.h, key_blocks, for a tile that sees a key
    const BlockRange key_blocks = {max(first_query + v.lo, 0) / kKeys,
                                   (min(past_query - 1 + v.hi, v.seqlen_k) - 1) / kKeys + 1};
    add.required = adds_before(params, work, query_block, key_blocks);
    is_last = add.required == key_blocks.size() - 1;
  }
  add.stores = add.required == 0 && !params.dq.starts_at_zero;
  if constexpr (Traits::kLastWritesDq) {
    add.is_last = params.schedule.last_add_writes_dq && is_last;
    if (params.schedule.dq_order == DqOrder::kFirstAndLast && !add.is_last) add.required = min(add.required, 1);
  }
}

enum SemaphoreState : int32_t { kNoAdd, kArrived, kStored };  // of unordered adds; finish_add adds 1 to kArrived

// Called by the adding thread: publishes its add when everything that it has written is complete.
inline __device__ void finish_add(const KernelParams& params, const DqAdd& add) {
  if (add.semaphore < 0) return;
  bulk_wait<0>();
  fence_async_global();
  add_release(params.dq.semaphores + add.semaphore, 1);
}

// Called by the adding thread: publishes its add and checks whether the next one may begin. The semaphore is read
// before the add is complete, so the latencies overlap; one fence serves both.
template <typename Traits>
__device__ __forceinline__ void next_add(const KernelParams& params, DqAdd& add, const typename Traits::WorkTile& work,
                                         int32_t rank, int32_t head, int32_t query_block,
                                         const QueryBlockEntry& listed) {
  if (params.dq.semaphores == nullptr) return;
  const bool counts = params.schedule.counts_adds();
  DqAdd next = add_of_tile<Traits>(params, work, rank, head, query_block);
  int32_t seen;
  if (counts) {
    seen = load_relaxed(params.dq.semaphores + next.semaphore);
    count_adds_before<Traits>(params, work, query_block, next, listed);
  } else {
    seen = load_acquire(params.dq.semaphores + next.semaphore);
    next.required = kStored;
  }
  const bool finishes = add.semaphore >= 0;
  if (finishes) {
    bulk_wait<0>();
    fence_async_global();
  }
  if (finishes || counts) fence_acq_rel();
  if (finishes) add_relaxed(params.dq.semaphores + add.semaphore, 1);
  next.may_begin = seen == next.required;
  add = next;
}

// Called by the adding thread if adds are counted: returns when the adds that this one waits for are complete. With
// DqOrder::kFirstAndLast, others may have added too. docs/kernels/attention_sm90.md: "Why no wait lasts forever".
inline __device__ void await_adds_before(const KernelParams& params, const DqAdd& add) {
  while (load_acquire(params.dq.semaphores + add.semaphore) < add.required) __nanosleep(32);
  fence_async_global();  // earlier adds, seen through the semaphore, come before ours
}

// Called by the adding thread: returns when the add may begin; if adds are unordered, decides whether it stores. The
// thread has published its previous add, so nothing waits for it. docs: "Why no wait lasts forever".
inline __device__ void begin_add(const KernelParams& params, DqAdd& add) {
  if (add.semaphore < 0) return;
  int32_t* const semaphore = params.dq.semaphores + add.semaphore;
  if (params.schedule.counts_adds()) {
    if (!add.may_begin) return await_adds_before(params, add);
  } else {
    add.stores = !add.may_begin && atomicMax(semaphore, kArrived) == kNoAdd;
    if (add.stores) return;
    if (!add.may_begin) {
      while (load_acquire(semaphore) != kStored) __nanosleep(32);
    }
    add.semaphore = -1;
  }
  fence_async_global();  // earlier adds, seen through the semaphore, come before ours
}

}  // namespace flashbwd::sm90

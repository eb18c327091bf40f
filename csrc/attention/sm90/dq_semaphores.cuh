// The order of adds to a dq tile, by a semaphore for each part of the tile (Schedule::dq_order).
//
// kUnordered: the first key block to arrive stores, so that no zeros are needed there; the others add once the store is
// complete, in any order. The semaphore is 0, then 1 from the first arrival on, then 2 when the store is complete. A
// key block arrives only when its dq is ready, so it waits for no other before it stores.
//
// kOrdered: the semaphore counts adds, and an add waits for its turn (index/dq_order.h).
//
// A block mask lists how many adds come before each add (QueryBlockEntry::adds_before).
//
// kLastArriver: the semaphore counts adds. The first add stores; the others wait for it, the last one for all.
//
// If the last add writes dq, the store warp loads the sums so far into the buffer of dq before the consumers write to
// it. They add these sums to theirs and write 16-bit numbers, which are stored to dq.
//
// A semaphore answers in about a microsecond. Adds take as long to complete, and so does the fence between them and the
// semaphore: together more than an iteration. So two threads add, an iteration each. A thread without other work reads
// the next semaphore before its own adds are complete; one that also offers buffers reads it afterwards.
#pragma once

#include "../../common/hopper.cuh"
#include "../../common/ordered.cuh"
#include "kernel_params.h"
#include "tile_scheduler.cuh"

namespace flashbwd::sm90 {

// A thread's place in the order of adds to the dq tile of an iteration.
struct DqTurn {
  int32_t semaphore = -1;  // index; -1: no other add waits for this one
  int32_t number = 0;      // value of the semaphore when the turn comes
  bool open = true;        // the turn has come
  bool stores = false;     // the tile is stored instead of added to
  bool is_last = false;    // the last add to the tile, which writes dq
};

// How many adds to query tile `query_block` come before that of `work`. `key_blocks` see the tile.
template <typename WorkTile>
__device__ __forceinline__ int32_t adds_before(const KernelParams& params, const WorkTile& work, int32_t query_block,
                                               const BlockRange& key_blocks) {
  if (WorkTile::kStaggers && params.schedule.query_blocks_apart > 0) {
    return ring_turn(work.in_wave, query_block, params.schedule.query_blocks_apart);
  }
  const int32_t key_block = work.first_key / WorkTile::kKeys;
  if (!WorkTile::kByHeads && params.schedule.mirrored_pairs) {  // heads are outermost in windows only
    return pair_turn(work.in_wave, work.second, key_blocks.end, params.schedule.key_blocks);
  }
  // As reversed_turn and ordered_turn in index/dq_order.h, from bounds that the caller has.
  return work.reversed ? key_blocks.end - 1 - key_block : key_block - key_blocks.begin;
}

template <typename Traits>
__device__ __forceinline__ DqTurn next_turn(const KernelParams& params, const typename Traits::WorkTile& work,
                                            int32_t part, int32_t head, int32_t query_block) {
  const int32_t tile = (work.batch * params.attention.heads + head) * params.schedule.query_blocks + query_block;
  DqTurn turn;
  turn.semaphore = tile * Traits::kSemaphores + part;  // less than the rows of q, so it fits in 32 bits
  return turn;
}

// If adds are counted.
template <typename Traits>
__device__ __forceinline__ void number_turn(const KernelParams& params, const typename Traits::WorkTile& work,
                                            int32_t query_block, DqTurn& turn, int32_t listed_adds = 0) {
  if constexpr (Traits::WorkTile::kListed) {
    turn.number = listed_adds;
    turn.stores = turn.number == 0 && !params.dq.starts_at_zero;
    return;
  }
  const Visibility& v = work.visibility;
  const int32_t first_query = query_block * Traits::kBlockM;
  const int32_t past_query = min(first_query + Traits::kBlockM, v.seqlen_q);
  constexpr int kKeys = Traits::WorkTile::kKeys;
  // index/visibility.h, key_blocks, for a tile that sees a key
  const BlockRange key_blocks = {max(first_query + v.lo, 0) / kKeys,
                                 (min(past_query - 1 + v.hi, v.seqlen_k) - 1) / kKeys + 1};
  turn.number = adds_before(params, work, query_block, key_blocks);
  turn.stores = turn.number == 0 && !params.dq.starts_at_zero;
  if constexpr (Traits::kLastWritesDq) {
    turn.is_last = params.schedule.last_add_writes_dq && turn.number == key_blocks.size() - 1;
    if (params.schedule.dq_order == DqOrder::kLastArriver && !turn.is_last) turn.number = min(turn.number, 1);
  }
}

// By the thread that adds: everything that it has written is complete, so the next turn may begin.
inline __device__ void finish_turn(const KernelParams& params, const DqTurn& turn) {
  if (turn.semaphore < 0) return;
  bulk_wait<0>();
  fence_async_global();
  add_release(params.dq.semaphores + turn.semaphore, 1);
}

// By the thread that adds: finishes its turn and reads whether the next one has come. The answer arrives while the adds
// complete, and one fence serves both.
template <typename Traits>
__device__ __forceinline__ void change_turns(const KernelParams& params, DqTurn& turn,
                                             const typename Traits::WorkTile& work, int32_t part, int32_t head,
                                             int32_t query_block, int32_t listed_adds = 0) {
  if (params.dq.semaphores == nullptr) return;
  const bool counts = params.schedule.counts_adds();
  DqTurn next = next_turn<Traits>(params, work, part, head, query_block);
  int32_t seen;
  if (counts) {
    seen = load_relaxed(params.dq.semaphores + next.semaphore);
    number_turn<Traits>(params, work, query_block, next, listed_adds);
  } else {
    seen = load_acquire(params.dq.semaphores + next.semaphore);
    next.number = 2;
  }
  const bool finishes = turn.semaphore >= 0;
  if (finishes) {
    bulk_wait<0>();
    fence_async_global();
  }
  if (finishes || counts) fence_acq_rel();
  if (finishes) add_relaxed(params.dq.semaphores + turn.semaphore, 1);
  next.open = seen == next.number;
  turn = next;
}

// By the same thread, if adds are counted: returns when the turn has come.
inline __device__ void await_turn(const KernelParams& params, const DqTurn& turn) {
  while (load_acquire(params.dq.semaphores + turn.semaphore) < turn.number) __nanosleep(32);
  fence_async_global();  // earlier adds, seen through the semaphore, come before ours
}

// By the same thread, when it has something to add: returns when it may.
inline __device__ void begin_turn(const KernelParams& params, DqTurn& turn) {
  if (turn.semaphore < 0) return;
  int32_t* const semaphore = params.dq.semaphores + turn.semaphore;
  if (params.schedule.counts_adds()) {
    if (!turn.open) {
      while (load_acquire(semaphore) != turn.number) __nanosleep(32);
    }
  } else {
    turn.stores = !turn.open && atomicMax(semaphore, 1) == 0;
    if (turn.stores) return;
    if (!turn.open) {
      while (load_acquire(semaphore) != 2) __nanosleep(32);
    }
    turn.semaphore = -1;
  }
  fence_async_global();  // earlier adds, seen through the semaphore, come before ours
}

}  // namespace flashbwd::sm90

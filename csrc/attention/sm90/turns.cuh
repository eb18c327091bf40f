// Who stores and who adds to a part of a dq tile, and when.
//
// Ordinary: whoever comes first stores, so that nobody needs zeros there; the others add when the store is complete, in
// any order. A semaphore is 0, 1 from the first coming on, 2 when the store is complete. A store is announced when dq
// of the step is there: who is first waits for nobody, so nobody waits for long.
//
// Deterministic: key blocks take turns (schedule.h, ordered accumulation, waves); a semaphore counts turns. Key blocks
// wait only for key blocks whose jobs were taken earlier, or in waves for those that come to the tile by themselves.
//
// A semaphore answers in about a microsecond, adds take as long to complete, and so does the fence between them and the
// semaphore: together more than a step. So two threads add, a step each, and a semaphore is asked before the turn of
// the step before is over.
#pragma once

#include "../../common/hopper.cuh"
#include "../../common/ordered.cuh"
#include "../schedule.h"
#include "kernel_params.h"

namespace flashbwd::sm90 {

struct Turn {
  int32_t semaphore = -1;  // its number; -1: nobody waits for this one
  int32_t number = 0;      // what the semaphore is when it comes
  bool open = true;        // it has come
  bool stores = false;     // it writes the tile instead of adding to it
};

// By the thread that adds, when it has nothing to add yet: which turn is next. `seen`: what its semaphore is, which in
// turn the thread may not rely on before a fence.
template <typename Traits>
__device__ __forceinline__ Turn look_ahead(const KernelParams& params, const typename Traits::Work& work, int32_t part,
                                           int32_t head, int32_t query_block, int32_t& seen) {
  const int32_t tile = (work.batch * params.attention.heads + head) * params.query_blocks + query_block;
  Turn turn;
  turn.semaphore = tile * Traits::kSemaphores + part;  // less than the rows of q: 32 bits
  if (params.attention.deterministic) {
    seen = load_relaxed(params.semaphores + turn.semaphore);
    // The key blocks before this one that the tile sees: ordered_turn_from_last, or ordered_turn of a group of 1.
    const Visibility& v = work.visibility;
    const int32_t first_query = query_block * Traits::kBlockM;
    const int32_t past_query = min(first_query + Traits::kBlockM, v.seqlen_q);
    constexpr int kKeys = Traits::Work::kKeys;
    const int32_t key_block = work.first_key / kKeys;
    int32_t before;
    if (work.cyclic) {
      before = cyclic_turn(work.ring, work.starts, query_block - work.tiles.begin);
    } else {
      const int32_t seen = (min(past_query - 1 + v.hi, v.seqlen_k) - 1) / kKeys + 1;
      if (params.wave_size > 0) {
        before = pair_turn(work.abreast, work.ring, work.starts, work.second, head - work.first_head, seen,
                           params.key_blocks);
      } else {
        before = work.from_last_key ? seen - 1 - key_block : key_block - max(first_query + v.lo, 0) / kKeys;
      }
    }
    turn.number = before;
    turn.stores = before == 0 && !params.adds_into_zeros;
  } else {
    seen = load_acquire(params.semaphores + turn.semaphore);
    turn.number = 2;
  }
  return turn;
}

// By the same thread: all that it has written is complete, others may begin.
inline __device__ void finish_turn(const KernelParams& params, const Turn& turn) {
  if (turn.semaphore < 0) return;
  bulk_wait<0>();
  fence_async_global();
  add_release(params.semaphores + turn.semaphore, 1);
}

// By the same thread: the same, and has the next turn come? The answer arrives while the adds before complete; one
// fence does for both.
template <typename Traits>
__device__ __forceinline__ void change_turns(const KernelParams& params, Turn& turn, const typename Traits::Work& work,
                                             int32_t part, int32_t head, int32_t query_block) {
  if (params.semaphores == nullptr) return;
  int32_t seen;
  Turn next = look_ahead<Traits>(params, work, part, head, query_block, seen);
  const bool finishes = turn.semaphore >= 0;
  if (finishes) {
    bulk_wait<0>();
    fence_async_global();
  }
  if (finishes || params.attention.deterministic) fence_acq_rel();
  if (finishes) add_relaxed(params.semaphores + turn.semaphore, 1);
  next.open = seen == next.number;
  turn = next;
}

// By the same thread, when it has something to add: returns when it may.
inline __device__ void begin_turn(const KernelParams& params, Turn& turn) {
  if (turn.semaphore < 0) return;
  int32_t* const semaphore = params.semaphores + turn.semaphore;
  if (params.attention.deterministic) {
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
  fence_async_global();  // adds of the turn before, seen through the semaphore, come before ours
}

}  // namespace flashbwd::sm90

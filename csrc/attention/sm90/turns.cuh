// Who stores and who adds to a part of a dq tile, and when.
//
// Ordinary: whoever comes first stores, so that nobody needs zeros there; the others add when the store is complete, in
// any order. A semaphore is 0, 1 from the first coming on, 2 when the store is complete. A store is announced when dq
// of the step is there: who is first waits for nobody, so nobody waits for long.
//
// Deterministic: key blocks take turns (schedule.h, ordered accumulation, waves); a semaphore counts turns. Key blocks
// wait only for key blocks whose jobs were taken earlier, or in waves for those that come to the tile by themselves.
//
// Where the last one writes dq (Traits::kLastWritesDq, takes_turns), adds take turns in ordinary runs too, but those
// between the first and the last come in any order: the first stores, the others wait for that, the last for all. Its
// buffer is offered with the sums so far in it; consumers add them to theirs and write 16 bit, which is stored as dq.
//
// A semaphore answers in about a microsecond, adds take as long to complete, and so does the fence between them and the
// semaphore: together more than a step. So two threads add, a step each. One that has no other work meanwhile asks a
// semaphore before the turn of the step before is over; one that numbers turns and offers buffers first asks behind it.
#pragma once

#include "../../common/hopper.cuh"
#include "../../common/ordered.cuh"
#include "../schedule.h"
#include "kernel_params.h"

namespace flashbwd::sm90 {

// In turn: how many key blocks add to a tile before that of `work` does.
template <typename Traits>
__device__ __forceinline__ int32_t adds_before(const KernelParams& params, const typename Traits::Work& work,
                                               const BlockRange& key_blocks, int32_t head, int32_t query_block) {
  const int32_t key_block = work.first_key / Traits::Work::kKeys;
  if (!Traits::Work::kByHeads) {  // which is of windows
    if (work.cyclic) return cyclic_turn(work.ring, work.starts, query_block - work.tiles.begin);
    if (params.grouped.pairs) {
      constexpr bool kRotates = Traits::kRotatesHeads && Traits::kLastWritesDq;  // others have no registers left
      return pair_turn(work.abreast, work.second, key_blocks.end, params.key_blocks, head - work.first_head,
                       kRotates && work.heads_apart);
    }
  }
  // ordered_turn_from_last, or ordered_turn of a group of 1
  return work.from_last_key ? key_blocks.end - 1 - key_block : key_block - key_blocks.begin;
}

// By the thread that adds: which turn is next.
template <typename Traits>
__device__ __forceinline__ Turn next_turn(const KernelParams& params, const typename Traits::Work& work, int32_t part,
                                          int32_t head, int32_t query_block) {
  const int32_t tile = (work.batch * params.attention.heads + head) * params.query_blocks + query_block;
  Turn turn;
  turn.semaphore = tile * Traits::kSemaphores + part;  // less than the rows of q: 32 bits
  return turn;
}

// In turn: its number.
template <typename Traits>
__device__ __forceinline__ void number_turn(const KernelParams& params, const typename Traits::Work& work, int32_t head,
                                            int32_t query_block, Turn& turn) {
  const Visibility& v = work.visibility;
  const int32_t first_query = query_block * Traits::kBlockM;
  const int32_t past_query = min(first_query + Traits::kBlockM, v.seqlen_q);
  constexpr int kKeys = Traits::Work::kKeys;
  const BlockRange key_blocks = {max(first_query + v.lo, 0) / kKeys,  // that see the tile
                                 (min(past_query - 1 + v.hi, v.seqlen_k) - 1) / kKeys + 1};
  turn.number = adds_before<Traits>(params, work, key_blocks, head, query_block);
  turn.stores = turn.number == 0 && !params.adds_into_zeros;
  if constexpr (Traits::kLastWritesDq) {
    turn.is_last = params.last_writes_dq && turn.number == key_blocks.size() - 1;
    if (params.any_order && !turn.is_last) turn.number = min(turn.number, 1);
  }
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
  const bool in_turn = params.attention.deterministic;
  Turn next = next_turn<Traits>(params, work, part, head, query_block);
  int32_t seen;
  if (in_turn) {
    seen = load_relaxed(params.semaphores + next.semaphore);
    number_turn<Traits>(params, work, head, query_block, next);
  } else {
    seen = load_acquire(params.semaphores + next.semaphore);
    next.number = 2;
  }
  const bool finishes = turn.semaphore >= 0;
  if (finishes) {
    bulk_wait<0>();
    fence_async_global();
  }
  if (finishes || in_turn) fence_acq_rel();
  if (finishes) add_relaxed(params.semaphores + turn.semaphore, 1);
  next.open = seen == next.number;
  turn = next;
}

// By the same thread, in turn: returns when it has come.
inline __device__ void await_turn(const KernelParams& params, const Turn& turn) {
  while (load_acquire(params.semaphores + turn.semaphore) < turn.number) __nanosleep(32);
  fence_async_global();  // adds of the turns before, seen through the semaphore, come before ours
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

// Who stores and who adds to a part of a dq tile, and when.
//
// Ordinary: whoever comes first stores, so that nobody needs zeros there; the others add when the store is complete, in
// any order. A semaphore is 0, 1 from the first coming on, 2 when the store is complete. It is asked for when dq of the
// step is there: who is first waits for nobody, so nobody waits for long.
//
// Deterministic: key blocks take turns (schedule.h, ordered accumulation); a semaphore counts turns. Key blocks wait
// only for key blocks before them, whose jobs were taken earlier.
#pragma once

#include "../../common/hopper.cuh"
#include "../schedule.h"
#include "kernel_params.h"

namespace flashbwd::sm90 {

struct Turn {
  int32_t semaphore = -1;  // its number; -1: nobody waits for this one
  int32_t next = 0;        // what the semaphore becomes when it is over
  bool stores = false;     // it writes the tile instead of adding to it
};

// By the thread that adds: waits until it may.
template <typename Traits>
__device__ Turn begin_turn(const KernelParams& params, const typename Traits::Work& work, int32_t part, int32_t head,
                           int32_t query_block) {
  if (params.semaphores == nullptr) return {};
  const int32_t tile = (work.batch * params.attention.heads + head) * params.query_blocks + query_block;
  const int32_t place = tile * Traits::kDqParts + part;  // less than the rows of q: 32 bits
  int32_t* const semaphore = params.semaphores + place;
  Turn turn;
  if (params.attention.deterministic) {
    // ordered_turn of a group of 1: the key blocks before this one that the tile sees.
    const int32_t number =
        work.key_block - max(query_block * Traits::kBlockM + work.visibility.lo, 0) / Traits::kBlockN;
    while (load_acquire(semaphore) != number) __nanosleep(32);
    turn = {place, number + 1, number == 0 && !params.adds_into_zeros};
  } else {
    if (load_acquire(semaphore) != 2) {
      if (atomicMax(semaphore, 1) == 0) return {place, 2, true};
      while (load_acquire(semaphore) != 2) __nanosleep(32);
    }
  }
  fence_async_global();  // adds of the turn before, seen through the semaphore, come before ours
  return turn;
}

// By the same thread: all that it has written is complete, others may begin.
inline __device__ void finish_turn(const KernelParams& params, const Turn& turn) {
  if (turn.semaphore < 0) return;
  bulk_wait<0>();
  fence_async_global();
  store_release(params.semaphores + turn.semaphore, turn.next);
}

}  // namespace flashbwd::sm90

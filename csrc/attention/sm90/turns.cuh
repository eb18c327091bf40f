// Deterministic: the adds into a part of a dq tile happen in turn (schedule.h, ordered accumulation). Key blocks wait
// only for key blocks before them, whose CTAs were launched earlier.
#pragma once

#include "../../common/hopper.cuh"
#include "../schedule.h"
#include "kernel_params.h"

namespace flashbwd::sm90 {

struct Turn {
  int32_t* semaphore = nullptr;  // null: adds happen in any order
  int32_t number = 0;
};

// By the thread that adds: waits until it may.
template <typename Traits>
__device__ Turn begin_turn(const KernelParams& params, const typename Traits::Work& work, int32_t part, int32_t head,
                           int32_t query_block) {
  if (params.semaphores == nullptr) return {};
  Turn turn;
  const int64_t tile = (int64_t{work.batch} * params.attention.heads + head) * params.query_blocks + query_block;
  turn.semaphore = params.semaphores + tile * Traits::kDqParts + part;
  // ordered_turn of a group of 1: the key blocks before this one that the tile sees.
  turn.number = work.key_block - max(query_block * Traits::kBlockM + work.visibility.lo, 0) / Traits::kBlockN;
  while (load_acquire(turn.semaphore) != turn.number) __nanosleep(32);
  fence_async_global();  // adds of the turn before, seen through the semaphore, come before ours
  return turn;
}

// By the same thread: all of its bulk adds are complete, the next may begin.
inline __device__ void finish_turn(const Turn& turn) {
  if (turn.semaphore == nullptr) return;
  bulk_wait<0>();
  fence_async_global();
  store_release(turn.semaphore, turn.number + 1);
}

}  // namespace flashbwd::sm90

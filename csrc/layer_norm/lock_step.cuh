// Workers that keep together.
#pragma once

#include <climits>

#include "arguments.h"

namespace flashbwd::layer_norm {

// Holds back a worker that is ahead of the mean of all.
//
// SMs do not get equal shares of a saturated memory, and a kernel is as slow as its last worker. Held to the mean, fast
// SMs leave the memory to slow ones. Only time depends on it: a worker that waits too long for others, which may not
// run yet, waits no more.
//
// How far all are is asked for a row before it is needed: an answer may take as long as half a row's turn.
struct LockStep {
  static constexpr int kMostPolls = 1000;
  static constexpr int kFree = INT_MAX;
  int begun;  // rounds of all workers, as of the row before

  // One lane of a group asks; the others wait for it where they exchange.
  __device__ LockStep(const BackwardArguments& a, bool first_of_group, int rank)
      : begun(a.progress != nullptr && rank == 0 && first_of_group ? 0 : kFree) {}

  // `round`: of this worker, from 1 on.
  __device__ void hold(const BackwardArguments& a, int round) {
    if (begun == kFree) return;
    const int least = a.schedule.workers * round - a.schedule.ahead;
    for (int polls = 0; begun < least; ++polls) begun = polls < kMostPolls ? ask(a) : kFree;
    if (threadIdx.x == 0) atomicAdd(a.progress, 1);
    if (begun != kFree) begun = ask(a);
  }

 private:
  static __device__ int ask(const BackwardArguments& a) {
    int begun;
    asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];\n" : "=r"(begun) : "l"(a.progress) : "memory");
    return begun;
  }
};

}  // namespace flashbwd::layer_norm

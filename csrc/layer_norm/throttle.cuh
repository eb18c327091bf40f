// Throttles workers that run ahead of the others.
#pragma once

#include <climits>

#include "arguments.h"

namespace flashbwd::layer_norm {

// Makes a worker wait while it is too far ahead of the mean of all workers. SMs get unequal shares of a saturated
// memory, and the kernel ends with its slowest worker. Throttling fast SMs leaves bandwidth to slow ones.
struct Throttle {
  // Other workers may not be resident, so after this number of polls a worker stops throttling for good. It then
  // also stops counting its rounds, so the others soon stop as well.
  static constexpr int kMostPolls = 1000;
  static constexpr int kFree = INT_MAX;
  // The value of a.progress, or kFree to never wait again. It is loaded one iteration before it is needed, since the
  // load takes up to half an iteration.
  int begun;

  // Only one lane of each group in the row's first CTA waits in hold(). The other threads wait for it in the exchange.
  __device__ Throttle(const BackwardArguments& a, bool first_of_group, int rank)
      : begun(a.progress != nullptr && rank == 0 && first_of_group ? 0 : kFree) {}

  // `round`: this worker's current round, starting at 1.
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

// Workers that keep together.
#pragma once

#include "arguments.h"
#include "device.cuh"

namespace flashbwd::layer_norm {

// Holds back a worker that is more than `ahead` rounds ahead of the mean of all.
//
// SMs do not get equal shares of a saturated memory, and rows that are neighbours in memory are read cheapest close to
// each other in time. Held to the mean, fast SMs leave the memory to slow ones, and all stay within a few rows. Only
// time depends on it: a worker that waits too long for others, which may not run yet, waits no more.
//
// One thread of a worker asks how far all are, in the global memory; the other groups of its CTA are told in shared
// memory.
struct LockStep {
  static constexpr int kMostPolls = 1000;
  enum class Role { kNone, kAsks, kListens };
  Role role = Role::kNone;
  int least;  // rounds of all that must have begun before this worker's next may

  __device__ LockStep(const BackwardArguments& a, bool first_of_group, int rank) : least(-a.schedule.ahead) {
    if (a.progress != nullptr && rank == 0 && first_of_group) role = threadIdx.x == 0 ? Role::kAsks : Role::kListens;
  }

  // A round begins; returns how many of all workers have. Called before that is needed.
  __device__ int begin(const BackwardArguments& a) const {
    if (role != Role::kAsks) return 0;
    atomicAdd(a.progress, 1);
    return ask(a);
  }

  // `told`: where a CTA's groups are told, 4 bytes of shared memory, zero at first.
  __device__ void hold(const BackwardArguments& a, uint32_t told, int begun) {
    least += a.schedule.workers;
    if (role == Role::kNone) return;
    for (int polls = 0; polls <= kMostPolls; ++polls) {
      if (role == Role::kAsks) {
        asm volatile("st.volatile.shared.b32 [%0], %1;\n" ::"r"(told), "r"(begun) : "memory");
      } else {
        asm volatile("ld.volatile.shared.b32 %0, [%1];\n" : "=r"(begun) : "r"(told) : "memory");
      }
      if (begun >= least) return;
      if (role == Role::kAsks) begun = ask(a);
    }
    role = Role::kNone;
  }

 private:
  static __device__ int ask(const BackwardArguments& a) {
    int begun;
    asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];\n" : "=r"(begun) : "l"(a.progress) : "memory");
    return begun;
  }
};

}  // namespace flashbwd::layer_norm

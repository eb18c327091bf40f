// A barrier of all threads of a CTA with separate arrive and wait. Between the two, a warp does work that depends on no
// other warp.
#pragma once

#include <cstdint>

#include "../../common/mma.cuh"

namespace flashbwd::sm80 {

struct SplitBarrier {
  uint64_t state;

  // Called by one thread, before a barrier of all threads.
  __device__ __forceinline__ void init(uint32_t threads) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(smem_address(&state)), "r"(threads) : "memory");
  }
  // Called by every thread, because compute-sanitizer's racecheck orders only the thread that arrives. A thread's
  // earlier writes are visible to every thread after wait().
  __device__ __forceinline__ void arrive() {
    asm volatile("{\n.reg .b64 phase;\nmbarrier.arrive.shared.b64 phase, [%0];\n}" ::"r"(smem_address(&state))
                 : "memory");
  }
  // Waits until all threads have arrived for the phase of this parity. Phases have parity 0, 1, 0, ... A wait for
  // parity 1 returns at once on a new barrier.
  __device__ __forceinline__ void wait(uint32_t parity) const {
    asm volatile(
        "{\n"
        ".reg .pred over;\n"
        "WAIT:\n"
        "mbarrier.test_wait.parity.shared.b64 over, [%0], %1;\n"
        "@!over bra WAIT;\n"
        "}" ::"r"(smem_address(&state)),
        "r"(parity)
        : "memory");
  }
};

}  // namespace flashbwd::sm80

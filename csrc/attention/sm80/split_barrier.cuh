// A barrier of all warps of a CTA in two parts: between arriving and waiting a warp does what needs nobody.
#pragma once

#include <cstdint>

#include "../../common/mma.cuh"

namespace flashbwd::sm80 {

struct SplitBarrier {
  uint64_t state;

  // By one thread, before a barrier of all.
  __device__ __forceinline__ void init(uint32_t threads) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(smem_address(&state)), "r"(threads) : "memory");
  }
  // By every thread: racecheck takes an arrival for that of the thread alone. Whoever waits sees what it has written.
  __device__ __forceinline__ void arrive() {
    asm volatile("{\n.reg .b64 phase;\nmbarrier.arrive.shared.b64 phase, [%0];\n}" ::"r"(smem_address(&state))
                 : "memory");
  }
  // Until all threads have arrived for the phase of this parity: 0, 1, 0, ... Parity 1 of a fresh barrier is over.
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

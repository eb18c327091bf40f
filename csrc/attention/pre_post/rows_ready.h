// The flags that an overlapped preprocess sets when it has written lse and delta, as the main kernel reads them.
// RowsReadyWriter in launch.h describes the same flags for the preprocess.
#pragma once

#include <cstdint>

#include "../index/arithmetic.h"

#if defined(__CUDACC__)
#include "../../common/hopper.cuh"
#include "../../common/ordered.cuh"
#endif

namespace flashbwd {

// 32-bit words of flags, stored after lse and delta: one byte per 128 rows or more, in whole words per head. The
// preprocess clears the flags that it sets, so no other kernel zeroes them.
inline int64_t rows_ready_words(bool packed, int64_t batch, int64_t heads, int64_t seqlen_q) {
  return packed ? 0 : batch * heads * ceil_div(ceil_div(seqlen_q, 128), 4);
}

// Words of four flags each.
struct RowsReadyFlags {
  int32_t* words = nullptr;    // null: the preprocess does not overlap
  int32_t rows_log2 = 0;       // log2 of the rows per flag
  int32_t flags_per_head = 0;  // a multiple of four

#if defined(__CUDACC__)
  // Called by one thread: returns when the rows of flags [first_flag, last_flag] are written. The arguments are
  // references, so that the thread rereads them from shared memory instead of keeping them in registers.
  __device__ __forceinline__ void wait(const int32_t& first_flag, const int32_t& last_flag) const {
    for (int32_t word = first_flag / 4; word <= last_flag / 4; ++word) {
      uint32_t mask = ~0u;
      if (word == first_flag / 4) mask = ~0u << first_flag % 4 * 8;
      if (word == last_flag / 4) mask &= ~0u >> (3 - last_flag % 4) * 8;
      while (~load_relaxed(words + word) & mask) __nanosleep(32);
    }
    __threadfence();       // the flags were read in any order
    fence_async_global();  // makes the rows visible to TMA, which loads them next
  }
#endif
};

}  // namespace flashbwd

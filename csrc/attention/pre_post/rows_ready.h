// The flags by which an overlapped preprocess says that row statistics are written, as the main kernel reads them. The
// preprocess's side is RowsReady in launch.h.
#pragma once

#include <cstdint>

#include "../index/arithmetic.h"

#if defined(__CUDACC__)
#include "../../common/hopper.cuh"
#include "../../common/ordered.cuh"
#endif

namespace flashbwd {

// Floats after the row statistics for the flags: one byte per 128 rows or more, in whole words per head. The preprocess
// clears the flags that it sets, so they need not be zeroed.
inline int64_t rows_ready_words(bool packed, int64_t batch, int64_t heads, int64_t seqlen_q) {
  return packed ? 0 : batch * heads * ceil_div(ceil_div(seqlen_q, 128), 4);
}

// Words of four flags each.
struct PreprocessFlags {
  int32_t* words = nullptr;    // null: the preprocess does not overlap
  int32_t rows_log2 = 0;       // rows per flag
  int32_t flags_per_head = 0;  // a multiple of four

#if defined(__CUDACC__)
  // By one thread: returns when the rows of flags [first_flag, last_flag] are written. References, because the thread
  // has few registers and reads the numbers from shared memory again.
  __device__ __forceinline__ void wait(const int32_t& first_flag, const int32_t& last_flag) const {
    for (int32_t word = first_flag / 4; word <= last_flag / 4; ++word) {
      uint32_t mask = ~0u;
      if (word == first_flag / 4) mask = ~0u << first_flag % 4 * 8;
      if (word == last_flag / 4) mask &= ~0u >> (3 - last_flag % 4) * 8;
      while (~load_relaxed(words + word) & mask) __nanosleep(32);
    }
    __threadfence();       // the flags were read in any order
    fence_async_global();  // TMA sees what this thread sees
  }
#endif
};

}  // namespace flashbwd

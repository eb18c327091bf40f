// What the host hands the kernel: descriptors, numbers, where scratch lies.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "../params.h"
#include "../row_statistics.h"

namespace flashbwd::sm90 {

struct KernelParams {
  CUtensorMap q, k, v, dout;  // (D, rows, heads, batch), boxes of 64 columns and one tile of rows
  // fp32 (D, rows, batch * heads), packed (D, heads * total_q, 1); boxes of 32 columns and 64 rows
  CUtensorMap dq_accumulator;
  AttentionBackwardParams attention;
  RowStatistics statistics;
  int32_t jobs = 0;
  int32_t ctas = 0;               // one a multiprocessor
  int32_t* jobs_taken = nullptr;  // counter in the workspace, 0 at the start
  int32_t key_blocks = 0;         // of the longest sequence
  int32_t head_group = 1;         // KV heads that are worked on abreast, see dense_job
  // Rows past the logical end of a sequence hold other data, not the zeros that the copy engine puts past a tensor.
  bool rows_may_be_poisoned = false;
  bool dk_vectors = false;  // rows of dk can be written 16 bytes at a time
  bool dv_vectors = false;
  // Deterministic: turns taken so far of (batch * heads + head, query block), zeros at the start. Null: adds into dq
  // happen in any order.
  int32_t* semaphores = nullptr;
  int32_t query_blocks = 0;  // of the longest sequence
};

}  // namespace flashbwd::sm90

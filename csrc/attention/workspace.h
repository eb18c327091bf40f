// The layout of attention backward's scratch buffer. Host arithmetic, needs no GPU. In this order:
//
//   accumulator fp32                   sequences back to back, each (heads, seqlen_q, dq_row_stride)
//   semaphores, delta, partials        as the kernel family requests
//   lengths     int32 [2, batch + 1]   varlen only: bounded copies of cu_seqlens_q and cu_seqlens_k
//
// Sequence b starts at row cu_seqlens_q[b] (b * seqlen_q when dense) times heads * dq_row_stride. dq_row_offset in
// index/dq_layout.h gives the address within a sequence.
#pragma once

#include <cstdint>

#include "problem.h"

namespace flashbwd {

constexpr int64_t kLengthsAlignment = 16;       // bytes
constexpr int64_t kAccumulatorAlignment = 256;  // bytes; also the alignment of the workspace

// What a plan requests. Semaphores, delta and partials are each aligned to kAccumulatorAlignment.
struct WorkspaceRequest {
  bool accumulator = false;      // dq is summed in an fp32 accumulator
  bool zero_accumulator = true;  // false if the first key block stores to a tile instead of adding
  bool dq_blocks = false;        // the accumulator is in MMA fragment order, see dq_block_offset in index/dq_layout.h
  bool dq_permuted = false;      // the accumulator's rows are permuted, see permuted_offset in index/dq_layout.h
  int64_t semaphore_bytes = 0;   // zeroed on every launch before the main kernel
  int64_t delta_rows = 0;        // rows of delta and of the scaled LSE together, 4 bytes each
  int64_t partial_bytes = 0;     // dk/dv or dbias partials
};

// Offsets are in bytes from the start of the workspace.
struct WorkspaceLayout {
  bool has_accumulator = false;
  int64_t row_stride = 0;          // floats from one accumulator row to the next
  bool dq_blocks = false;          // 8 x 8 blocks in MMA fragment order, see dq_block_offset in index/dq_layout.h
  bool dq_permuted = false;        // permuted rows, see permuted_offset in index/dq_layout.h
  int64_t accumulator_offset = 0;  // fp32 dq accumulator
  int64_t accumulator_bytes = 0;
  bool zero_accumulator = false;                      // the preprocess zeroes it
  int64_t semaphore_offset = 0, semaphore_bytes = 0;  // bytes rounded up to 16
  int64_t delta_offset = 0, delta_bytes = 0;
  int64_t partial_offset = 0, partial_bytes = 0;
  // int32 bounded cu_seqlens_q[batch + 1], then cu_seqlens_k[batch + 1]; see bounded_lengths.h
  int64_t lengths_offset = 0;
  int64_t lengths_bytes = 0;  // 0 when dense
  int64_t bytes = 0;          // size of the workspace
};

// Throws std::invalid_argument if the request is inconsistent or the size overflows 64 bits.
WorkspaceLayout plan_workspace(const AttentionProblem& problem, const WorkspaceRequest& request);

}  // namespace flashbwd

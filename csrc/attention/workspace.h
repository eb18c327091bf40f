// The layout of attention backward's scratch buffer. Host arithmetic, needs no GPU. In this order:
//
//   nsplits     int32 [batch | 1]      slots per sequence; convert_dq reads it and needs to know no tile size
//   offsets     int64 [batch + 1]      varlen with kSplitSlots only: first accumulator element per sequence, total last
//   accumulator fp32                   sequences back to back, each (heads, nsplits_i, seqlen_q_i, dq_row_stride)
//   semaphores, delta, partials        as the kernel family requests
//   lengths     int32 [2, batch + 1]   varlen only: bounded copies of cu_seqlens_q and cu_seqlens_k
//
// Without an offsets table, sequence b starts at row cu_seqlens_q[b] (b * seqlen_q when dense) times heads * nsplits *
// dq_row_stride. dq_row_offset in schedule.h gives the address within a sequence.
#pragma once

#include <cstdint>
#include <vector>

#include "problem.h"

namespace flashbwd {

// How dq is accumulated.
enum class DqMode : int32_t {
  kDirect,           // the kernel writes dq itself; no accumulator, no tables
  kAtomic,           // one slot, to which every key block adds
  kSplitSlots,       // one slot per key block, summed in order: deterministic
  kPersistentSlots,  // one slot per worker of a head (PersistentSlots), dense only: deterministic
  kOrdered,          // one slot, to which key blocks add in a fixed order: deterministic
};

constexpr int64_t kTableAlignment = 16;         // bytes
constexpr int64_t kAccumulatorAlignment = 256;  // bytes; also the alignment of the workspace

// What a plan requests. Semaphores, delta and partials are each aligned to kAccumulatorAlignment.
struct WorkspaceRequest {
  DqMode dq_mode = DqMode::kDirect;
  int64_t block_n = 0;          // keys per block (kBlockN); for the slot modes
  int64_t sm_count = 0;         // workers of kPersistentSlots
  bool adds_into_zeros = true;  // kAtomic, kOrdered: false if the first key block stores to a tile instead of adding
  bool dq_blocks = false;       // the accumulator is in MMA fragment order, see dq_block_offset in schedule.h
  bool dq_parted = false;       // the accumulator's rows are permuted, see parted_place in schedule.h
  int64_t semaphore_bytes = 0;  // zeroed on every launch before the main kernel
  int64_t delta_rows = 0;       // rows of delta and of the scaled LSE together, 4 bytes each
  int64_t partial_bytes = 0;    // dk/dv or dbias partials
};

// Offsets are in bytes from the start of the workspace.
struct WorkspaceLayout {
  DqMode dq_mode = DqMode::kDirect;
  int64_t block_n = 0;             // as requested
  int64_t tables = 0;              // entries of nsplits: batch for varlen, else 1; 0 for kDirect
  int64_t nsplits_offset = 0;      // int32 nsplits[tables]
  bool has_offsets = false;        // varlen with kSplitSlots
  int64_t offsets_offset = 0;      // int64 dq_acc_offsets[batch + 1]
  int64_t nsplits = 0;             // value of every entry; with offsets, the largest possible value
  int64_t row_stride = 0;          // floats from one accumulator row to the next
  bool dq_blocks = false;          // 8 x 8 blocks in MMA fragment order, see dq_block_offset in schedule.h
  bool dq_parted = false;          // permuted rows, see parted_place in schedule.h
  int64_t accumulator_offset = 0;  // fp32 dq accumulator
  int64_t accumulator_bytes = 0;   // exact if the host knows the lengths, otherwise an upper bound
  bool zero_accumulator = false;   // the used part must be zeroed before the main kernel
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

// What the device writes to the tables for these physical lengths. Tests compare it with workspace_tables.cuh.
struct WorkspaceTables {
  std::vector<int32_t> nsplits;
  std::vector<int64_t> dq_acc_offsets;  // in elements; [0] = 0, last = total; empty without an offsets table
};
WorkspaceTables make_tables(const AttentionProblem& problem, const WorkspaceRequest& request,
                            const std::vector<int64_t>& seqlens_q, const std::vector<int64_t>& seqlens_k);

}  // namespace flashbwd

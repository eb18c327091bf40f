// The one scratch buffer of attention backward: how many bytes, and what lies where. Host arithmetic, no GPU.
//
//   nsplits     int32 [batch | 1]      slots of each sequence; convert_dq reads them and knows nothing of tiles
//   offsets     int64 [batch + 1]      varlen split slots only: first accumulator element of each sequence, total last
//   accumulator fp32                   sequences back to back, each (heads, nsplits_i, seqlen_q_i, dq_row_stride)
//   semaphores, delta, partials        as a kernel family asks
//   lengths     int32 [2, batch + 1]   varlen only: bounded copies of cu_seqlens_q and cu_seqlens_k
//
// Where there is no offsets table, sequence b starts at row cu_seqlens_q[b] (b * seqlen_q when dense) times
// heads * nsplits * dq_row_stride. Addresses within a sequence: dq_row_offset in schedule.h.
#pragma once

#include <cstdint>
#include <vector>

#include "problem.h"

namespace flashbwd {

// How dq is accumulated.
enum class DqMode : int32_t {
  kDirect,           // the kernel writes dq itself: no accumulator, no tables
  kAtomic,           // one slot, added into by every key block
  kSplitSlots,       // a slot for each key block, summed in order: deterministic
  kPersistentSlots,  // a slot for each worker that meets in a head (PersistentSlots), dense only: deterministic
  kOrdered,          // one slot, added into in a fixed order: deterministic
};

constexpr int64_t kTableAlignment = 16;         // bytes
constexpr int64_t kAccumulatorAlignment = 256;  // bytes; also what the workspace itself is aligned to

// What a plan asks for. Semaphores, delta and partials each start kAccumulatorAlignment-aligned.
struct WorkspaceRequest {
  DqMode dq_mode = DqMode::kDirect;
  int64_t block_n = 0;          // keys a block (kBlockN); slot modes
  int64_t sm_count = 0;         // workers of kPersistentSlots
  bool adds_into_zeros = true;  // kAtomic, kOrdered: false where the first add to a tile stores
  bool dq_blocks = false;       // the kernel adds whole MMA accumulators: see dq_block_offset
  bool dq_parted = false;       // the kernel adds rows of parted_place
  int64_t semaphore_bytes = 0;  // zeroed before use, on every launch
  int64_t delta_rows = 0;       // fp32 rows for delta (and for the scaled LSE): 4 bytes each
  int64_t partial_bytes = 0;    // dk/dv or dbias partials
};

// Offsets are bytes from the start of the workspace.
struct WorkspaceLayout {
  DqMode dq_mode = DqMode::kDirect;
  int64_t block_n = 0;             // of the request
  int64_t tables = 0;              // entries of nsplits: batch when varlen, else 1; 0 when kDirect
  int64_t nsplits_offset = 0;      // int32 nsplits[tables]
  bool has_offsets = false;        // varlen split slots
  int64_t offsets_offset = 0;      // int64 dq_acc_offsets[batch + 1]
  int64_t nsplits = 0;             // value of every entry; with offsets, the most that any sequence can have
  int64_t row_stride = 0;          // floats from one accumulator row to the next
  bool dq_blocks = false;          // rows lie in blocks of 8 x 8, see dq_block_offset in schedule.h
  bool dq_parted = false;          // see parted_place there
  int64_t accumulator_offset = 0;  // fp32 dq accumulator
  int64_t accumulator_bytes = 0;   // exact with host lengths, else an upper bound
  bool zero_accumulator = false;   // the part in use has to hold zeros before the kernel adds or stores
  int64_t semaphore_offset = 0, semaphore_bytes = 0;  // bytes rounded up to 16
  int64_t delta_offset = 0, delta_bytes = 0;
  int64_t partial_offset = 0, partial_bytes = 0;
  int64_t lengths_offset = 0;  // int32 bounded cu_seqlens_q[batch + 1], cu_seqlens_k[batch + 1], see bounded_lengths.h
  int64_t lengths_bytes = 0;   // 0 when dense
  int64_t bytes = 0;           // all of it; 0 only when nothing at all is needed
};

// Throws std::invalid_argument for a request without sense and for a workspace that 64 bits cannot count.
WorkspaceLayout plan_workspace(const AttentionProblem& problem, const WorkspaceRequest& request);

// What the device fills the tables with for these physical lengths: the host twin of workspace_tables.cuh, for tests.
struct WorkspaceTables {
  std::vector<int32_t> nsplits;
  std::vector<int64_t> dq_acc_offsets;  // elements; [0] = 0, last = total; empty without an offsets table
};
WorkspaceTables make_tables(const AttentionProblem& problem, const WorkspaceRequest& request,
                            const std::vector<int64_t>& seqlens_q, const std::vector<int64_t>& seqlens_k);

}  // namespace flashbwd

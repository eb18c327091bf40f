// The one scratch buffer of attention backward: how many bytes, and what lies where. Host arithmetic, no GPU.
#pragma once

#include <cstdint>
#include <vector>

#include "problem.h"

namespace flashbwd {

// How dq is accumulated (the rows of the contract's table).
enum class DqMode : int32_t {
  kDirect,           // the kernel writes dq itself: no accumulator
  kAtomic,           // one fp32 slot, added into by every key block (dense and varlen, not deterministic)
  kSplitSlots,       // a slot for each key block, summed in order (dense and varlen, deterministic)
  kPersistentSlots,  // dense, deterministic: slots from the worker count
  kOrdered,          // one fp32 slot, added into in a fixed order
};

constexpr int64_t kTableAlignment = 16;
constexpr int64_t kAccumulatorAlignment = 256;

// Scratch beyond dq that a plan asks for. Each region starts kAccumulatorAlignment-aligned.
struct WorkspaceRequest {
  DqMode dq_mode = DqMode::kDirect;
  int64_t block_n = 0;          // keys a block (kBlockN)
  int64_t sm_count = 0;         // workers of kPersistentSlots
  int64_t semaphore_bytes = 0;  // zeroed before use
  int64_t delta_rows = 0;       // fp32 rows for delta (and for the scaled LSE): rows * 4 bytes each
  int64_t partial_bytes = 0;    // dk/dv or dbias partials
};

struct WorkspaceLayout {
  DqMode dq_mode = DqMode::kDirect;
  int64_t tables = 0;              // entries of nsplits: batch when varlen, else 1; 0 when there is no accumulator
  int64_t nsplits_offset = 0;      // bytes from the start: int32 nsplits[tables]
  int64_t offsets_offset = 0;      // int64 dq_acc_offsets[batch + 1], varlen split slots only
  int64_t accumulator_offset = 0;  // fp32 dq accumulator
  int64_t accumulator_bytes = 0;   // exact with host lengths, else an upper bound
  bool zero_accumulator = false;
  int64_t nsplits = 0;  // dense modes; for varlen split slots the values are in the table
  int64_t semaphore_offset = 0, semaphore_bytes = 0;
  int64_t delta_offset = 0, delta_bytes = 0;
  int64_t partial_offset = 0, partial_bytes = 0;
  int64_t bytes = 0;  // all of it; 0 when nothing is needed
};

WorkspaceLayout plan_workspace(const AttentionProblem& problem, const WorkspaceRequest& request);

// What a kernel fills the tables with, for given physical lengths: the host twin of the device code, for tests.
struct WorkspaceTables {
  std::vector<int32_t> nsplits;
  std::vector<int64_t> dq_acc_offsets;  // elements; [0] = 0, last = total
};
WorkspaceTables make_tables(const AttentionProblem& problem, const WorkspaceRequest& request,
                            const std::vector<int64_t>& seqlens_q, const std::vector<int64_t>& seqlens_k);

}  // namespace flashbwd

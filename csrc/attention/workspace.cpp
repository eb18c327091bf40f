#include "workspace.h"

#include <cstddef>
#include <limits>

#include "../common/check.h"
#include "schedule.h"

namespace flashbwd {
namespace {

[[noreturn]] void too_large() { refuse("the workspace of this problem would need more than 2^63 bytes"); }

int64_t add(int64_t a, int64_t b) {
  int64_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) too_large();
  return sum;
}

int64_t multiply(int64_t a, int64_t b) {
  int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) too_large();
  return product;
}

int64_t round_up_checked(int64_t a, int64_t b) { return add(a, b - 1) / b * b; }

// Allocates aligned regions one after the other. An empty region takes no space, not even for alignment.
class Regions {
 public:
  int64_t take(int64_t bytes, int64_t alignment) {
    if (bytes == 0) return 0;
    const int64_t offset = round_up_checked(end_, alignment);
    end_ = add(offset, bytes);
    return offset;
  }
  int64_t end() const { return end_; }

 private:
  int64_t end_ = 0;
};

void require_at_least(const char* name, int64_t value, int64_t floor) {
  check(value >= floor, "workspace request has ", name, " ", value, ", expected at least ", floor);
}

bool has_offsets_table(const AttentionProblem& problem, DqMode mode) {
  return problem.varlen && mode == DqMode::kSplitSlots;
}

void check_request(const AttentionProblem& problem, const WorkspaceRequest& request) {
  require_at_least("semaphore_bytes", request.semaphore_bytes, 0);
  require_at_least("delta_rows", request.delta_rows, 0);
  require_at_least("partial_bytes", request.partial_bytes, 0);
  if (request.dq_mode == DqMode::kSplitSlots || request.dq_mode == DqMode::kPersistentSlots) {
    require_at_least("block_n", request.block_n, 1);
  }
  if (request.dq_mode == DqMode::kPersistentSlots) {
    require_at_least("sm_count", request.sm_count, 1);
    check(!problem.varlen, "workspace request has persistent dq slots, which only dense inputs can have");
  }
}

// Slots per sequence; with an offsets table, the largest number that a sequence can have.
int64_t uniform_splits(const AttentionProblem& problem, const WorkspaceRequest& request) {
  int64_t splits = 1;
  if (request.dq_mode == DqMode::kDirect) splits = 0;
  if (request.dq_mode == DqMode::kSplitSlots) {
    splits = split_slots(problem.seqlen_k, problem.seqlen_k, request.block_n);
  }
  if (request.dq_mode == DqMode::kPersistentSlots) {
    multiply(multiply(problem.batch, problem.heads), ceil_div(problem.seqlen_k, request.block_n));
    splits = persistent_slots(problem.batch, problem.heads, problem.seqlen_k, request.block_n, request.sm_count)
                 .num_splits();
  }
  if (splits > std::numeric_limits<int32_t>::max()) too_large();  // nsplits is an int32 table
  return splits;
}

// Accumulator rows of all sequences, for one head.
//
// If the host knows the lengths: the exact sum of nsplits_i * seqlen_q_i. Otherwise an upper bound: seqlen_k_i <=
// max_seqlen_k implies nsplits_i <= ceil(max_seqlen_k / block_n) = splits, so the sum is at most splits * total_q.
int64_t accumulator_rows(const AttentionProblem& problem, const WorkspaceRequest& request, int64_t splits) {
  const auto batch = static_cast<size_t>(problem.batch);
  const bool known = problem.seqlens_q.size() == batch && problem.seqlens_k.size() == batch;
  if (!has_offsets_table(problem, request.dq_mode) || !known) return multiply(splits, problem.total_q);
  int64_t rows = 0;
  for (size_t b = 0; b < batch; ++b) {
    const int64_t slots = split_slots(problem.seqlens_k[b], problem.seqlen_k, request.block_n);
    rows = add(rows, multiply(slots, problem.seqlens_q[b]));
  }
  return rows;
}

// Key blocks store to split slots, so zeros are needed only if a key block leaves some rows of its slot unwritten: with
// a mask, or with logical lengths. In the persistent schedule a worker may skip whole slots, so all of them are zeroed.
bool needs_zeros(const AttentionProblem& problem, const WorkspaceRequest& request) {
  switch (request.dq_mode) {
    case DqMode::kDirect:
      return false;
    case DqMode::kSplitSlots:
      return problem.window_left >= 0 || problem.window_right >= 0 || problem.has_seqused;
    case DqMode::kAtomic:
    case DqMode::kOrdered:
      return request.adds_into_zeros;
    default:
      return true;
  }
}

}  // namespace

WorkspaceLayout plan_workspace(const AttentionProblem& problem, const WorkspaceRequest& request) {
  check_request(problem, request);
  WorkspaceLayout layout;
  Regions regions;
  layout.dq_mode = request.dq_mode;
  layout.block_n = request.block_n;
  layout.nsplits = uniform_splits(problem, request);
  if (request.dq_mode != DqMode::kDirect) {
    layout.tables = problem.varlen ? problem.batch : 1;
    layout.nsplits_offset = regions.take(multiply(layout.tables, sizeof(int32_t)), kTableAlignment);
    layout.has_offsets = has_offsets_table(problem, request.dq_mode);
    if (layout.has_offsets) {
      layout.offsets_offset = regions.take(multiply(add(problem.batch, 1), sizeof(int64_t)), kTableAlignment);
    }
    layout.row_stride = round_up_checked(problem.head_dim, 4);  // dq_row_stride with an overflow check
    layout.dq_parted = request.dq_parted;
    layout.dq_blocks = request.dq_blocks && layout.row_stride % kDqBlock == 0;
    const int64_t rows = multiply(problem.heads, accumulator_rows(problem, request, layout.nsplits));
    layout.accumulator_bytes = multiply(multiply(rows, layout.row_stride), sizeof(float));
    layout.accumulator_offset = regions.take(layout.accumulator_bytes, kAccumulatorAlignment);
    layout.zero_accumulator = layout.accumulator_bytes > 0 && needs_zeros(problem, request);
  }
  layout.semaphore_bytes = round_up_checked(request.semaphore_bytes, 16);
  layout.semaphore_offset = regions.take(layout.semaphore_bytes, kAccumulatorAlignment);
  layout.delta_bytes = multiply(request.delta_rows, sizeof(float));
  layout.delta_offset = regions.take(layout.delta_bytes, kAccumulatorAlignment);
  layout.partial_bytes = request.partial_bytes;
  layout.partial_offset = regions.take(layout.partial_bytes, kAccumulatorAlignment);
  if (problem.varlen) layout.lengths_bytes = multiply(multiply(add(problem.batch, 1), 2), sizeof(int32_t));
  layout.lengths_offset = regions.take(layout.lengths_bytes, kTableAlignment);
  layout.bytes = regions.end();
  return layout;
}

WorkspaceTables make_tables(const AttentionProblem& problem, const WorkspaceRequest& request,
                            const std::vector<int64_t>& seqlens_q, const std::vector<int64_t>& seqlens_k) {
  check_request(problem, request);
  WorkspaceTables tables;
  if (request.dq_mode == DqMode::kDirect) return tables;
  const auto splits = static_cast<int32_t>(uniform_splits(problem, request));
  tables.nsplits.assign(static_cast<size_t>(problem.varlen ? problem.batch : 1), splits);
  if (!has_offsets_table(problem, request.dq_mode)) return tables;
  tables.dq_acc_offsets.assign(1, 0);
  for (size_t b = 0; b < tables.nsplits.size(); ++b) {
    tables.nsplits[b] = static_cast<int32_t>(split_slots(seqlens_k.at(b), problem.seqlen_k, request.block_n));
    const int64_t rows = multiply(multiply(problem.heads, tables.nsplits[b]), seqlens_q.at(b));
    const int64_t elements = multiply(rows, dq_row_stride(problem.head_dim));
    tables.dq_acc_offsets.push_back(add(tables.dq_acc_offsets.back(), elements));
  }
  return tables;
}

}  // namespace flashbwd

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

// Hands out aligned regions from the start of the buffer. A region of no bytes takes none, not even alignment.
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
    check(!problem.varlen, "workspace request has persistent dq slots, which dense inputs only can have");
  }
}

// Slots of every sequence; with an offsets table, the most that a sequence can have.
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
// With the lengths of each sequence on the host: the exact sum of nsplits_i * seqlen_q_i. Without them, every
// seqlen_k_i <= max_seqlen_k gives nsplits_i <= ceil(max_seqlen_k / block_n), as ceil ascends, so
//   sum_i nsplits_i * seqlen_q_i <= ceil(max_seqlen_k / block_n) * sum_i seqlen_q_i
//                                <= ceil(max_seqlen_k / block_n) * total_q,
// with equality when all sequences have the same number of key blocks and no row of q lies outside of them. For one
// slot a sequence the bound is total_q, which is what is allocated: rows of q that belong to no sequence stay unused.
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

// Split slots are stored, not added into: zeros are needed only where a key block leaves rows of its slot alone.
// Without mask and with all lengths physical it writes every row; a sequence without keys has no slots and one without
// queries no rows. Workers of a persistent schedule may not meet in every slot, so all of those start at zero.
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
    layout.row_stride = round_up_checked(problem.head_dim, 4);  // dq_row_stride, checked
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

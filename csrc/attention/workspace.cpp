#include "workspace.h"

#include <cstddef>

#include "../common/check.h"
#include "index/arithmetic.h"
#include "index/dq_layout.h"

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

void check_request(const WorkspaceRequest& request) {
  require_at_least("semaphore_bytes", request.semaphore_bytes, 0);
  require_at_least("delta_rows", request.delta_rows, 0);
  require_at_least("partial_bytes", request.partial_bytes, 0);
}

}  // namespace

WorkspaceLayout plan_workspace(const AttentionProblem& problem, const WorkspaceRequest& request) {
  check_request(request);
  WorkspaceLayout layout;
  Regions regions;
  layout.has_accumulator = request.accumulator;
  if (request.accumulator) {
    layout.row_stride = round_up_checked(problem.head_dim, 4);  // dq_row_stride with an overflow check
    layout.dq_permuted = request.dq_permuted;
    layout.dq_blocks = request.dq_blocks && layout.row_stride % kDqBlock == 0;
    const int64_t rows = multiply(problem.heads, problem.total_q);
    layout.accumulator_bytes = multiply(multiply(rows, layout.row_stride), sizeof(float));
    layout.accumulator_offset = regions.take(layout.accumulator_bytes, kAccumulatorAlignment);
    layout.zero_accumulator = layout.accumulator_bytes > 0 && request.zero_accumulator;
  }
  layout.semaphore_bytes = round_up_checked(request.semaphore_bytes, 16);
  layout.semaphore_offset = regions.take(layout.semaphore_bytes, kAccumulatorAlignment);
  layout.delta_bytes = multiply(request.delta_rows, sizeof(float));
  layout.delta_offset = regions.take(layout.delta_bytes, kAccumulatorAlignment);
  layout.partial_bytes = request.partial_bytes;
  layout.partial_offset = regions.take(layout.partial_bytes, kAccumulatorAlignment);
  if (problem.varlen) layout.lengths_bytes = multiply(multiply(add(problem.batch, 1), 2), sizeof(int32_t));
  layout.lengths_offset = regions.take(layout.lengths_bytes, kLengthsAlignment);
  layout.bytes = regions.end();
  return layout;
}

}  // namespace flashbwd

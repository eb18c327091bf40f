// The lengths and the position of one sequence of the batch. Lengths that exceed the limits passed to the host are
// clamped to them, because the host sized grids, semaphores and workspace by these limits. The results are then wrong,
// but every kernel ends and stays inside the tensors. bounded_lengths.h bounds the first rows.
#pragma once

#include <cstdint>

#include "index/visibility.h"
#include "params.h"

namespace flashbwd {

struct Sequence {
  int32_t rows_q = 0;  // physical length: the rows whose gradients must be written
  int32_t rows_k = 0;
  int32_t seqlen_q = 0;  // logical length: the rows that take part in the attention
  int32_t seqlen_k = 0;
  int64_t begin_q = 0;  // first row in packed tensors; 0 when dense
  int64_t begin_k = 0;
};

inline __device__ Sequence load_sequence(const AttentionBackwardParams& params, int32_t batch) {
  Sequence sequence;
  sequence.rows_q = params.seqlen_q;
  sequence.rows_k = params.seqlen_k;
  if (params.cu_seqlens_q != nullptr) {
    sequence.begin_q = params.cu_seqlens_q[batch];
    sequence.rows_q = min(params.cu_seqlens_q[batch + 1] - params.cu_seqlens_q[batch], params.seqlen_q);
  }
  if (params.cu_seqlens_k != nullptr) {
    sequence.begin_k = params.cu_seqlens_k[batch];
    sequence.rows_k = min(params.cu_seqlens_k[batch + 1] - params.cu_seqlens_k[batch], params.seqlen_k);
  }
  sequence.seqlen_q = sequence.rows_q;
  sequence.seqlen_k = sequence.rows_k;
  if (params.seqused_q != nullptr) sequence.seqlen_q = max(min(params.seqused_q[batch], sequence.rows_q), 0);
  if (params.seqused_k != nullptr) sequence.seqlen_k = max(min(params.seqused_k[batch], sequence.rows_k), 0);
  return sequence;
}

inline __device__ Visibility visibility_of(const AttentionBackwardParams& params, const Sequence& sequence) {
  return make_visibility(sequence.seqlen_q, sequence.seqlen_k, params.window_left, params.window_right, params.causal);
}

}  // namespace flashbwd

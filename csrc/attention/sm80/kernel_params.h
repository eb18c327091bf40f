// What the host hands the kernel: the problem, numbers derived from it, where scratch lies.
#pragma once

#include <cstdint>

#include "../bias_gradient.h"
#include "../params.h"
#include "../row_statistics.h"

namespace flashbwd::sm80 {

// Where a CTA stores dk, dv or dq: the gradient itself, or its part of a shared job.
struct GradientTarget {
  HeadsView view;
  float* parts = nullptr;  // (parts, block_n, part_row_stride)
  int64_t part_row_stride = 0;
  DType dtype = DType::kFloat32;
  int32_t columns = 0;
  bool aligned = false;  // two columns can be stored at once
  bool pieces = false;   // 16 bits an element: every eight columns can
};

// Heads that share a bias and add to its gradient in turn: sums of each tile of the gradient, in the order of a CTA's
// registers, and how many heads have added to them. The last one stores the gradient.
struct BiasTurns {
  float* sums = nullptr;
  int32_t* counters = nullptr;
  int32_t sharers = 0;
};

struct KernelParams {
  AttentionBackwardParams attention;
  RowStatistics statistics;
  float* dq_accumulator = nullptr;  // one slot a sequence, see workspace.h
  int64_t dq_row_stride = 0;
  bool dq_blocks = false;    // see dq_block_offset
  int64_t jobs = 0;          // key blocks, shared ones once for each CTA
  int64_t whole_jobs = 0;    // those before the shared ones
  int32_t splits = 1;        // CTAs of a shared job
  bool packed_jobs = false;  // jobs follow cu_seqlens_k, else every sequence has `key_blocks`
  int32_t key_blocks = 0;    // of the longest sequence
  int32_t query_blocks = 0;
  int32_t head_group = 1;        // KV heads that are worked on abreast, see dense_job
  bool batches_abreast = false;  // the same head of all batches, not all heads of a batch
  // Rows that can be copied 16 bytes at a time.
  bool q_aligned = false, k_aligned = false, v_aligned = false, dout_aligned = false;
  GradientTarget dk, dv;

  // Whole heads: a CTA takes all key blocks of a KV head, one after the other, and sums dq in its part of `dq_tiles`,
  // (heads of the group, query_blocks, block_m * columns of the tile) in the order of its threads' registers.
  float* dq_tiles = nullptr;
  GradientTarget dq;
  bool loads_ahead = false;  // see loads_ahead in config.h

  int32_t* jobs_taken = nullptr;  // so far; whole heads: heads
  int32_t workers = 0;            // CTAs, which take them
  // Deterministic: for each (head, query block) how many key blocks have added to its dq. Null: adds happen in any
  // order.
  int32_t* turns = nullptr;
  int64_t turns_of_head = 0;  // query blocks of all sequences

  // First stores: for each (batch, head) a bit a query tile: its dq has been stored, others may add.
  int32_t* stored = nullptr;
  int32_t stored_words = 0;  // of each head

  // Wide tiles: a place for dk and dv of the keys of each CTA.
  float* gradients = nullptr;

  BiasGradient bias_gradient;
  // Of the operands' own 16-bit type, in rows of 16-byte pieces.
  bool bias_pieces = false, bias_gradient_pieces = false;

  float dropout_scale = 1.f;       // of what is kept
  uint32_t dropout_threshold = 0;  // kFlash: bytes up to this one are kept; else 32-bit words from this one on

  BiasTurns bias_turns;
};

}  // namespace flashbwd::sm80

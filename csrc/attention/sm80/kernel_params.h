// The kernel's arguments: the problem, values derived from it, and pointers to scratch memory.
#pragma once

#include <cstdint>

#include "../params.h"
#include "../pre_post/bias_gradient.h"
#include "../pre_post/lse_delta.h"
#include "schedule.h"

namespace flashbwd::sm80 {

// Where a CTA stores dk, dv or dq: to the gradient, or to the CTA's fp32 partial sums if its work tile is split.
struct GradientTarget {
  HeadsView view;
  float* partial_sums = nullptr;  // (CTAs of split work tiles, block_n, partial_row_stride)
  int64_t partial_row_stride = 0;
  DType dtype = DType::kFloat32;
  int32_t columns = 0;
  bool aligned = false;  // rows allow stores of two columns at once
  bool vectors = false;  // the gradient has 16 bits and its rows allow 16-byte stores
};

// Used if heads that share a bias add to its gradient in a fixed order: fp32 sums of each tile, in the order of the
// threads' registers, and a semaphore per tile that counts the heads that have added. The last head stores the
// gradient.
struct OrderedBiasSums {
  float* sums = nullptr;
  int32_t* counters = nullptr;
  int32_t sharers = 0;
};

struct KernelParams {
  AttentionBackwardParams attention;
  LseDelta lse_delta;
  float* dq_accumulator = nullptr;  // one slot per sequence, see workspace.h
  int64_t dq_row_stride = 0;
  bool dq_blocks = false;  // see dq_block_offset in index/dq_layout.h
  Schedule schedule;
  bool swizzle_batches = false;  // a head swizzle group has the same head of all batches, not all heads of a batch
  // True if the rows can be copied 16 bytes at a time.
  bool q_aligned = false, k_aligned = false, v_aligned = false, dout_aligned = false;
  GradientTarget dk, dv;

  // kWholeHeads: dq sums in the order of the threads' registers, one slice per CTA:
  // (num_ctas, heads per KV head, query_blocks, block_m * head_dim of the tile).
  float* dq_tiles = nullptr;
  GradientTarget dq;

  int32_t* work_tile_counter = nullptr;  // number of work tiles taken; kWholeHeads: of KV heads taken
  // Deterministic: a semaphore per (head, query block) that counts the key blocks that have added to its dq. Null: key
  // blocks add in any order.
  int32_t* dq_semaphores = nullptr;
  int64_t semaphores_per_head = 0;  // query blocks of all sequences

  // kFirstStores: a bit per (batch, head, query tile) that says that dq has been stored, so other key blocks may add.
  int32_t* stored = nullptr;
  int32_t stored_words = 0;  // per head

  // Large head dimensions: dk and dv of each CTA's current keys.
  float* gradients = nullptr;

  BiasGradient bias_gradient;
  // True if the tensor has q's 16-bit dtype and its rows can be accessed as 16-byte vectors.
  bool bias_vectors = false, bias_gradient_vectors = false;

  float dropout_scale = 1.f;       // multiplies dp of elements that are kept, and dv after the query loop
  uint32_t dropout_threshold = 0;  // kFlash: bytes up to this one are kept; otherwise 32-bit words from this one on

  OrderedBiasSums ordered_bias_sums;
};

}  // namespace flashbwd::sm80

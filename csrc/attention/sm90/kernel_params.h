// What the host hands the kernel: descriptors, numbers, where scratch lies.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "../auxiliary.h"
#include "../bias_gradient.h"
#include "../params.h"
#include "../row_statistics.h"
#include "grouped.h"
#include "lists.h"

namespace flashbwd::sm90 {

struct KernelParams {
  CUtensorMap q, k, v, dout;  // (D, rows, heads, batch), boxes of 64 columns and one tile of rows
  // fp32 (D, rows, batch * heads), packed (D, heads * total_q, 1); boxes of 32 columns and 64 rows
  CUtensorMap dq_accumulator;
  CUtensorMap dq;      // 16-bit, as q, boxes of 64 rows
  CUtensorMap dk, dv;  // as k and v, boxes of 64 rows
  // Of kernels of a bias: (seqlen_k, seqlen_q, heads, batch), boxes of 64 keys and one tile of rows. Heads and batch
  // are one where the bias has no stride.
  CUtensorMap bias, bias_gradient_map;
  bool copies_dkdv = false;  // the copy engine stores dk and dv
  AttentionBackwardParams attention;
  RowStatistics statistics;
  int32_t jobs = 0;
  GroupedJobs grouped;
  int32_t ctas = 0;               // one a multiprocessor at most
  int32_t* jobs_taken = nullptr;  // counter in the workspace, 0 at the start
  // Work tiles of a wave (schedule.h); 0: there are no waves.
  int32_t wave_size = 0;
  // Of the plan: a CTA may wait for any other, so all of them have to be resident, and work tiles are dealt to them in
  // advance. In tiles of large head dimensions they come from the counter, a wave at a time.
  bool cooperative = false;
  bool by_heads = false;           // jobs go through the query heads of a group one after the other, see Step
  bool last_writes_dq = false;     // who adds last to a tile writes dq
  bool wants_early = false;        // in turn others would wait for a job that is taken and does not begin yet
  int32_t key_blocks = 0;          // of the longest sequence
  int32_t key_blocks_of_list = 0;  // half of them, where a job is a pair
  int32_t head_group = 1;          // KV heads that are worked on abreast, see dense_job
  int32_t heads_abreast = 1;       // query heads of them
  int32_t list_blocks = 0;         // see blocks_of_a_list
  LastRound last_round;
  int32_t whole_jobs = 0;        // that are not cut
  HeadsView parts_dk, parts_dv;  // (heads of a list * parts, rows) fp32; rows count from the start of the sequence
  int32_t jobs_before_last = 0;  // of all lists but the last, see heads_before_last_list
  bool from_last_key = false;    // these go through the key blocks of a head from the last one
  // Rows past the logical end of a sequence hold other data, not the zeros that the copy engine puts past a tensor.
  bool rows_may_be_poisoned = false;
  bool dk_vectors = false;  // rows of dk can be written 16 bytes at a time
  bool dv_vectors = false;
  // Of (batch * heads + head, query block, part of the tile), zeros at the start; see turns.cuh. Null: adds into dq
  // happen in any order, and into zeros.
  int32_t* semaphores = nullptr;
  // Chores: conversion of dq between jobs. 0: a launch of its own converts dq.
  int32_t chores = 0;
  int32_t chores_of_head = 0;  // of batch * heads
  int32_t counts_of_head = 0;  // what the count of a head comes to
  int32_t* chores_taken = nullptr;
  const float* dq_sums = nullptr;
  int32_t dq_sums_stride = 0;    // floats from one row to the next
  bool takes_turns = false;      // see there; `deterministic` is set then
  bool any_order = false;        // of adds to a tile but the first and the last: the call is not deterministic
  bool adds_into_zeros = false;  // of the workspace: the first add to a tile need not store
  int32_t* finished = nullptr;   // see HeadsFinished; a count a store warp or thread
  int32_t counts_a_head = 1;     // or as many as it has key blocks
  // Words of four flags of RowsReady. Null: all row statistics are there from the start.
  int32_t* rows_ready = nullptr;
  int32_t ahead_ctas = 0;  // that write them meanwhile
  int32_t rows_of_flag_log2 = 0;
  int32_t flags_a_head = 0;
  int32_t query_blocks = 0;  // of the longest sequence

  float gradient_scale = 1.f;  // of dq and dk behind the last product

  // Of kernels that take features.
  BiasGradient bias_gradient;
  uint64_t keeps_bias = 0;         // in L2, see hopper.cuh
  float dropout_scale = 1.f;       // of what is kept
  uint32_t dropout_threshold = 0;  // kFlash: bytes up to this one are kept; else 32-bit words from this one on
};

// Key blocks before this one are whole in every head.
inline int64_t first_cut_key_block(const KernelParams& params) {
  return params.key_blocks - params.last_round.jobs / params.head_group;
}

}  // namespace flashbwd::sm90

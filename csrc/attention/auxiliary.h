// The launches around an attention main kernel, shared by the kernel families.
#pragma once

#include "params.h"
#include "row_statistics.h"
#include "workspace.h"

namespace flashbwd {

// Compute capability 9.0 and later: dq of a head is converted when its key blocks have been added, on multiprocessors
// that the main kernel has left, while the rest of that kernel runs.
struct HeadsFinished {
  int32_t* counts = nullptr;         // (batch, heads_kv), zeros at the start; null: conversion follows the main kernel
  int32_t counts_per_key_block = 0;  // that the main kernel adds behind its adds to dq
  int32_t block_n = 0;
};

// Compute capability 9.0 and later: the main kernel begins while row statistics are still being written, and waits for
// those that it needs.
struct RowsReady {
  uint8_t* flags = nullptr;  // (batch * heads, flags_a_head), kRowsReady: a block of rows is; null: all rows come first
  int32_t flags_a_head = 0;  // a multiple of 4, at least the blocks of rows
  int32_t heads_abreast = 1;  // query heads that the main kernel works on at the same time
  int32_t first_blocks = 0;   // of rows, that all multiprocessors write before the main kernel has them
  int32_t first_ctas = 0;     // these; no fewer than those that go on
  int32_t ctas = 0;           // so many multiprocessors write the others meanwhile
};
constexpr uint32_t kRowsReady = 255;
// Rows of a flag.
int32_t rows_of_flag(const AttentionBackwardParams& params);

// Each launches on `stream` and returns null or a message. `stream` is a cudaStream_t.
const char* launch_preprocess(const AttentionBackwardParams& params, const WorkspaceLayout& workspace,
                              const RowStatistics& statistics, void* stream, const RowsReady& ready = {});
const char* launch_convert_dq(const AttentionBackwardParams& params, const WorkspaceLayout& workspace, void* stream,
                              const HeadsFinished& finished = {});

// Dense: dk and dv are the sums, in order, over `splits` slots of (batch, heads_kv, splits, seqlen_k, columns) fp32,
// which are dk and dv of `partial`.
const char* launch_add_partial_sums(const AttentionBackwardParams& params, const AttentionBackwardParams& partial,
                                    int32_t splits, void* stream);

// The row statistics of a plan: they fill the workspace's delta region.
RowStatistics row_statistics(const AttentionBackwardParams& params, const WorkspaceLayout& workspace);

}  // namespace flashbwd

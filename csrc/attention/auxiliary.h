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

// Each launches on `stream` and returns null or a message. `stream` is a cudaStream_t.
const char* launch_preprocess(const AttentionBackwardParams& params, const WorkspaceLayout& workspace,
                              const RowStatistics& statistics, void* stream);
const char* launch_convert_dq(const AttentionBackwardParams& params, const WorkspaceLayout& workspace, void* stream,
                              const HeadsFinished& finished = {});

// Dense: dk and dv are the sums, in order, over `splits` slots of (batch, heads_kv, splits, seqlen_k, columns) fp32,
// which are dk and dv of `partial`.
const char* launch_add_partial_sums(const AttentionBackwardParams& params, const AttentionBackwardParams& partial,
                                    int32_t splits, void* stream);

// The row statistics of a plan: they fill the workspace's delta region.
RowStatistics row_statistics(const AttentionBackwardParams& params, const WorkspaceLayout& workspace);

}  // namespace flashbwd

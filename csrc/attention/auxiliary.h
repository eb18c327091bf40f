// The launches before and after an attention main kernel. The kernel families share them.
#pragma once

#include "params.h"
#include "row_statistics.h"
#include "workspace.h"

namespace flashbwd {

// Compute capability 9.0 and later: the dq postprocess overlaps the main kernel. It converts dq of a head as soon as
// all key blocks of the head have been added, on SMs that the main kernel leaves free.
struct HeadsFinished {
  // (batch, heads_kv), zero at the start; null: the dq postprocess runs after the main kernel
  int32_t* counts = nullptr;
  int32_t counts_per_key_block = 0;  // how much the main kernel adds to a count after its dq adds of one key block
  int32_t block_n = 0;
};

// Compute capability 9.0 and later: the main kernel starts while the preprocess is still writing row statistics, and
// waits for each block of rows that it needs.
struct RowsReady {
  // (batch * heads, flags_a_head); kRowsReady once the block of rows is written. null: no overlap
  uint8_t* flags = nullptr;
  int32_t flags_a_head = 0;   // stride between heads: a multiple of 4, at least the number of row blocks
  int32_t heads_abreast = 1;  // query heads that the main kernel processes at the same time (head swizzle)
  int32_t first_blocks = 0;   // row blocks that the whole grid writes before the main kernel takes over its SMs
  int32_t first_ctas = 0;     // grid size; at least `ctas`
  int32_t ctas = 0;           // CTAs that write the remaining row blocks while the main kernel runs, one per SM
};
constexpr uint32_t kRowsReady = 255;
// Rows per flag.
int32_t rows_of_flag(const AttentionBackwardParams& params);

// Each function launches on `stream`, a cudaStream_t, and returns null or an error message.
const char* launch_preprocess(const AttentionBackwardParams& params, const WorkspaceLayout& workspace,
                              const RowStatistics& statistics, void* stream, const RowsReady& ready = {});
const char* launch_convert_dq(const AttentionBackwardParams& params, const WorkspaceLayout& workspace, void* stream,
                              const HeadsFinished& finished = {});

// Dense inputs: dk and dv become the sums, in order, over the `splits` slots of `partial.dk` and `partial.dv`, (batch,
// heads_kv, splits, seqlen_k, columns) fp32.
const char* launch_add_partial_sums(const AttentionBackwardParams& params, const AttentionBackwardParams& partial,
                                    int32_t splits, void* stream);

// The row statistics of a plan. They occupy the delta region of the workspace.
RowStatistics row_statistics(const AttentionBackwardParams& params, const WorkspaceLayout& workspace);

}  // namespace flashbwd

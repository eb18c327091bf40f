// The launches before and after an attention main kernel. The kernel families share them.
#pragma once

#include "../params.h"
#include "../workspace.h"
#include "lse_delta.h"
#include "rows_ready.h"

namespace flashbwd {

// Compute capability 9.0 and later: the dq postprocess overlaps the main kernel. It converts dq of a head as soon as
// all key blocks of the head have been added, on SMs that the main kernel leaves free.
struct HeadsFinished {
  // (batch, heads_kv), zero at the start; null: the dq postprocess runs after the main kernel
  int32_t* counts = nullptr;
  int32_t counts_per_key_block = 0;  // how much the main kernel adds to a count after its dq adds of one key block
  int32_t block_n = 0;
};

// Compute capability 9.0 and later: the main kernel starts while the preprocess is still writing lse and delta, and
// waits for each block of rows that it needs.
struct RowsReadyWriter {
  // (batch * heads, flags_per_head); kRowsReady once the block of rows is written. null: no overlap
  uint8_t* flags = nullptr;
  int32_t flags_per_head = 0;   // a multiple of 4, at least the number of row blocks
  int32_t heads_per_group = 1;  // query heads that the main kernel processes at the same time (L2 swizzle)
  int32_t ctas = 0;             // grid size, one CTA per SM
};
constexpr uint32_t kRowsReady = 255;
// The same flags as the main kernel reads them. They are stored after lse and delta. Dense inputs only.
RowsReadyFlags rows_ready_flags(const AttentionBackwardParams& params, const LseDelta& lse_delta);

// True if every row starts at a multiple of `bytes`.
bool rows_aligned(const HeadsView& view, int64_t element_bytes, int64_t bytes);

// Each function launches on `stream`, a cudaStream_t, and returns null or an error message.
const char* launch_preprocess(const AttentionBackwardParams& params, const WorkspaceLayout& workspace,
                              const LseDelta& lse_delta, void* stream, const RowsReadyWriter& ready = {});
const char* launch_dq_postprocess(const AttentionBackwardParams& params, const WorkspaceLayout& workspace, void* stream,
                                  const HeadsFinished& finished = {});

// fp32 partial sums of dk or dv, (batch, heads_kv, splits, seqlen_k, columns), and the gradient that they add up to.
struct PartialSums {
  HeadsView sums, gradient;
  DType dtype = DType::kBFloat16;  // of the gradient
  int32_t columns = 0;
};

// Dense inputs: the gradient becomes the sum over the splits, in order.
const char* launch_add_partial_sums(const AttentionBackwardParams& params, const PartialSums& partial, int32_t splits,
                                    void* stream);

// Scaled LSE and delta of a plan, in the delta region of the workspace.
LseDelta lse_delta_of(const AttentionBackwardParams& params, const WorkspaceLayout& workspace);

}  // namespace flashbwd

// Lengths of packed sequences that kernels can count on. cu_seqlens lies on the GPU, so the host cannot check it, and a
// captured graph replays with whatever it holds then. Kernels wait for counts that follow from it, and index tensors by
// it, so no kernel reads the caller's own.
#pragma once

#include "params.h"
#include "workspace.h"

namespace flashbwd {

// Points `params` at copies of cu_seqlens_q and cu_seqlens_k in the workspace, and launches on `stream` what writes
// them: element 0 is 0, and no element is below the one before it or above the number of rows. Contents that keep the
// caller's promise are copied as they are. load_sequence (sequence.cuh) cuts each sequence to max_seqlen_q and
// max_seqlen_k. Does nothing for dense inputs. Returns null or a message.
const char* launch_bound_lengths(AttentionBackwardParams* params, const WorkspaceLayout& workspace, void* stream);

}  // namespace flashbwd

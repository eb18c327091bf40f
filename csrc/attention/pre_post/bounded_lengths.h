// Copies of cu_seqlens that are safe for kernels to index with. cu_seqlens is on the GPU: the host cannot check it, and
// a CUDA graph replays with its current contents. Kernels wait for counts and compute addresses derived from it, so no
// kernel reads the caller's array.
#pragma once

#include "../params.h"
#include "../workspace.h"

namespace flashbwd {

// Launches a kernel on `stream` that copies cu_seqlens_q and cu_seqlens_k to the workspace, and points `params` at the
// copies. Element 0 of a copy is 0; elements never decrease and never exceed the number of rows. Valid contents are
// unchanged. Does nothing for dense inputs. Returns null or a message.
const char* launch_bound_lengths(AttentionBackwardParams* params, const WorkspaceLayout& workspace, void* stream);

}  // namespace flashbwd

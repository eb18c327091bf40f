// The launches around an attention main kernel, shared by the kernel families.
#pragma once

#include "params.h"
#include "row_statistics.h"
#include "workspace.h"

namespace flashbwd {

// Each launches on `stream` and returns null or a message. `stream` is a cudaStream_t.
const char* launch_preprocess(const AttentionBackwardParams& params, const WorkspaceLayout& workspace,
                              const RowStatistics& statistics, void* stream);
const char* launch_convert_dq(const AttentionBackwardParams& params, const WorkspaceLayout& workspace, void* stream);

// The row statistics of a plan: they fill the workspace's delta region.
RowStatistics row_statistics(const AttentionBackwardParams& params, const WorkspaceLayout& workspace);

}  // namespace flashbwd

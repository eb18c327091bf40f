#include <cuda_runtime.h>

#include <algorithm>
#include <limits>

#include "../../common/launch.h"
#include "dq_postprocess.cuh"
#include "dq_postprocess_blocks.cuh"
#include "launch.h"
#include "preprocess.cuh"

namespace flashbwd {
namespace {

// log2 of the number of threads per row: a power of two, at most a warp. Each thread covers `columns_each` columns.
int32_t lanes_log2(int64_t columns, int64_t columns_each) {
  int32_t log2 = 0;
  while (log2 < 5 && (columns_each << log2) < columns) ++log2;
  return log2;
}

RowThreads row_threads(int64_t columns, const HeadsView& result, DType dtype) {
  return {lanes_log2(columns, kPostprocessColumns), rows_aligned(result, size_of(dtype), 16)};
}

uint32_t postprocess_row_blocks(int64_t rows, const RowThreads& threads) {
  return static_cast<uint32_t>(ceil_div(rows, (kDqPostprocessThreads >> threads.lanes_log2) * kPostprocessRows));
}

template <typename Arguments>
const char* launch_ctas(void (*kernel)(Arguments), const Arguments& arguments, int64_t ctas, int threads, bool overlaps,
                        void* stream) {
  cudaLaunchAttribute attribute = programmatic_dependent_launch();
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(threads);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = overlaps ? 1 : 0;
  const cudaError_t error = launch_kernel(config, kernel, arguments);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <typename Arguments>
const char* launch(void (*kernel)(Arguments), const Arguments& arguments, int64_t batch_heads, int threads,
                   bool overlaps, void* stream) {
  const int64_t ctas = batch_heads * arguments.row_blocks;
  if (ctas == 0) return nullptr;
  if (ctas > std::numeric_limits<int32_t>::max()) return "batch * heads * rows is too large for one launch";
  return launch_ctas(kernel, arguments, ctas, threads, overlaps, stream);
}

const char* launch_dq_postprocess_blocks(const DqPostprocessArguments& arguments, int64_t batch_heads, void* stream) {
  switch (arguments.params.dq_dtype) {
    case DType::kFloat16:
      return launch(dq_postprocess_blocks_kernel<__half>, arguments, batch_heads, kDqPostprocessThreads, false, stream);
    case DType::kBFloat16:
      return launch(dq_postprocess_blocks_kernel<__nv_bfloat16>, arguments, batch_heads, kDqPostprocessThreads, false,
                    stream);
    default:
      return launch(dq_postprocess_blocks_kernel<float>, arguments, batch_heads, kDqPostprocessThreads, false, stream);
  }
}

}  // namespace

bool rows_aligned(const HeadsView& view, int64_t element_bytes, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(view.data) % bytes == 0 && view.batch_stride * element_bytes % bytes == 0 &&
         view.seq_stride * element_bytes % bytes == 0 && view.head_stride * element_bytes % bytes == 0;
}

LseDelta lse_delta_of(const AttentionBackwardParams& params, const WorkspaceLayout& workspace) {
  float* storage = reinterpret_cast<float*>(static_cast<uint8_t*>(params.workspace) + workspace.delta_offset);
  return LseDelta::make(storage, params.cu_seqlens_q != nullptr, params.batch, params.heads, params.seqlen_q,
                        params.total_q);
}

// log2 of the threads per row of overlapped_preprocess_kernel: at least kOverlappedRows threads, because each of the
// first kOverlappedRows lanes finishes one row.
int32_t overlapped_lanes_log2(const AttentionBackwardParams& params) {
  static_assert(kOverlappedRows == 8, "max(..., 3) below is log2 of kOverlappedRows");
  return std::max(lanes_log2(params.head_dim_v, 16 / size_of(params.dtype)), 3);
}

int32_t rows_of_flag(const AttentionBackwardParams& params) {
  return (kOverlappedThreads >> overlapped_lanes_log2(params)) * kOverlappedRows;
}

RowsReadyFlags rows_ready_flags(const AttentionBackwardParams& params, const LseDelta& lse_delta) {
  RowsReadyFlags flags;
  const int32_t rows = rows_of_flag(params);
  flags.words = reinterpret_cast<int32_t*>(lse_delta.lse_log2) +
                2 * LseDelta::rows(false, params.batch, params.heads, params.seqlen_q, 0);
  while (1 << flags.rows_log2 < rows) ++flags.rows_log2;
  flags.flags_per_head = static_cast<int32_t>(round_up(ceil_div(LseDelta::padded(params.seqlen_q), rows), 4));
  return flags;
}

const char* launch_preprocess(const AttentionBackwardParams& params, const WorkspaceLayout& workspace,
                              const LseDelta& lse_delta, void* stream, const RowsReadyWriter& ready) {
  PreprocessArguments arguments;
  arguments.params = params;
  arguments.workspace = workspace_init(params, workspace);
  arguments.lse_delta = lse_delta;
  arguments.lanes_log2 = lanes_log2(params.head_dim_v, 16 / size_of(params.dtype));
  const int64_t rows = (kPreprocessThreads >> arguments.lanes_log2) * kPreprocessRows;
  // At least one CTA runs per head, because the CTAs also call init_workspace.
  arguments.row_blocks = static_cast<uint32_t>(std::max<int64_t>(ceil_div(LseDelta::padded(params.seqlen_q), rows), 1));
  arguments.vectors =
      rows_aligned(params.out, size_of(params.dtype), 16) && rows_aligned(params.dout, size_of(params.dtype), 16);
  const int64_t batch_heads = int64_t{params.batch} * params.heads;
  if (ready.flags != nullptr) {
    arguments.ready = ready;
    arguments.lanes_log2 = overlapped_lanes_log2(params);
    arguments.row_blocks = static_cast<uint32_t>(ceil_div(LseDelta::padded(params.seqlen_q), rows_of_flag(params)));
    return params.dtype == DType::kFloat16 ? launch_ctas(overlapped_preprocess_kernel<__half>, arguments, ready.ctas,
                                                         kOverlappedThreads, false, stream)
                                           : launch_ctas(overlapped_preprocess_kernel<__nv_bfloat16>, arguments,
                                                         ready.ctas, kOverlappedThreads, false, stream);
  }
  switch (params.dtype) {
    case DType::kFloat16:
      return launch(preprocess_kernel<__half>, arguments, batch_heads, kPreprocessThreads, false, stream);
    case DType::kBFloat16:
      return launch(preprocess_kernel<__nv_bfloat16>, arguments, batch_heads, kPreprocessThreads, false, stream);
    default:
      return launch(preprocess_kernel<float>, arguments, batch_heads, kPreprocessThreads, false, stream);
  }
}

const char* launch_dq_postprocess(const AttentionBackwardParams& params, const WorkspaceLayout& workspace, void* stream,
                                  const HeadsFinished& finished) {
  DqPostprocessArguments arguments;
  arguments.params = params;
  arguments.workspace = workspace;
  arguments.finished = finished;
  arguments.threads = row_threads(params.head_dim, params.dq, params.dq_dtype);
  const int64_t batch_heads = int64_t{params.batch} * params.heads;
  if (workspace.dq_blocks) {
    arguments.row_blocks =
        static_cast<uint32_t>(ceil_div(params.seqlen_q, kDqPostprocessThreads >> arguments.threads.lanes_log2));
    return launch_dq_postprocess_blocks(arguments, batch_heads, stream);
  }
  arguments.row_blocks = postprocess_row_blocks(params.seqlen_q, arguments.threads);
  const bool overlaps = finished.counts != nullptr;
  switch (params.dq_dtype) {
    case DType::kFloat16:
      return launch(dq_postprocess_kernel<__half>, arguments, batch_heads, kDqPostprocessThreads, overlaps, stream);
    case DType::kBFloat16:
      return launch(dq_postprocess_kernel<__nv_bfloat16>, arguments, batch_heads, kDqPostprocessThreads, overlaps,
                    stream);
    default:
      return launch(dq_postprocess_kernel<float>, arguments, batch_heads, kDqPostprocessThreads, overlaps, stream);
  }
}

const char* launch_add_partial_sums(const AttentionBackwardParams& params, const PartialSums& partial, int32_t splits,
                                    void* stream) {
  PartialSumsArguments arguments;
  arguments.sums = partial.sums;
  arguments.gradient = partial.gradient;
  arguments.heads = params.heads_kv;
  arguments.slots = splits;
  arguments.rows = params.seqlen_k;
  arguments.columns = partial.columns;
  arguments.threads = row_threads(partial.columns, partial.gradient, partial.dtype);
  arguments.row_blocks = postprocess_row_blocks(params.seqlen_k, arguments.threads);
  const int64_t batch_heads = int64_t{params.batch} * params.heads_kv;
  switch (partial.dtype) {
    case DType::kFloat16:
      return launch(add_partial_sums_kernel<__half>, arguments, batch_heads, kDqPostprocessThreads, false, stream);
    case DType::kBFloat16:
      return launch(add_partial_sums_kernel<__nv_bfloat16>, arguments, batch_heads, kDqPostprocessThreads, false,
                    stream);
    default:
      return launch(add_partial_sums_kernel<float>, arguments, batch_heads, kDqPostprocessThreads, false, stream);
  }
}

}  // namespace flashbwd

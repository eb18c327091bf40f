#include <cuda_runtime.h>

#include <algorithm>
#include <limits>

#include "auxiliary.h"
#include "convert_dq.cuh"
#include "preprocess.cuh"

namespace flashbwd {
namespace {

bool rows_aligned(const HeadsView& view, int64_t element_bytes, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(view.data) % bytes == 0 && view.batch_stride * element_bytes % bytes == 0 &&
         view.seq_stride * element_bytes % bytes == 0 && view.head_stride * element_bytes % bytes == 0;
}

template <typename Arguments>
const char* launch(void (*kernel)(Arguments), const Arguments& arguments, int64_t ctas, int threads, void* stream) {
  if (ctas == 0) return nullptr;
  if (ctas > std::numeric_limits<int32_t>::max()) return "batch * heads * rows is too large for one launch";
  kernel<<<static_cast<unsigned>(ctas), threads, 0, static_cast<cudaStream_t>(stream)>>>(arguments);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace

RowStatistics row_statistics(const AttentionBackwardParams& params, const WorkspaceLayout& workspace) {
  float* storage = reinterpret_cast<float*>(static_cast<uint8_t*>(params.workspace) + workspace.delta_offset);
  return RowStatistics::make(storage, params.cu_seqlens_q != nullptr, params.batch, params.heads, params.seqlen_q,
                             params.total_q);
}

const char* launch_preprocess(const AttentionBackwardParams& params, const WorkspaceLayout& workspace,
                              const RowStatistics& statistics, void* stream) {
  const int64_t row_blocks = ceil_div(RowStatistics::padded(params.seqlen_q), kPreprocessRows);
  PreprocessArguments arguments;
  arguments.params = params;
  arguments.workspace = workspace_init(params, workspace);
  arguments.statistics = statistics;
  // One CTA at least, for the tables.
  arguments.row_blocks = static_cast<int32_t>(std::max<int64_t>(row_blocks, 1));
  arguments.vectors =
      rows_aligned(params.out, size_of(params.dtype), 16) && rows_aligned(params.dout, size_of(params.dtype), 16);
  const int64_t ctas = int64_t{params.batch} * params.heads * arguments.row_blocks;
  switch (params.dtype) {
    case DType::kFloat16:
      return launch(preprocess_kernel<__half>, arguments, ctas, kPreprocessThreads, stream);
    case DType::kBFloat16:
      return launch(preprocess_kernel<__nv_bfloat16>, arguments, ctas, kPreprocessThreads, stream);
    default:
      return launch(preprocess_kernel<float>, arguments, ctas, kPreprocessThreads, stream);
  }
}

const char* launch_convert_dq(const AttentionBackwardParams& params, const WorkspaceLayout& workspace, void* stream) {
  ConvertArguments arguments;
  arguments.params = params;
  arguments.workspace = workspace;
  arguments.row_blocks = static_cast<int32_t>(ceil_div(params.seqlen_q, kConvertRows));
  arguments.vectors = rows_aligned(params.dq, size_of(params.dq_dtype), 4 * size_of(params.dq_dtype));
  const int64_t ctas = int64_t{params.batch} * params.heads * arguments.row_blocks;
  switch (params.dq_dtype) {
    case DType::kFloat16:
      return launch(convert_dq_kernel<__half>, arguments, ctas, kConvertThreads, stream);
    case DType::kBFloat16:
      return launch(convert_dq_kernel<__nv_bfloat16>, arguments, ctas, kConvertThreads, stream);
    default:
      return launch(convert_dq_kernel<float>, arguments, ctas, kConvertThreads, stream);
  }
}

}  // namespace flashbwd

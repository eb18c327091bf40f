// Host side of a run: row statistics, descriptors, the kernel, conversion of dq.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>

#include "../auxiliary.h"
#include "../schedule.h"
#include "config.h"
#include "launch.h"
#include "plan.h"

namespace flashbwd::sm90 {
namespace {

// The driver's encoder, found at run time: the library does not link libcuda.
using Encoder = decltype(&cuTensorMapEncodeTiled);

Encoder find_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<Encoder>(function);
}

struct Dimension {
  int64_t size;
  int64_t stride_bytes;
};

// Columns are contiguous; `outer` lists the dimensions from rows outwards. Boxes of `box_columns` (128 bytes) by
// `box_rows`, swizzled.
template <size_t kOuter>
bool encode(CUtensorMap* map, CUtensorMapDataType type, void* data, int64_t columns,
            const std::array<Dimension, kOuter>& outer, uint32_t box_columns, uint32_t box_rows) {
  static const Encoder encoder = find_encoder();
  if (encoder == nullptr) return false;
  constexpr size_t kRank = kOuter + 1;
  std::array<cuuint64_t, kRank> sizes;
  std::array<cuuint64_t, kOuter> strides;
  std::array<cuuint32_t, kRank> box, steps;
  box.fill(1);
  steps.fill(1);
  sizes[0] = static_cast<cuuint64_t>(columns);
  box[0] = box_columns;
  box[1] = box_rows;
  for (size_t i = 0; i < kOuter; ++i) {
    sizes[i + 1] = static_cast<cuuint64_t>(std::max<int64_t>(outer[i].size, 1));
    // The stride of a dimension of one element is never used, and may be anything.
    strides[i] = outer[i].size > 1 ? static_cast<cuuint64_t>(outer[i].stride_bytes) : 128;
  }
  return encoder(map, type, kRank, data, sizes.data(), strides.data(), box.data(), steps.data(),
                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool encode_heads(CUtensorMap* map, DType dtype, const HeadsView& view, void* fallback, int64_t columns, int64_t rows,
                  int64_t heads, int64_t batch, int32_t box_rows) {
  const auto type = dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const std::array<Dimension, 3> outer = {
      {{rows, view.seq_stride * 2}, {heads, view.head_stride * 2}, {batch, view.batch_stride * 2}}};
  // An empty tensor has no address; nothing is loaded from it either.
  return encode(map, type, view.data != nullptr ? view.data : fallback, columns, outer, 64,
                static_cast<uint32_t>(box_rows));
}

bool rows_aligned(const HeadsView& view) {
  return reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && view.batch_stride % 8 == 0 && view.seq_stride % 8 == 0 &&
         view.head_stride % 8 == 0;
}

const char* make_params(const AttentionBackwardParams& p, const AttentionPlan& plan, KernelParams* params) {
  const WorkspaceLayout& workspace = plan.workspace;
  uint8_t* const base = static_cast<uint8_t*>(p.workspace);
  const bool packed_q = p.cu_seqlens_q != nullptr, packed_k = p.cu_seqlens_k != nullptr;
  const int64_t rows_q = packed_q ? p.total_q : p.seqlen_q, batch_q = packed_q ? 1 : p.batch;
  const int64_t rows_k = packed_k ? p.total_k : p.seqlen_k, batch_k = packed_k ? 1 : p.batch;
  const int64_t slab_rows = packed_q ? p.heads * p.total_q : p.seqlen_q;
  const std::array<Dimension, 2> accumulator = {
      {{slab_rows, workspace.row_stride * 4},
       {packed_q ? 1 : int64_t{p.batch} * p.heads, slab_rows * workspace.row_stride * 4}}};

  if (!encode_heads(&params->q, p.dtype, p.q, base, p.head_dim, rows_q, p.heads, batch_q, plan.block_m) ||
      !encode_heads(&params->dout, p.dtype, p.dout, base, p.head_dim_v, rows_q, p.heads, batch_q, plan.block_m) ||
      !encode_heads(&params->k, p.dtype, p.k, base, p.head_dim, rows_k, p.heads_kv, batch_k, plan.block_n) ||
      !encode_heads(&params->v, p.dtype, p.v, base, p.head_dim_v, rows_k, p.heads_kv, batch_k, plan.block_n) ||
      !encode(&params->dq_accumulator, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, base + workspace.accumulator_offset, p.head_dim,
              accumulator, 32, 64)) {
    return "sm90: the driver could not encode a tensor map";
  }
  params->attention = p;
  params->statistics = row_statistics(p, workspace);
  params->key_blocks = static_cast<int32_t>(ceil_div(p.seqlen_k, plan.block_n));
  params->query_blocks = static_cast<int32_t>(ceil_div(p.seqlen_q, plan.block_m));
  params->jobs = static_cast<int32_t>(packed_k ? varlen_jobs(p.total_k, p.batch, p.heads_kv, plan.block_n)
                                               : int64_t{p.batch} * p.heads_kv * params->key_blocks);
  params->ctas = static_cast<int32_t>(std::min<int64_t>(params->jobs, plan.sm_count));
  auto* const zeros = reinterpret_cast<int32_t*>(base + workspace.semaphore_offset);
  params->jobs_taken = zeros;
  constexpr int64_t kL2Bytes = 32 << 20;  // of 50 MB: the rest is for k, v and what passes through
  params->head_group = static_cast<int32_t>(
      std::min(heads_in_l2(kL2Bytes, p.seqlen_q, p.head_dim, p.head_dim_v, 2, p.heads / p.heads_kv),
               heads_abreast(plan.sm_count, int64_t{packed_k ? 1 : p.batch} * p.heads_kv, params->key_blocks)));
  params->rows_may_be_poisoned = packed_q || packed_k || p.seqused_q != nullptr || p.seqused_k != nullptr;
  params->dk_vectors = rows_aligned(p.dk);
  params->dv_vectors = rows_aligned(p.dv);
  params->semaphores = p.deterministic ? zeros + kCounterWords : nullptr;
  return nullptr;
}

template <typename T, int kTileIndex = 0>
const char* dispatch(int tile_index, const KernelParams& params, void* stream) {
  if constexpr (kTileIndex == kNumTiles) {
    return "sm90: no such tile";
  } else {
    if constexpr (is_built(kTiles[kTileIndex].head_dim)) {
      if (tile_index == kTileIndex) return launch<T, kTileIndex>(params, stream);
    }
    return dispatch<T, kTileIndex + 1>(tile_index, params, stream);
  }
}

}  // namespace

const char* run(const AttentionBackwardParams& params, const AttentionPlan& plan, void* stream) {
  if (const char* error = launch_preprocess(params, plan.workspace, row_statistics(params, plan.workspace), stream)) {
    return error;
  }
  KernelParams kernel_params;
  if (const char* error = make_params(params, plan, &kernel_params)) return error;
  if (kernel_params.jobs > 0) {
    const char* error = params.dtype == DType::kBFloat16 ? dispatch<__nv_bfloat16>(plan.config, kernel_params, stream)
                                                         : dispatch<__half>(plan.config, kernel_params, stream);
    if (error != nullptr) return error;
  }
  return launch_convert_dq(params, plan.workspace, stream);
}

}  // namespace flashbwd::sm90

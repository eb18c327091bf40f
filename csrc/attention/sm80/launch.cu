// Host side of a run: row statistics and zeros, the kernel, conversion of dq, the gradient of the bias, what is left.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "../auxiliary.h"
#include "../dropout.h"
#include "../sink_gradient.h"
#include "config.h"
#include "launch.h"
#include "layout.h"
#include "plan.h"

namespace flashbwd::sm80 {
namespace {

bool aligned(const HeadsView& view, int64_t element_bytes, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(view.data) % bytes == 0 && view.batch_stride * element_bytes % bytes == 0 &&
         view.seq_stride * element_bytes % bytes == 0 && view.head_stride * element_bytes % bytes == 0;
}

CallSizes sizes_of(const AttentionBackwardParams& p) {
  CallSizes sizes;
  sizes.packed_q = p.cu_seqlens_q != nullptr;
  sizes.packed_k = p.cu_seqlens_k != nullptr;
  sizes.batch = p.batch;
  sizes.heads = p.heads;
  sizes.heads_kv = p.heads_kv;
  sizes.seqlen_q = p.seqlen_q;
  sizes.seqlen_k = p.seqlen_k;
  sizes.total_q = p.total_q;
  sizes.total_k = p.total_k;
  sizes.head_dim = p.head_dim;
  sizes.head_dim_v = p.head_dim_v;
  sizes.deterministic = p.deterministic;
  sizes.bias_gradient = p.dbias.data != nullptr;
  sizes.bias_broadcast = broadcast_of(p);
  return sizes;
}

// 16-bit rows that can be copied 16 bytes at a time; a broadcast dimension has stride 0.
bool in_pieces(void* data, DType dtype, DType wanted, int64_t batch_stride, int64_t head_stride, int64_t row_stride,
               int64_t col_stride) {
  return data != nullptr && dtype == wanted && is_16bit(dtype) && col_stride == 1 &&
         reinterpret_cast<uintptr_t>(data) % 16 == 0 && batch_stride % 8 == 0 && head_stride % 8 == 0 &&
         row_stride % 8 == 0;
}

KernelParams make_params(const AttentionBackwardParams& p, const AttentionPlan& plan, const CallSizes& sizes) {
  const Tile& tile = kTiles[plan.config];
  const WorkspaceLayout& workspace = plan.workspace;
  uint8_t* const base = static_cast<uint8_t*>(p.workspace);
  const int64_t bytes = size_of(p.dtype);
  KernelParams params;
  params.attention = p;
  params.statistics = row_statistics(p, workspace);
  params.dq_accumulator = reinterpret_cast<float*>(base + workspace.accumulator_offset);
  params.dq_row_stride = workspace.row_stride;
  params.dq_blocks = workspace.dq_blocks;
  params.jobs = job_count(sizes, tile);
  params.packed_jobs = packed_jobs(sizes);
  params.key_blocks = static_cast<int32_t>(ceil_div(p.seqlen_k, tile.block_n));
  params.query_blocks = static_cast<int32_t>(ceil_div(p.seqlen_q, tile.block_m));
  constexpr int64_t kL2Bytes = 24 << 20;  // of 40 MB (8.0) and more; small caches hold few heads in any order
  params.head_group = static_cast<int32_t>(
      std::min<int64_t>(heads_in_l2(kL2Bytes, p.seqlen_q, p.head_dim, p.head_dim_v, bytes, p.heads / p.heads_kv),
                        int64_t{p.batch} * p.heads_kv));
  params.q_aligned = aligned(p.q, bytes, 16);
  params.k_aligned = aligned(p.k, bytes, 16);
  params.v_aligned = aligned(p.v, bytes, 16);
  params.dout_aligned = aligned(p.dout, bytes, 16);
  params.dk_aligned = aligned(p.dk, size_of(p.dk_dtype), 2 * size_of(p.dk_dtype));
  params.dv_aligned = aligned(p.dv, size_of(p.dv_dtype), 2 * size_of(p.dv_dtype));

  uint8_t* const zeroed = base + workspace.semaphore_offset;
  const ZeroedRegion region = zeroed_region(sizes, tile);
  if (takes_jobs(sizes, tile)) params.jobs_taken = reinterpret_cast<int32_t*>(zeroed);
  if (p.deterministic) {
    params.turns = reinterpret_cast<int32_t*>(zeroed + region.turns_offset);
    params.turns_of_head = region.turns_of_head;
  }
  uint8_t* const partial = base + workspace.partial_offset;
  if (tile.wide) {
    params.workers = static_cast<int32_t>(worker_count(sizes, tile, plan.sm_count));
    params.gradients = reinterpret_cast<float*>(partial + partial_region(sizes, tile, plan.sm_count).gradients_offset);
  }
  const BiasGradientScratch scratch = bias_gradient_of(sizes, tile);
  params.bias_gradient = bias_gradient(p, scratch, scratch.zeroed ? zeroed + region.bias_gradient_offset : partial);
  const bool capped = p.softcap > 0.f;  // a factor of the cap then lies where pieces go, and ds has been through it
  const BiasView& b = p.bias;
  params.bias_pieces =
      !capped && in_pieces(b.data, b.dtype, p.dtype, b.batch_stride, b.head_stride, b.row_stride, b.col_stride);
  const BiasGradient& g = params.bias_gradient;
  params.bias_gradient_pieces =
      !capped && g.mode == BiasGradientMode::kStore &&
      in_pieces(g.data, g.dtype, p.dtype, g.batch_stride, g.head_stride, g.row_stride, g.col_stride);
  if (p.dropout_p > 0.f) {
    params.dropout_scale = dropout_scale(p);
    params.dropout_threshold =
        p.dropout_layout == DropoutLayout::kFlash ? flash_threshold(p.dropout_p) : efficient_threshold(p.dropout_p);
  }
  return params;
}

// Of the tiles for elements of T.
template <typename T, int kTileIndex = 0>
const char* dispatch(int tile_index, const KernelParams& params, bool features, void* stream) {
  if constexpr (kTileIndex == kNumTiles) {
    return "sm80: no such tile";
  } else {
    if constexpr (kTiles[kTileIndex].element_bytes == sizeof(T) && is_built(kTiles[kTileIndex].head_dim)) {
      if (tile_index == kTileIndex) return launch<T, kTileIndex>(params, features, stream);
    }
    return dispatch<T, kTileIndex + 1>(tile_index, params, features, stream);
  }
}

const char* launch_main(const AttentionBackwardParams& p, int tile_index, const KernelParams& params, void* stream) {
  const bool features = p.bias.data != nullptr || p.alibi_slopes != nullptr || p.softcap > 0.f || p.dropout_p > 0.f;
  switch (p.dtype) {
    case DType::kBFloat16:
      return dispatch<__nv_bfloat16>(tile_index, params, features, stream);
    case DType::kFloat16:
      return dispatch<__half>(tile_index, params, features, stream);
    default:
      return dispatch<float>(tile_index, params, features, stream);
  }
}

}  // namespace

const char* run(const AttentionBackwardParams& p, const AttentionPlan& plan, void* stream) {
  const CallSizes sizes = sizes_of(p);
  const KernelParams params = make_params(p, plan, sizes);
  if (const char* error = launch_preprocess(p, plan.workspace, params.statistics, stream)) return error;
  if (params.jobs > 0) {
    if (const char* error = launch_main(p, plan.config, params, stream)) return error;
  }
  if (const char* error = launch_convert_dq(p, plan.workspace, stream)) return error;
  const BiasGradientScratch scratch = bias_gradient_of(sizes, kTiles[plan.config]);
  if (const char* error = launch_reduce_bias_gradient(p, params.bias_gradient, scratch, stream)) return error;
  return launch_sink_gradient(p, params.statistics, stream);
}

}  // namespace flashbwd::sm80

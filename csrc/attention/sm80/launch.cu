// The launches of one call: preprocess, main kernel, sums of split work tiles, dq postprocess, bias and sink gradients.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "../../common/launch.h"
#include "../dropout.h"
#include "../families.h"
#include "../pre_post/bounded_lengths.h"
#include "../pre_post/launch.h"
#include "../pre_post/sink_gradient.h"
#include "combine_splits.cuh"
#include "config.h"
#include "launch.h"
#include "layout.h"

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
  sizes.window_left = p.window_left;
  sizes.window_right = p.window_right;
  sizes.causal = p.causal;
  sizes.deterministic = p.deterministic;
  sizes.seqused = p.seqused_q != nullptr || p.seqused_k != nullptr;
  sizes.bias_gradient = p.dbias.data != nullptr;
  sizes.bias_alone = p.alibi_slopes == nullptr && p.softcap <= 0.f && p.dropout_p <= 0.f;
  sizes.bias_broadcast = broadcast_of(p);
  return sizes;
}

// The largest dynamic shared memory of a CTA; 0 if the query fails.
int32_t shared_bytes_of_device() {
  int device = 0, bytes = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  if (cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess) return 0;
  return bytes;
}

// Whether 16-bit rows can be accessed 16 bytes at a time. A broadcast dimension has stride 0.
bool has_vector_rows(void* data, DType dtype, DType wanted, int64_t batch_stride, int64_t head_stride,
                     int64_t row_stride, int64_t col_stride) {
  return data != nullptr && dtype == wanted && is_16bit(dtype) && col_stride == 1 &&
         reinterpret_cast<uintptr_t>(data) % 16 == 0 && batch_stride % 8 == 0 && head_stride % 8 == 0 &&
         row_stride % 8 == 0;
}

GradientTarget gradient_target(const HeadsView& view, DType dtype, int32_t columns, void* partial_sums) {
  return {view,
          static_cast<float*>(partial_sums),
          partial_row_stride(columns),
          dtype,
          columns,
          aligned(view, size_of(dtype), 2 * size_of(dtype)),
          is_16bit(dtype) && columns % 8 == 0 && aligned(view, 2, 16)};
}

// Sums dk and dv of split work tiles over their CTAs.
const char* launch_combine_splits(const KernelParams& params, const SplitTiles& split, const Tile& tile, void* stream) {
  const auto vectors = [](const GradientTarget& target) {
    return aligned(target.view, size_of(target.dtype), 4 * size_of(target.dtype));
  };
  const CombineSplitsArguments arguments = {params, tile.block_n, vectors(params.dk), vectors(params.dv)};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(split.count), static_cast<unsigned>(tile.block_n / kCombineRows), 2);
  config.blockDim = dim3(kCombineThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  const cudaError_t error = launch_kernel(config, combine_splits_kernel, arguments);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// KV heads per head swizzle group. Within a group, key blocks run in LPT order. A group has as many heads as fit in L2,
// but at least enough for two waves: in shorter groups the long work tiles would run alone at the end of each group.
int64_t heads_per_swizzle(const AttentionBackwardParams& p, const KernelParams& params) {
  constexpr int64_t kL2Bytes = 24 << 20;  // of an A100's 40 MB; a small L2 holds few heads in any order
  const int64_t all = int64_t{p.batch} * p.heads_kv;
  const int64_t in_l2 =
      heads_in_l2(kL2Bytes, p.seqlen_q, p.head_dim, p.head_dim_v, size_of(p.dtype), p.heads / p.heads_kv);
  const int64_t two_waves = 2 * params.num_ctas / std::max(params.key_blocks, 1);
  if (two_waves <= in_l2 || two_waves >= all) return std::min(std::max(in_l2, two_waves), all);
  // Prefer slightly smaller groups of equal size to a short last group.
  for (int64_t heads = two_waves; heads > two_waves * 3 / 4 && heads > in_l2; --heads) {
    if (all % heads == 0) return heads;
  }
  return two_waves;
}

KernelParams make_params(const AttentionBackwardParams& p, const AttentionPlan& plan, const CallSizes& sizes) {
  const Tile& tile = kTiles[plan.config];
  const WorkspaceLayout& workspace = plan.workspace;
  uint8_t* const base = static_cast<uint8_t*>(p.workspace);
  const int64_t bytes = size_of(p.dtype);
  KernelParams params;
  params.attention = p;
  params.lse_delta = lse_delta_of(p, workspace);
  params.dq_accumulator = reinterpret_cast<float*>(base + workspace.accumulator_offset);
  params.dq_row_stride = workspace.row_stride;
  params.dq_blocks = workspace.dq_blocks;
  params.splits = sizes.split_tiles.splits;
  params.unsplit_work_tiles = count_work_tiles(sizes, tile) - sizes.split_tiles.count;
  params.num_work_tiles = params.unsplit_work_tiles + sizes.split_tiles.ctas();
  params.packed_work_tiles = packed_work_tiles(sizes);
  params.key_blocks = static_cast<int32_t>(ceil_div(p.seqlen_k, tile.block_n));
  params.query_blocks = static_cast<int32_t>(ceil_div(p.seqlen_q, tile.block_m));
  params.num_ctas = static_cast<int32_t>(grid_size(sizes, tile, plan.sm_count));
  params.swizzle_heads = sizes.whole_heads ? 1 : static_cast<int32_t>(heads_per_swizzle(p, params));
  // All work tiles take equally long here, so a group needs only as many heads as run at the same time.
  if (sizes.first_stores) params.swizzle_heads = std::max(params.num_ctas / std::max(params.key_blocks, 1), 1);
  // Batches that share a bias read it, and add to its gradient, while it is in L2.
  params.swizzle_batches = !params.packed_work_tiles && p.bias.data != nullptr && p.bias.batch_stride == 0;
  params.q_aligned = aligned(p.q, bytes, 16);
  params.k_aligned = aligned(p.k, bytes, 16);
  params.v_aligned = aligned(p.v, bytes, 16);
  params.dout_aligned = aligned(p.dout, bytes, 16);

  uint8_t* const zeroed = base + workspace.semaphore_offset;
  const ZeroedRegion region = zeroed_region(sizes, tile);
  params.work_tile_counter = reinterpret_cast<int32_t*>(zeroed);
  if (p.deterministic && !sizes.whole_heads) {
    params.dq_semaphores = reinterpret_cast<int32_t*>(zeroed + region.dq_semaphores_offset);
    params.semaphores_per_head = region.semaphores_per_head;
  }
  if (sizes.first_stores) {
    params.stored = reinterpret_cast<int32_t*>(zeroed + region.stored_offset);
    params.stored_words = static_cast<int32_t>(region.stored_words);
  }
  uint8_t* const partial = base + workspace.partial_offset;
  const PartialRegion region_of_partials = partial_region(sizes, tile, plan.sm_count);
  if (sizes.whole_heads) {
    params.dq_tiles = reinterpret_cast<float*>(partial + region_of_partials.dq_tiles_offset);
    params.dq = gradient_target(p.dq, p.dq_dtype, p.head_dim, nullptr);
  }
  params.loads_ahead =
      has_loads_ahead(tile) && tile.shared_bytes() + kAlignmentBytes + keys_bytes(tile) <= shared_bytes_of_device();
  if (tile.large) params.gradients = reinterpret_cast<float*>(partial + region_of_partials.gradients_offset);
  params.dk = gradient_target(p.dk, p.dk_dtype, p.head_dim, partial + region_of_partials.partial_dk_offset);
  params.dv = gradient_target(p.dv, p.dv_dtype, p.head_dim_v, partial + region_of_partials.partial_dv_offset);
  const BiasGradientScratch scratch = bias_gradient_of(sizes, tile);
  params.bias_gradient = bias_gradient(p, scratch, scratch.zeroed ? zeroed + region.bias_gradient_offset : partial);
  const bool capped = p.softcap > 0.f;  // softcap keeps its factor in the ds tile, so vectors cannot go through it
  const BiasView& b = p.bias;
  params.bias_vectors =
      !capped && b.row_stride != 0 &&
      has_vector_rows(b.data, b.dtype, p.dtype, b.batch_stride, b.head_stride, b.row_stride, b.col_stride);
  const BiasGradient& g = params.bias_gradient;
  params.bias_gradient_vectors =
      !capped && g.mode == BiasGradientMode::kStore &&
      has_vector_rows(g.data, g.dtype, p.dtype, g.batch_stride, g.head_stride, g.row_stride, g.col_stride);
  if (sizes.ordered_bias_gradient) {
    params.ordered_bias_sums = {reinterpret_cast<float*>(partial + region_of_partials.bias_sums_offset),
                                reinterpret_cast<int32_t*>(zeroed + region.bias_semaphores_offset),
                                static_cast<int32_t>(bias_sharers(sizes))};
  }
  if (p.dropout_p > 0.f) {
    params.dropout_scale = dropout_scale(p);
    params.dropout_threshold =
        p.dropout_layout == DropoutLayout::kFlash ? flash_threshold(p.dropout_p) : efficient_threshold(p.dropout_p);
  }
  return params;
}

Variant variant_of(const KernelParams& params, const Tile& tile) {
  const AttentionBackwardParams& p = params.attention;
  const bool others = p.alibi_slopes != nullptr || p.softcap > 0.f || p.dropout_p > 0.f;
  if (params.dq_tiles != nullptr) return Variant::kWholeHeads;
  if (params.stored != nullptr) return Variant::kFirstStores;
  if (p.bias.data == nullptr)
    return others ? Variant::kAllFeatures : params.loads_ahead ? Variant::kLoadsAhead : Variant::kPlain;
  if (params.ordered_bias_sums.sums != nullptr) return Variant::kSharedBias;
  const BiasGradient& g = params.bias_gradient;
  const bool gradient = g.mode == BiasGradientMode::kNone || params.bias_gradient_vectors ||
                        (g.mode == BiasGradientMode::kAdd && g.col_stride == 1);
  if (!params.bias_vectors || !gradient || others) return Variant::kAllFeatures;
  return g.mode == BiasGradientMode::kAdd && !bias_kernel_adds(tile) ? Variant::kSharedBias : Variant::kBias;
}

// Finds row tile_index among the tiles with elements of T.
template <typename T, int kTileIndex = 0>
const char* dispatch(int tile_index, const KernelParams& params, Variant variant, void* stream) {
  if constexpr (kTileIndex == kNumTiles) {
    return "sm80: no such tile";
  } else {
    if constexpr (kTiles[kTileIndex].element_bytes == sizeof(T) && is_built(kTiles[kTileIndex].head_dim)) {
      if (tile_index == kTileIndex) {
        return launch<T, kTiles[kTileIndex].head_dim>(tile_index, params, variant, stream);
      }
    }
    return dispatch<T, kTileIndex + 1>(tile_index, params, variant, stream);
  }
}

const char* launch_main(const AttentionBackwardParams& p, int tile_index, const KernelParams& params, void* stream) {
  const Variant variant = variant_of(params, kTiles[tile_index]);
  switch (p.dtype) {
    case DType::kBFloat16:
      return dispatch<__nv_bfloat16>(tile_index, params, variant, stream);
    case DType::kFloat16:
      return dispatch<__half>(tile_index, params, variant, stream);
    default:
      return dispatch<float>(tile_index, params, variant, stream);
  }
}

}  // namespace

const char* run(const AttentionBackwardParams& given, const AttentionPlan& plan, void* stream) {
  const Tile& tile = kTiles[plan.config];
  AttentionBackwardParams p = given;
  if (const char* error = launch_bound_lengths(&p, plan.workspace, stream)) return error;
  CallSizes sizes = sizes_of(p);
  sizes.whole_heads = !plan.workspace.has_accumulator;
  if (!sizes.whole_heads) sizes.split_tiles = choose_split_tiles(sizes, tile, plan.sm_count);
  sizes.first_stores = plan.workspace.has_accumulator && !plan.deterministic && !plan.workspace.zero_accumulator;
  sizes.ordered_bias_gradient = ordered_bias_gradient(sizes, tile);
  KernelParams params = make_params(p, plan, sizes);
  BiasGradientScratch scratch = bias_gradient_of(sizes, tile);
  if (sizes.ordered_bias_gradient && !(params.bias_vectors && params.bias_gradient_vectors)) {
    // Falls back to adding in any order, to zeros, in the scratch of the ordered sums.
    sizes.ordered_bias_gradient = false;
    scratch = bias_gradient_of(sizes, tile);
    params.bias_gradient = bias_gradient(p, scratch, params.ordered_bias_sums.sums);
    params.bias_gradient_vectors = false;
    params.ordered_bias_sums = {};
    const cudaError_t error = cudaMemsetAsync(params.bias_gradient.data, 0, scratch.elements * sizeof(float),
                                              static_cast<cudaStream_t>(stream));
    if (error != cudaSuccess) return cudaGetErrorString(error);
  }
  if (const char* error = launch_preprocess(p, plan.workspace, params.lse_delta, stream)) return error;
  if (params.num_work_tiles > 0) {
    if (const char* error = launch_main(p, plan.config, params, stream)) return error;
  }
  if (sizes.split_tiles.count > 0) {
    if (const char* error = launch_combine_splits(params, sizes.split_tiles, tile, stream)) return error;
  }
  if (!sizes.whole_heads) {
    if (const char* error = launch_dq_postprocess(p, plan.workspace, stream)) return error;
  }
  if (const char* error = launch_reduce_bias_gradient(p, params.bias_gradient, scratch, stream)) return error;
  return launch_sink_gradient(p, params.lse_delta, stream);
}

}  // namespace flashbwd::sm80

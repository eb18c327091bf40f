// Host side of a run: row statistics, descriptors, the kernel, conversion of dq, the gradients of
// bias and sinks.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

#include "../../common/launch.h"
#include "../auxiliary.h"
#include "../bounded_lengths.h"
#include "../dropout.h"
#include "../schedule.h"
#include "../sink_gradient.h"
#include "config.h"
#include "conversion.cuh"
#include "launch.h"
#include "layout.h"
#include "lists.h"
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

// The driver encodes nothing in a thread without a context, which one of autograd's is until its first launch.
bool begin_context() {
  int device = 0;
  return cudaGetDevice(&device) == cudaSuccess && cudaSetDevice(device) == cudaSuccess;
}

struct Dimension {
  int64_t size;
  int64_t stride_bytes;
};

// Columns are contiguous; `outer` lists the dimensions from rows outwards. Boxes of `box_columns` (as many bytes as
// `swizzle` says) by `box_rows`.
template <size_t kOuter>
bool encode(CUtensorMap* map, CUtensorMapDataType type, void* data, int64_t columns,
            const std::array<Dimension, kOuter>& outer, uint32_t box_columns, uint32_t box_rows,
            CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
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
  // Boxes are at most 128 bytes wide. With promotion to 256, calls of S 512 and 1024 were 1 to 2 % slower.
  return encoder(map, type, kRank, data, sizes.data(), strides.data(), box.data(), steps.data(),
                 CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool encode_heads(CUtensorMap* map, DType dtype, const HeadsView& view, void* fallback, int64_t columns, int64_t rows,
                  int64_t heads, int64_t batch, int32_t box_rows, int32_t row_bytes = 128) {
  const auto type = dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const std::array<Dimension, 3> outer = {
      {{rows, view.seq_stride * 2}, {heads, view.head_stride * 2}, {batch, view.batch_stride * 2}}};
  // An empty tensor has no address; nothing is loaded from it either.
  return encode(map, type, view.data != nullptr ? view.data : fallback, columns, outer,
                static_cast<uint32_t>(row_bytes / 2), static_cast<uint32_t>(box_rows),
                row_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B);
}

bool rows_aligned(const HeadsView& view) {
  return reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && view.batch_stride % 8 == 0 && view.seq_stride % 8 == 0 &&
         view.head_stride % 8 == 0;
}

constexpr const char* kNoTensorMap = "sm90: the driver could not encode a tensor map";

// Whether the kernel may write dq: whole tiles of rows that all have sums, as the copy engine stores them.
bool can_write_dq(const AttentionBackwardParams& p) {
  const bool dense = p.cu_seqlens_q == nullptr && p.cu_seqlens_k == nullptr && p.seqused_q == nullptr &&
                     p.seqused_k == nullptr && p.seqlen_q > 0 && p.seqlen_k > 0;
  if (!dense || p.dq_dtype != p.dtype || p.head_dim % 4 != 0 || !rows_aligned(p.dq)) return false;
  const Visibility visibility = make_visibility(p.seqlen_q, p.seqlen_k, p.window_left, p.window_right, p.causal);
  return sees_a_key(visibility, 0) && sees_a_key(visibility, p.seqlen_q - 1);
}

// Partial sums of dk and dv, in place of the gradients: (batch, heads_kv * splits, seqlen_k, columns) fp32 each.
void point_at_partial_sums(float* sums, AttentionBackwardParams* p, int32_t splits) {
  const auto view = [&](int32_t columns) {
    HeadsView view;
    view.data = sums;
    view.seq_stride = round_up(columns, 4);
    view.head_stride = view.seq_stride * p->seqlen_k;
    view.batch_stride = view.head_stride * p->heads_kv * splits;
    sums += view.batch_stride * p->batch;
    return view;
  };
  p->dk = view(p->head_dim);
  p->dv = view(p->head_dim_v);
  p->dk_dtype = p->dv_dtype = DType::kFloat32;
}

bool has_features(const AttentionBackwardParams& p) {
  return p.bias.data != nullptr || p.alibi_slopes != nullptr || p.softcap > 0.f || p.dropout_p > 0.f;
}

CallSizes sizes_of(const AttentionBackwardParams& p) {
  CallSizes sizes;
  sizes.dtype = p.dtype;
  sizes.packed = p.cu_seqlens_k != nullptr;
  sizes.batch = p.batch;
  sizes.heads = p.heads;
  sizes.heads_kv = p.heads_kv;
  sizes.seqlen_q = p.seqlen_q;
  sizes.seqlen_k = p.seqlen_k;
  sizes.total_k = p.total_k;
  sizes.deterministic = p.deterministic;
  sizes.bias_gradient = p.dbias.data != nullptr;
  sizes.bias_broadcast = broadcast_of(p);
  return sizes;
}

// What a finished key block has added to the count of its head.
int32_t counts_of_key_block(const KernelParams& params, const Tile& tile) {
  return dq_adders(tile) * params.grouped.splits * params.last_round.parts;
}

// The last round's sums of dk and dv: (heads of a list, parts, rows from the first cut key block on, columns) fp32
// each.
void point_at_parts(float* sums, const AttentionBackwardParams& p, int64_t block_n, KernelParams* params) {
  const int64_t first_row = first_cut_key_block(*params) * block_n;
  const auto view = [&](int32_t columns) {
    HeadsView view;
    view.seq_stride = round_up(columns, 4);
    view.head_stride = view.seq_stride * (p.seqlen_k - first_row);
    view.data = sums - first_row * view.seq_stride;  // rows count from the start of the sequence
    sums += view.head_stride * params->head_group * params->last_round.parts;
    return view;
  };
  params->parts_dk = view(p.head_dim);
  params->parts_dv = view(p.head_dim_v);
}

// Their sums, into dk and dv.
const char* add_parts(const AttentionBackwardParams& params, const KernelParams& kernel_params, int64_t block_n,
                      void* stream) {
  const int64_t first_row = first_cut_key_block(kernel_params) * block_n;
  AttentionBackwardParams gradients = params, parts = params;
  gradients.batch = 1;
  gradients.heads_kv = kernel_params.head_group;
  gradients.seqlen_k = static_cast<int32_t>(params.seqlen_k - first_row);
  const auto last_heads = [&](HeadsView* view, DType dtype) {
    const int64_t first = (params.batch - 1) * view->batch_stride +
                          (params.heads_kv - kernel_params.head_group) * view->head_stride +
                          first_row * view->seq_stride;
    view->data = static_cast<uint8_t*>(view->data) + first * size_of(dtype);
  };
  last_heads(&gradients.dk, params.dk_dtype);
  last_heads(&gradients.dv, params.dv_dtype);
  const auto from_first_row = [&](HeadsView view) {
    view.data = static_cast<float*>(view.data) + first_row * view.seq_stride;
    return view;
  };
  parts.dk = from_first_row(kernel_params.parts_dk);
  parts.dv = from_first_row(kernel_params.parts_dv);
  return launch_add_partial_sums(gradients, parts, kernel_params.last_round.parts, stream);
}

const char* make_params(const AttentionBackwardParams& given, const AttentionPlan& plan, KernelParams* params) {
  const Tile& tile = kTiles[plan.config];
  const bool packed_q = given.cu_seqlens_q != nullptr, packed_k = given.cu_seqlens_k != nullptr;
  params->by_heads = given.heads != given.heads_kv && given.window_left >= 0 && given.window_right >= 0;
  params->takes_turns = takes_turns(given, tile);
  params->last_writes_dq = params->takes_turns && can_write_dq(given);
  // The kernel whose last adds write dq knows no other way to add.
  const bool in_turn =
      params->takes_turns || (params->by_heads && by_heads_in_turn_only(tile) && !packed_q && !packed_k);
  params->any_order = in_turn && !given.deterministic;
  AttentionBackwardParams p = given;
  p.deterministic = given.deterministic || in_turn;
  const CallSizes sizes = sizes_of(p);
  const int32_t keys_of_a_cta = tile.block_n / tile.ctas, row = row_bytes(tile);
  const WorkspaceLayout& workspace = plan.workspace;
  uint8_t* const base = static_cast<uint8_t*>(p.workspace);
  auto* const partial_sums =
      reinterpret_cast<float*>(base + workspace.partial_offset + bias_scratch_bytes(sizes, tile));
  const int64_t rows_q = packed_q ? p.total_q : p.seqlen_q, batch_q = packed_q ? 1 : p.batch;
  const int64_t rows_k = packed_k ? p.total_k : p.seqlen_k, batch_k = packed_k ? 1 : p.batch;
  const int64_t slab_rows = packed_q ? p.heads * p.total_q : p.seqlen_q;
  const std::array<Dimension, 2> accumulator = {
      {{slab_rows, workspace.row_stride * 4},
       {packed_q ? 1 : int64_t{p.batch} * p.heads, slab_rows * workspace.row_stride * 4}}};

  if (!encode_heads(&params->q, p.dtype, p.q, base, p.head_dim, rows_q, p.heads, batch_q, plan.block_m, row) ||
      !encode_heads(&params->dout, p.dtype, p.dout, base, p.head_dim_v, rows_q, p.heads, batch_q, plan.block_m, row) ||
      !encode_heads(&params->k, p.dtype, p.k, base, p.head_dim, rows_k, p.heads_kv, batch_k, keys_of_a_cta, row) ||
      !encode_heads(&params->v, p.dtype, p.v, base, p.head_dim_v, rows_k, p.heads_kv, batch_k, keys_of_a_cta, row) ||
      !encode(&params->dq_accumulator, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, base + workspace.accumulator_offset, p.head_dim,
              accumulator, 32, 64)) {
    return kNoTensorMap;
  }
  params->attention = p;
  params->statistics = row_statistics(p, workspace);
  params->key_blocks = static_cast<int32_t>(ceil_div(p.seqlen_k, plan.block_n));
  params->query_blocks = static_cast<int32_t>(ceil_div(p.seqlen_q, plan.block_m));
  if (!is_wide(tile)) {
    params->grouped = grouped_jobs(grouped_sizes(p, packed_q || packed_k, params->takes_turns, tile), plan.sm_count);
  }
  params->key_blocks_of_list =
      params->grouped.pairs ? static_cast<int32_t>(ceil_div(params->key_blocks, 2)) : params->key_blocks;
  const int32_t lists = p.heads_kv * params->grouped.splits;
  params->jobs = static_cast<int32_t>(packed_k ? varlen_jobs(p.total_k, p.batch, lists, plan.block_n)
                                               : int64_t{p.batch} * lists * params->key_blocks_of_list);
  if (params->grouped.splits > 1) point_at_partial_sums(partial_sums, &params->attention, params->grouped.splits);
  uint8_t* const zeroed = base + workspace.semaphore_offset;
  const ZeroedRegion region = zeroed_region(sizes, tile);
  params->jobs_taken = reinterpret_cast<int32_t*>(zeroed);
  params->head_group = heads_of_a_list(p, tile, packed_k, params->grouped.pairs, lists, params->key_blocks_of_list,
                                       params->query_blocks, plan.sm_count / tile.ctas);
  params->heads_abreast = params->head_group * (p.heads / std::max(lists, 1));
  params->from_last_key = from_last_key(p);
  params->wants_early = !given.deterministic || has_equal_jobs(p);
  if (early_under_a_diagonal_only(tile) && (p.window_left >= 0 || p.window_right < 0)) params->wants_early = false;
  if (params->takes_turns && is_short_walk(p, tile)) params->wants_early = false;
  const int64_t heads_before_last =
      heads_before_last_list(p, tile, params->head_group, int64_t{p.batch} * lists, params->key_blocks,
                             params->query_blocks, plan.sm_count / tile.ctas);
  params->jobs_before_last =
      packed_k ? params->jobs : static_cast<int32_t>(heads_before_last * params->key_blocks_of_list);
  if (packed_k) params->list_blocks = blocks_of_a_list(p, plan.block_n);
  if (!packed_q && !packed_k && !is_wide(tile)) {
    params->last_round =
        last_round(given, tile, params->head_group, params->key_blocks, params->query_blocks, plan.sm_count);
  }
  params->whole_jobs = params->jobs - params->last_round.jobs;
  params->jobs = params->whole_jobs + params->last_round.jobs * params->last_round.parts;
  params->ctas = std::min(params->jobs, plan.sm_count / tile.ctas) * tile.ctas;
  // Features take the row of a query from the walk, which in waves counts on behind the last one.
  if (is_wide(tile) && !has_features(p)) {
    const WideWaves waves =
        wide_waves(p, tile, params->head_group, params->key_blocks, params->query_blocks, plan.sm_count / tile.ctas);
    if (waves.jobs > 0) {
      params->wave_size = waves.jobs;
      params->ctas = waves.jobs * tile.ctas;
      params->head_group = params->heads_abreast = waves.heads_of_list;
    }
  }
  if (params->last_round.parts > 1) point_at_parts(partial_sums, p, plan.block_n, params);
  params->rows_may_be_poisoned = packed_q || packed_k || p.seqused_q != nullptr || p.seqused_k != nullptr;
  params->dk_vectors = rows_aligned(p.dk);
  params->dv_vectors = rows_aligned(p.dv);
  const AttentionBackwardParams& attention = params->attention;  // dk and dv may be partial sums
  params->copies_dkdv = !is_wide(tile) && attention.dk_dtype == p.dtype && attention.dv_dtype == p.dtype &&
                        params->dk_vectors && params->dv_vectors;
  if (params->copies_dkdv &&
      (!encode_heads(&params->dk, p.dtype, p.dk, base, p.head_dim, rows_k, p.heads_kv, batch_k, 64) ||
       !encode_heads(&params->dv, p.dtype, p.dv, base, p.head_dim_v, rows_k, p.heads_kv, batch_k, 64))) {
    return kNoTensorMap;
  }
  params->chores_taken = params->jobs_taken + 1;
  params->finished = params->jobs_taken + 2;
  params->counts_of_head = params->key_blocks * counts_of_key_block(*params, tile);
  if (has_chores(tile) && !params->last_writes_dq && can_write_dq(p)) {
    params->chores_of_head = static_cast<int32_t>(ceil_div(p.seqlen_q, chore_rows(tile)));
    params->chores = p.batch * p.heads * params->chores_of_head;
  }
  params->dq_sums = reinterpret_cast<const float*>(base + workspace.accumulator_offset);
  params->dq_sums_stride = static_cast<int32_t>(workspace.row_stride);
  if (!is_wide(tile) && (params->chores > 0 || params->last_writes_dq) &&
      !encode_heads(&params->dq, p.dtype, p.dq, base, p.head_dim, rows_q, p.heads, batch_q, 64)) {
    return kNoTensorMap;
  }
  params->adds_into_zeros = workspace.zero_accumulator;
  const bool dense = !packed_q && !packed_k;
  const Visibility visibility = make_visibility(p.seqlen_q, p.seqlen_k, p.window_left, p.window_right, p.causal);
  if (dense) {
    params->ahead_ctas =
        overlapped_preprocess_ctas(p, tile, params->grouped, has_features(p), params->jobs, params->heads_abreast,
                                   params->key_blocks, params->query_blocks, plan.sm_count);
  }
  params->cooperative = plan.cooperative;
  if (!is_wide(tile) && plan.cooperative) {
    // Pairs: waves are whole, so that CTAs that come late to a wave are late in the next one too, and nobody waits for
    // them there.
    if (params->grouped.pairs) {
      params->ctas = ceil_div(params->jobs, ceil_div(params->jobs, params->ctas));
      // Where the last one writes dq: the other kernels have no registers left for it.
      params->grouped.heads_apart =
          params->takes_turns && rotates_heads(tile) && begins_heads_apart(p.heads / lists, params->key_blocks_of_list);
    }
    params->wave_size = params->ctas;
    params->ahead_ctas = 0;  // CTAs that begin together would begin behind them
  }
  if (dense && !is_wide(tile) && params->chores == 0 && !params->last_writes_dq && is_narrow(p, plan.block_n)) {
    params->counts_a_head = params->key_blocks;
  }
  if (dense && params->chores == 0 && !params->last_writes_dq && params->last_round.parts == 1) {
    const int64_t left = left_to_conversion(p, visibility, params->jobs, params->key_blocks, params->query_blocks,
                                            plan.block_m, plan.block_n, plan.sm_count / tile.ctas);
    params->ctas = std::min(params->ctas, static_cast<int32_t>((plan.sm_count / tile.ctas - left) * tile.ctas));
  }
  if (begins_apart(given, tile, params->key_blocks, plan.sm_count)) params->wave_size = params->ctas;
  if (params->ahead_ctas > 0) {
    const int32_t rows = rows_of_flag(p);
    params->rows_ready = reinterpret_cast<int32_t*>(params->statistics.lse_log2) +
                         2 * RowStatistics::rows(false, p.batch, p.heads, p.seqlen_q, 0);
    while (1 << params->rows_of_flag_log2 < rows) ++params->rows_of_flag_log2;
    params->flags_a_head = static_cast<int32_t>(round_up(ceil_div(RowStatistics::padded(p.seqlen_q), rows), 4));
  }
  if (has_semaphores(sizes)) params->semaphores = reinterpret_cast<int32_t*>(zeroed + region.semaphore_offset);
  const BiasGradientScratch scratch = bias_gradient_of(sizes, tile);
  params->bias_gradient = bias_gradient(
      p, scratch, scratch.zeroed ? zeroed + region.bias_gradient_offset : base + workspace.partial_offset);
  if (copies_bias(tile.feature) && p.bias.data != nullptr) {
    const BiasGradient& g = params->bias_gradient;
    const bool has_batch = p.bias.batch_stride != 0, has_heads = p.bias.head_stride != 0;
    params->keeps_bias = has_batch && has_heads ? kEvictFirst : kEvictNormal;
    const HeadsView bias = {p.bias.data, p.bias.batch_stride, p.bias.row_stride, p.bias.head_stride};
    const HeadsView gradient = {g.data, g.batch_stride, g.row_stride, g.head_stride};
    if (!encode_heads(&params->bias, p.dtype, bias, base, p.seqlen_k, p.seqlen_q, has_heads ? p.heads : 1,
                      has_batch ? p.batch : 1, plan.block_m) ||
        (g.mode == BiasGradientMode::kStore && !encode_heads(&params->bias_gradient_map, p.dtype, gradient, base,
                                                             p.seqlen_k, p.seqlen_q, p.heads, p.batch, plan.block_m))) {
      return kNoTensorMap;
    }
  }
  params->gradient_scale = p.softmax_scale;
  if (p.dropout_p > 0.f) {
    params->dropout_scale = dropout_scale(p);
    params->dropout_threshold =
        p.dropout_layout == DropoutLayout::kFlash ? flash_threshold(p.dropout_p) : efficient_threshold(p.dropout_p);
    if (tile.feature != Feature::kNone && !copies_bias(tile.feature)) params->gradient_scale *= params->dropout_scale;
  }
  return nullptr;
}

template <typename T, int kTileIndex = 0>
const char* dispatch(int tile_index, bool features, const KernelParams& params, void* stream) {
  if constexpr (kTileIndex == kNumTiles) {
    return "sm90: no such tile";
  } else {
    constexpr Tile kTile = kTiles[kTileIndex];
    if constexpr (is_built(kTile.head_dim) && has_kernel(kTile, false)) {
      if (tile_index == kTileIndex && !features) return launch<T, kTileIndex, false>(params, stream);
    }
    if constexpr (is_built(kTile.head_dim) && has_kernel(kTile, true)) {
      if (tile_index == kTileIndex && features) return launch<T, kTileIndex, true>(params, stream);
    }
    return dispatch<T, kTileIndex + 1>(tile_index, features, params, stream);
  }
}

const char* launch_main(int tile_index, const KernelParams& params, void* stream) {
  if (params.jobs == 0) return nullptr;
  // A bias without elements has no address; the plan chose the tile for it all the same.
  const bool features = has_features(params.attention) || !has_kernel(kTiles[tile_index], false);
  return params.attention.dtype == DType::kBFloat16 ? dispatch<__nv_bfloat16>(tile_index, features, params, stream)
                                                    : dispatch<__half>(tile_index, features, params, stream);
}

template <typename T>
const char* launch_conversion(const Conversion& conversion, int32_t sm_count, void* stream) {
  constexpr int kSharedBytes = kConversionWarps * kConversionBytes;
  cudaError_t error =
      cudaFuncSetAttribute(conversion_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error == cudaSuccess) {
    cudaLaunchAttribute attribute = overlap_with_launch_before();
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(
        std::min<int64_t>(sm_count, ceil_div(int64_t{conversion.blocks}, int64_t{kConversionWarps}))));
    config.blockDim = dim3(kConversionWarps * 32);
    config.dynamicSmemBytes = kSharedBytes;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &attribute;
    config.numAttrs = 1;
    error = launch_kernel(config, conversion_kernel<T>, conversion);
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// dq from its sums, as they are finished. Packed rows, and what no kernel counts, by the launch that all families
// share.
const char* convert_dq(const AttentionBackwardParams& given, const AttentionPlan& plan,
                       const KernelParams& kernel_params, void* stream) {
  AttentionBackwardParams p = given;
  p.softmax_scale = kernel_params.gradient_scale;
  if (kernel_params.jobs == 0) return launch_convert_dq(p, plan.workspace, stream);
  const Tile& tile = kTiles[plan.config];
  const HeadsFinished finished = {kernel_params.finished, counts_of_key_block(kernel_params, tile), tile.block_n};
  if (p.cu_seqlens_q != nullptr || p.cu_seqlens_k != nullptr) {
    return launch_convert_dq(p, plan.workspace, stream, finished);
  }
  Conversion conversion;
  conversion.attention = p;
  conversion.finished = finished;
  conversion.counts_a_head = kernel_params.counts_a_head;
  if (kernel_params.counts_a_head > 1) conversion.heads_abreast = kernel_params.heads_abreast;
  conversion.sums =
      reinterpret_cast<const float*>(static_cast<const uint8_t*>(p.workspace) + plan.workspace.accumulator_offset);
  conversion.stride = static_cast<int32_t>(plan.workspace.row_stride);
  conversion.rows = kConversionBytes / (conversion.stride * 4);
  conversion.blocks_of_head = static_cast<int32_t>(ceil_div(p.seqlen_q, conversion.rows));
  conversion.taken = kernel_params.chores_taken;
  conversion.vectors = rows_aligned(p.dq);
  const int64_t blocks = int64_t{p.batch} * p.heads * conversion.blocks_of_head;
  if (blocks == 0) return nullptr;
  // Warps take one more than there are.
  if (blocks > std::numeric_limits<int32_t>::max() / 2) return "batch * heads * rows is too large for one launch";
  conversion.blocks = static_cast<int32_t>(blocks);
  switch (p.dq_dtype) {
    case DType::kFloat16:
      return launch_conversion<__half>(conversion, plan.sm_count, stream);
    case DType::kBFloat16:
      return launch_conversion<__nv_bfloat16>(conversion, plan.sm_count, stream);
    default:
      return launch_conversion<float>(conversion, plan.sm_count, stream);
  }
}

}  // namespace

const char* run(const AttentionBackwardParams& given, const AttentionPlan& plan, void* stream) {
  const Tile& tile = kTiles[plan.config];
  if (!begin_context()) return "the thread's current device has no context";
  AttentionBackwardParams params = given;
  if (const char* error = launch_bound_lengths(&params, plan.workspace, stream)) return error;
  const RowStatistics statistics = row_statistics(params, plan.workspace);
  KernelParams kernel_params;
  if (const char* error = make_params(params, plan, &kernel_params)) return error;
  RowsReady ready;
  if (kernel_params.ahead_ctas > 0) {
    ready = {reinterpret_cast<uint8_t*>(kernel_params.rows_ready), kernel_params.flags_a_head,
             kernel_params.heads_abreast};
    ready.ctas = ready.first_ctas = kernel_params.ahead_ctas;
    const bool grouped = params.heads != params.heads_kv;
    if (grouped || ready.ctas < most_statistics_ahead(is_wide(tile), plan.sm_count)) {
      // So few would keep the first jobs waiting: all write the rows of the first list of heads, of grouped heads those
      // of the first round, which is whole lists.
      const int64_t list = kernel_params.heads_abreast, rounds = ceil_div(kernel_params.jobs, kernel_params.ctas);
      const int64_t heads = grouped ? round_up(ceil_div(int64_t{params.batch} * params.heads, rounds), list) : list;
      ready.first_blocks = static_cast<int32_t>(heads * ceil_div(params.seqlen_q, rows_of_flag(params)));
      ready.first_ctas = plan.sm_count;
    }
  }
  const BiasGradientScratch scratch = bias_gradient_of(sizes_of(params), tile);
  if (const char* error =
          launch_zero_bias_gradient(params, kernel_params.bias_gradient, scratch, tile.block_m, tile.block_n, stream)) {
    return error;
  }
  if (const char* error = launch_preprocess(params, plan.workspace, statistics, stream, ready)) return error;
  if (const char* error = launch_main(plan.config, kernel_params, stream)) return error;
  const int32_t splits = kernel_params.grouped.splits, parts = kernel_params.last_round.parts;
  const bool converted = kernel_params.chores > 0 || kernel_params.last_writes_dq;
  if (kernel_params.jobs == 0 || !converted) {
    if (const char* error = convert_dq(params, plan, kernel_params, stream)) return error;
  }
  if (parts > 1) {
    if (const char* error = add_parts(params, kernel_params, plan.block_n, stream)) return error;
  }
  if (splits > 1) {
    if (const char* error = launch_add_partial_sums(params, kernel_params.attention, splits, stream)) return error;
  }
  if (const char* error = launch_reduce_bias_gradient(params, kernel_params.bias_gradient, scratch, stream)) {
    return error;
  }
  return launch_sink_gradient(params, statistics, stream);
}

}  // namespace flashbwd::sm90

// Runs a plan: encodes the kernel's parameters, then launches the preprocess, the kernel and what follows it.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "../../common/hopper.cuh"
#include "../../common/launch_driver.h"
#include "../../common/tensor_map.h"
#include "../dropout.h"
#include "../families.h"
#include "../index/arithmetic.h"
#include "../pre_post/bounded_lengths.h"
#include "../pre_post/launch.h"
#include "../pre_post/sink_gradient.h"
#include "config.h"
#include "generated_params.h"
#include "head_dim_512/launch.h"
#include "heads_map.h"
#include "kernel_params.h"
#include "layout.h"

namespace flashbwd::sm90 {
namespace {

uint8_t* workspace_at(const AttentionBackwardParams& p, int64_t offset) {
  return static_cast<uint8_t*>(p.workspace) + offset;
}

// dk and dv go to the caller's gradients, or with GQA splits to fp32 partial sums, (batch, heads_kv * splits, seqlen_k,
// columns) each.
void encode_key_gradients(const AttentionPlan& plan, KernelParams* params) {
  const AttentionBackwardParams& p = params->attention;
  params->dk = {p.dk, p.dk_dtype, p.head_dim, rows_aligned(p.dk, 2, 16)};
  params->dv = {p.dv, p.dv_dtype, p.head_dim_v, rows_aligned(p.dv, 2, 16)};
  const int32_t splits = params->schedule.gqa_splits;
  if (splits == 1) return;
  auto* sums = reinterpret_cast<float*>(workspace_at(p, plan.sm90.partial_sums_offset));
  for (KeyGradient* gradient : {&params->dk, &params->dv}) {
    HeadsView& view = gradient->view;
    view.data = sums;
    view.seq_stride = round_up(gradient->columns, 4);
    view.head_stride = view.seq_stride * p.seqlen_k;
    view.batch_stride = view.head_stride * p.heads_kv * splits;
    gradient->dtype = DType::kFloat32;
    gradient->vectors = true;
    sums += view.batch_stride * p.batch;
  }
}

bool encode_bias_maps(const AttentionPlan& plan, KernelParams* params) {
  const AttentionBackwardParams& p = params->attention;
  const BiasGradient& g = params->features.bias_gradient;
  const bool has_batch = p.bias.batch_stride != 0, has_heads = p.bias.head_stride != 0;
  // A bias that no other head reads need not stay in L2.
  params->features.bias_cache_hint = has_batch && has_heads ? kEvictFirst : kEvictNormal;
  const HeadsView bias = {p.bias.data, p.bias.batch_stride, p.bias.row_stride, p.bias.head_stride};
  const HeadsView gradient = {g.data, g.batch_stride, g.row_stride, g.head_stride};
  const MapShape of_bias = {p.seqlen_q, has_heads ? p.heads : 1, has_batch ? p.batch : 1};
  return encode_heads(&params->maps.bias, p.dtype, bias, p.workspace, p.seqlen_k, of_bias, plan.block_m) &&
         (g.mode != BiasGradientMode::kStore ||
          encode_heads(&params->maps.bias_gradient, p.dtype, gradient, p.workspace, p.seqlen_k,
                       {p.seqlen_q, p.heads, p.batch}, plan.block_m));
}

bool encode_maps(const AttentionPlan& plan, KernelParams* params) {
  const AttentionBackwardParams& p = params->attention;
  const Tile& tile = kTiles[plan.config];
  const WorkspaceLayout& workspace = plan.workspace;
  TensorMaps& maps = params->maps;
  void* const fallback = p.workspace;
  const bool packed_q = p.cu_seqlens_q != nullptr, packed_k = p.cu_seqlens_k != nullptr;
  const int64_t rows_q = packed_q ? p.total_q : p.seqlen_q, batch_q = packed_q ? 1 : p.batch;
  const int64_t rows_k = packed_k ? p.total_k : p.seqlen_k, batch_k = packed_k ? 1 : p.batch;
  const MapShape of_q = {rows_q, p.heads, batch_q}, of_k = {rows_k, p.heads_kv, batch_k};
  const int32_t keys_per_cta = tile.block_n / tile.ctas, row = row_bytes(tile);
  const int64_t slab_rows = packed_q ? p.heads * p.total_q : p.seqlen_q;
  bool done = encode_heads(&maps.q, p.dtype, p.q, fallback, p.head_dim, of_q, plan.block_m, row) &&
              encode_heads(&maps.dout, p.dtype, p.dout, fallback, p.head_dim_v, of_q, plan.block_m, row) &&
              encode_heads(&maps.k, p.dtype, p.k, fallback, p.head_dim, of_k, keys_per_cta, row) &&
              encode_heads(&maps.v, p.dtype, p.v, fallback, p.head_dim_v, of_k, keys_per_cta, row) &&
              encode_map(&maps.dq_accumulator, CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
                         workspace_at(p, workspace.accumulator_offset), p.head_dim,
                         {{slab_rows, workspace.row_stride * 4},
                          {packed_q ? 1 : int64_t{p.batch} * p.heads, slab_rows * workspace.row_stride * 4}},
                         32, 64);
  // With a block mask always, because the consumers cannot store them. They are allocated like k and v, which TMA
  // loads.
  const bool fits_tma =
      params->dk.dtype == p.dtype && params->dv.dtype == p.dtype && params->dk.vectors && params->dv.vectors;
  params->tma_dkdv = !is_large(tile) && (has(tile, feature::kBlockMask) || fits_tma);
  if (params->tma_dkdv) {
    done = done && encode_heads(&maps.dk, p.dtype, p.dk, fallback, p.head_dim, of_k, 64) &&
           encode_heads(&maps.dv, p.dtype, p.dv, fallback, p.head_dim_v, of_k, 64);
  }
  if (params->schedule.last_add_writes_dq) {
    done = done && encode_heads(&maps.dq, p.dtype, p.dq, fallback, p.head_dim, of_q, 64);
  }
  if (copies_bias(tile) && p.bias.data != nullptr) done = done && encode_bias_maps(plan, params);
  return done;
}

const char* make_params(const AttentionBackwardParams& p, const AttentionPlan& plan, KernelParams* params) {
  const Tile& tile = kTiles[plan.config];
  const KernelPlan& kernel = plan.sm90;
  params->attention = p;
  params->schedule = kernel.schedule;
  params->lse_delta = lse_delta_of(p, plan.workspace);
  params->rows_may_be_poisoned =
      p.cu_seqlens_q != nullptr || p.cu_seqlens_k != nullptr || p.seqused_q != nullptr || p.seqused_k != nullptr;

  auto* const zeroed = reinterpret_cast<int32_t*>(workspace_at(p, plan.workspace.semaphore_offset));
  params->tiles_taken = zeroed;
  params->dq.finished = zeroed + 1;
  params->dq.accumulator = reinterpret_cast<const float*>(workspace_at(p, plan.workspace.accumulator_offset));
  params->dq.row_stride = static_cast<int32_t>(plan.workspace.row_stride);
  params->dq.starts_at_zero = plan.workspace.zero_accumulator;
  if (kernel.has_semaphores) {
    params->dq.semaphores = zeroed + kernel.zeroed.semaphore_offset / static_cast<int64_t>(sizeof(int32_t));
  }
  if (params->schedule.preprocess_ctas > 0) params->preprocess = rows_ready_flags(p, params->lse_delta);
  FeatureParams& features = params->features;
  const int64_t scratch = kernel.bias_gradient.zeroed
                              ? plan.workspace.semaphore_offset + kernel.zeroed.bias_gradient_offset
                              : plan.workspace.partial_offset;
  features.bias_gradient = bias_gradient(p, kernel.bias_gradient, workspace_at(p, scratch));
  if (kernel.orders_bias_adds) {
    features.bias_semaphores = zeroed + kernel.zeroed.bias_semaphore_offset / static_cast<int64_t>(sizeof(int32_t));
  }
  params->gradient_scale = p.softmax_scale;
  if (p.dropout_p > 0.f) {
    features.dropout_scale = dropout_scale(p);
    features.dropout_threshold =
        p.dropout_layout == DropoutLayout::kFlash ? flash_threshold(p.dropout_p) : efficient_threshold(p.dropout_p);
    if (!is_large(tile) && !copies_bias(tile)) params->gradient_scale *= features.dropout_scale;
  }
  encode_key_gradients(plan, params);
  return encode_maps(plan, params) ? nullptr : "sm90: the driver could not encode a tensor map";
}

template <typename T, int kHeadDim, int... kLarger>
const char* dispatch(int tile_index, const KernelParams& params, void* stream) {
  if constexpr (is_built(kHeadDim)) {
    if (kTiles[tile_index].head_dim == kHeadDim) return launch<T, kHeadDim>(tile_index, params, stream);
  }
  if constexpr (sizeof...(kLarger) > 0) return dispatch<T, kLarger...>(tile_index, params, stream);
  return "sm90: no such tile";
}

template <typename T>
const char* dispatch_head_dim(int tile_index, const KernelParams& params, void* stream) {
  return dispatch<T, 32, 64, 80, 96, 128, 192, 256>(tile_index, params, stream);
}

const char* launch_score_mod(const CompiledScoreMod& score_mod, const Tile& tile, const KernelParams& params,
                             void* stream) {
  GeneratedParams all;
  static_cast<KernelParams&>(all) = params;
  static_cast<CapturedValues&>(all) = score_mod;
  LaunchForm form;
  form.overlaps = true;
  form.cooperative = params.schedule.dispatch == Dispatch::kStatic;
  cudaError_t error = cudaGetDevice(&form.device);
  if (error == cudaSuccess) {
    form.cluster = tile.ctas;  // along y
    const dim3 grid(params.schedule.wave_size, tile.ctas);
    const CUlaunchConfig config = config_of(grid, threads_of(tile), kSharedMemoryBytes, stream);
    error = launch_with_driver(&all, score_mod.kernel, config, form);
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

const char* launch_kernel_of(const AttentionPlan& plan, const CompiledScoreMod* score_mod, const KernelParams& params,
                             void* stream) {
  if (params.schedule.work_tiles == 0) return nullptr;
  if (score_mod != nullptr) return launch_score_mod(*score_mod, kTiles[plan.config], params, stream);
  return params.attention.dtype == DType::kBFloat16 ? dispatch_head_dim<__nv_bfloat16>(plan.config, params, stream)
                                                    : dispatch_head_dim<__half>(plan.config, params, stream);
}

const char* finish_dq(const AttentionPlan& plan, const KernelParams& params, void* stream) {
  AttentionBackwardParams p = params.attention;
  p.softmax_scale = params.gradient_scale;
  if (params.schedule.work_tiles == 0) return launch_dq_postprocess(p, plan.workspace, stream);
  if (params.schedule.last_add_writes_dq) return nullptr;
  const Tile& tile = kTiles[plan.config];
  const int32_t adds = dq_adders(tile) * params.schedule.gqa_splits;
  return launch_dq_postprocess(p, plan.workspace, stream, {params.dq.finished, adds, tile.block_n});
}

RowsReadyWriter rows_ready(const KernelParams& params) {
  const RowsReadyFlags& flags = params.preprocess;
  const Schedule& s = params.schedule;
  if (s.preprocess_ctas == 0) return {};
  return {reinterpret_cast<uint8_t*>(flags.words), flags.flags_per_head, s.heads_per_group, s.preprocess_ctas};
}

const char* run(const AttentionBackwardParams& caller_params, const AttentionPlan& plan,
                const CompiledScoreMod* score_mod, void* stream) {
  if (!begin_context()) return "the thread's current device has no context";
  if (plan.config >= kNumTiles) return head_dim_512::run(caller_params, plan, stream);
  const Tile& tile = kTiles[plan.config];
  const BiasGradientScratch& scratch = plan.sm90.bias_gradient;
  AttentionBackwardParams p = caller_params;
  if (const char* error = launch_bound_lengths(&p, plan.workspace, stream)) return error;
  KernelParams params;
  if (const char* error = make_params(p, plan, &params)) return error;
  const BiasGradient& bias_gradient = params.features.bias_gradient;
  if (const char* error = launch_zero_bias_gradient(p, bias_gradient, tile.block_m, tile.block_n, stream)) {
    return error;
  }
  if (const char* error = launch_preprocess(p, plan.workspace, params.lse_delta, stream, rows_ready(params))) {
    return error;
  }
  if (const char* error = launch_kernel_of(plan, score_mod, params, stream)) return error;
  if (const char* error = finish_dq(plan, params, stream)) return error;
  if (params.schedule.gqa_splits > 1) {
    for (const PartialSums& sums : {PartialSums{params.dk.view, p.dk, p.dk_dtype, p.head_dim},
                                    PartialSums{params.dv.view, p.dv, p.dv_dtype, p.head_dim_v}}) {
      if (const char* error = launch_add_partial_sums(p, sums, params.schedule.gqa_splits, stream)) return error;
    }
  }
  if (const char* error = launch_reduce_bias_gradient(p, bias_gradient, scratch, stream)) return error;
  return launch_sink_gradient(p, params.lse_delta, stream);
}

}  // namespace

const char* run(const AttentionBackwardParams& params, const AttentionPlan& plan, void* stream) {
  return run(params, plan, nullptr, stream);
}

const char* run_score_mod(const AttentionBackwardParams& params, const AttentionPlan& plan,
                          const CompiledScoreMod& score_mod, void* stream) {
  return run(params, plan, &score_mod, stream);
}

}  // namespace flashbwd::sm90

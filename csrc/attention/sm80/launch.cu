// The launches of one call: preprocess, main kernel, sums of split work tiles, dq postprocess, bias and sink gradients.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "../../common/launch.h"
#include "../../common/launch_driver.h"
#include "../dropout.h"
#include "../families.h"
#include "../pre_post/bounded_lengths.h"
#include "../pre_post/launch.h"
#include "../pre_post/sink_gradient.h"
#include "combine_splits.cuh"
#include "config.h"
#include "generated_params.h"
#include "gradient_target.h"
#include "launch.h"
#include "layout.h"

namespace flashbwd::sm80 {
namespace {

// True if the kernel can access the rows as 16-byte vectors of q's 16-bit dtype.
template <typename View>
bool has_16_byte_vectors(const View& view, DType dtype) {
  return view.data != nullptr && view.dtype == dtype && is_16bit(dtype) && has_vector_rows(view, 8);
}

// Sums dk and dv of split work tiles over their CTAs.
const char* launch_combine_splits(const KernelParams& params, const Tile& tile, void* stream) {
  const SplitTiles& split = params.schedule.split_tiles;
  if (split.count == 0) return nullptr;
  const auto vectors = [](const GradientTarget& target) {
    return rows_aligned(target.view, size_of(target.dtype), 4 * size_of(target.dtype));
  };
  const CombineSplitsArguments arguments = {params, tile.block_n, vectors(params.dk), vectors(params.dv)};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(split.count), static_cast<unsigned>(tile.block_n / kCombineRows), 2);
  config.blockDim = dim3(kCombineThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  const cudaError_t error = launch_kernel(config, combine_splits_kernel, arguments);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

uint8_t* workspace_at(const AttentionBackwardParams& p, int64_t offset) {
  return static_cast<uint8_t*>(p.workspace) + offset;
}

// The accumulator of dq, and the counters and semaphores in the zeroed region.
void encode_dq(const AttentionPlan& plan, KernelParams* params) {
  const AttentionBackwardParams& p = params->attention;
  const WorkspaceLayout& workspace = plan.workspace;
  const ZeroedRegion& zeroed = plan.sm80.zeroed;
  const auto zeroed_words = [&](int64_t offset) {
    return reinterpret_cast<int32_t*>(workspace_at(p, workspace.semaphore_offset + offset));
  };
  params->dq_accumulator = reinterpret_cast<float*>(workspace_at(p, workspace.accumulator_offset));
  params->dq_row_stride = workspace.row_stride;
  params->dq_blocks = workspace.dq_blocks;
  params->work_tile_counter = zeroed_words(0);
  if (plan.sm80.schedule.ordered_dq) {
    params->dq_semaphores = zeroed_words(zeroed.dq_semaphores_offset);
    params->semaphores_per_head = zeroed.semaphores_per_head;
  }
  if (plan.sm80.schedule.first_stores) {
    params->stored = zeroed_words(zeroed.stored_offset);
    params->stored_words = static_cast<int32_t>(zeroed.stored_words);
  }
}

// dk and dv, and the sums of gradients in the partial region.
void encode_gradients(const AttentionPlan& plan, KernelParams* params) {
  const AttentionBackwardParams& p = params->attention;
  const PartialRegion& partial = plan.sm80.partial;
  const auto partial_floats = [&](int64_t offset) {
    return reinterpret_cast<float*>(workspace_at(p, plan.workspace.partial_offset + offset));
  };
  if (plan.sm80.schedule.whole_heads) {
    params->dq_tiles = partial_floats(partial.dq_tiles_offset);
    params->dq = gradient_target(p.dq, p.dq_dtype, p.head_dim, nullptr);
  }
  if (kTiles[plan.config].large) params->gradients = partial_floats(partial.gradients_offset);
  params->dk = gradient_target(p.dk, p.dk_dtype, p.head_dim, partial_floats(partial.partial_dk_offset));
  params->dv = gradient_target(p.dv, p.dv_dtype, p.head_dim_v, partial_floats(partial.partial_dv_offset));
}

void encode_bias(const AttentionPlan& plan, KernelParams* params) {
  const AttentionBackwardParams& p = params->attention;
  const KernelPlan& kernel = plan.sm80;
  const int64_t zeroed_offset = plan.workspace.semaphore_offset, partial_offset = plan.workspace.partial_offset;
  params->bias_gradient =
      bias_gradient(p, kernel.bias_gradient,
                    workspace_at(p, kernel.bias_gradient.zeroed ? zeroed_offset + kernel.zeroed.bias_gradient_offset
                                                                : partial_offset));
  const bool capped = p.softcap > 0.f;  // softcap keeps its factor in the ds tile, so vectors cannot go through it
  params->bias_vectors = !capped && p.bias.row_stride != 0 && has_16_byte_vectors(p.bias, p.dtype);
  const BiasGradient& g = params->bias_gradient;
  params->bias_gradient_vectors = !capped && g.mode == BiasGradientMode::kStore && has_16_byte_vectors(g, p.dtype);
  if (kernel.schedule.ordered_bias_gradient) {
    params->ordered_bias_sums = {
        reinterpret_cast<float*>(workspace_at(p, partial_offset + kernel.partial.bias_sums_offset)),
        reinterpret_cast<int32_t*>(workspace_at(p, zeroed_offset + kernel.zeroed.bias_semaphores_offset)),
        kernel.bias_sharers};
  }
}

KernelParams make_params(const AttentionBackwardParams& p, const AttentionPlan& plan) {
  const int64_t bytes = size_of(p.dtype);
  KernelParams params;
  params.attention = p;
  params.lse_delta = lse_delta_of(p, plan.workspace);
  params.schedule = plan.sm80.schedule;
  // Batches that share a bias read it, and add to its gradient, while it is in L2.
  params.swizzle_batches = !params.schedule.packed_work_tiles && p.bias.data != nullptr && p.bias.batch_stride == 0;
  encode_dq(plan, &params);
  encode_gradients(plan, &params);
  encode_bias(plan, &params);
  params.q_aligned = rows_aligned(p.q, bytes, 16);
  params.k_aligned = rows_aligned(p.k, bytes, 16);
  params.v_aligned = rows_aligned(p.v, bytes, 16);
  params.dout_aligned = rows_aligned(p.dout, bytes, 16);
  if (p.dropout_p > 0.f) {
    params.dropout_scale = dropout_scale(p);
    params.dropout_threshold =
        p.dropout_layout == DropoutLayout::kFlash ? flash_threshold(p.dropout_p) : efficient_threshold(p.dropout_p);
  }
  return params;
}

// The rows of a bias that heads share have no 16-byte alignment: adds to its gradient in any order. Zeroes the gradient
// in the scratch of the ordered sums.
const char* add_bias_gradient_unordered(const BiasGradientScratch& scratch, KernelParams* params, void* stream) {
  params->bias_gradient = bias_gradient(params->attention, scratch, params->ordered_bias_sums.sums);
  params->bias_gradient_vectors = false;
  params->ordered_bias_sums = {};
  const cudaError_t error = cudaMemsetAsync(params->bias_gradient.data, 0, scratch.elements * sizeof(float),
                                            static_cast<cudaStream_t>(stream));
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// The kernel that supports the features of the call. Whether 16-byte vectors can load a bias and store its gradient
// depends on the caller's pointers, so the launch decides between the bias kernels.
Variant variant_of(const KernelParams& params, const Tile& tile) {
  const Schedule& schedule = params.schedule;
  const AttentionBackwardParams& p = params.attention;
  const bool others = p.key_mask.data != nullptr || p.alibi_slopes != nullptr || p.softcap > 0.f || p.dropout_p > 0.f;
  if (p.block_mask.lists != nullptr) return Variant::kBlockMask;
  if (schedule.whole_heads) return Variant::kWholeHeads;
  if (schedule.first_stores) return Variant::kFirstStores;
  if (p.bias.data == nullptr)
    return others ? Variant::kAllFeatures : schedule.loads_ahead ? Variant::kLoadsAhead : Variant::kPlain;
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

const char* launch_score_mod(const CompiledScoreMod& score_mod, const KernelParams& params, const Tile& tile,
                             void* stream) {
  GeneratedParams all;
  static_cast<KernelParams&>(all) = params;
  static_cast<CapturedValues&>(all) = score_mod;
  LaunchForm form;
  cudaError_t error = cudaGetDevice(&form.device);
  if (error == cudaSuccess) {
    const CUlaunchConfig config =
        config_of(dim3(params.schedule.num_ctas), tile.threads(), generated_shared_bytes(tile), stream);
    error = launch_with_driver(&all, score_mod.kernel, config, form);
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

const char* launch_main(const AttentionPlan& plan, const CompiledScoreMod* score_mod, const KernelParams& params,
                        void* stream) {
  if (params.schedule.num_work_tiles() == 0) return nullptr;
  if (score_mod != nullptr) return launch_score_mod(*score_mod, params, kTiles[plan.config], stream);
  const Variant variant = variant_of(params, kTiles[plan.config]);
  switch (params.attention.dtype) {
    case DType::kBFloat16:
      return dispatch<__nv_bfloat16>(plan.config, params, variant, stream);
    case DType::kFloat16:
      return dispatch<__half>(plan.config, params, variant, stream);
    default:
      return dispatch<float>(plan.config, params, variant, stream);
  }
}

const char* run(const AttentionBackwardParams& caller_params, const AttentionPlan& plan,
                const CompiledScoreMod* score_mod, void* stream) {
  const Schedule& schedule = plan.sm80.schedule;
  AttentionBackwardParams p = caller_params;
  if (const char* error = launch_bound_lengths(&p, plan.workspace, stream)) return error;
  KernelParams params = make_params(p, plan);
  BiasGradientScratch scratch = plan.sm80.bias_gradient;
  if (schedule.ordered_bias_gradient && !(params.bias_vectors && params.bias_gradient_vectors)) {
    scratch = plan.sm80.unordered_bias_gradient;
    if (const char* error = add_bias_gradient_unordered(scratch, &params, stream)) return error;
  }
  if (const char* error = launch_preprocess(p, plan.workspace, params.lse_delta, stream)) return error;
  if (const char* error = launch_main(plan, score_mod, params, stream)) return error;
  if (const char* error = launch_combine_splits(params, kTiles[plan.config], stream)) return error;
  if (!schedule.whole_heads) {
    if (const char* error = launch_dq_postprocess(p, plan.workspace, stream)) return error;
  }
  if (const char* error = launch_reduce_bias_gradient(p, params.bias_gradient, scratch, stream)) return error;
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

}  // namespace flashbwd::sm80

// The launches of one call: the main kernel, and for a shared bias the sum of its gradient over the CTAs.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "../families.h"
#include "../pre_post/bounded_lengths.h"
#include "../sm80/gradient_target.h"
#include "config.h"
#include "launch.h"

namespace flashbwd::short_sequences {
namespace {

// The problem of which the partial sums are the gradient of a bias (slots, planes, seqlen_q, seqlen_k), broadcast over
// the slots.
AttentionBackwardParams problem_of_sums(const AttentionBackwardParams& p, const KernelPlan& kernel) {
  AttentionBackwardParams sums = p;
  sums.batch = kernel.bias_slots;
  sums.heads = kernel.bias_planes;
  return sums;
}

KernelParams make_params(const AttentionBackwardParams& p, const AttentionPlan& plan) {
  const KernelPlan& kernel = plan.short_sequences;
  KernelParams params;
  params.attention = p;
  params.slots = kernel.slots;
  params.heads_per_kv = p.heads / p.heads_kv;
  params.dq = sm80::gradient_target(p.dq, p.dq_dtype, p.head_dim);
  params.keys[0] = sm80::gradient_target(p.dv, p.dv_dtype, p.head_dim_v);
  params.keys[1] = sm80::gradient_target(p.dk, p.dk_dtype, p.head_dim);
  params.shared = kernel.shared;
  void* const partial = static_cast<uint8_t*>(p.workspace) + plan.workspace.partial_offset;
  params.bias_gradient =
      bias_gradient(kernel.bias_slots > 0 ? problem_of_sums(p, kernel) : p, kernel.bias_gradient, partial);
  params.bias_planes = kernel.bias_planes;
  params.bias_pairs = p.bias.data != nullptr && has_vector_rows(p.bias, 2);
  params.bias_gradient_pairs =
      params.bias_gradient.mode != BiasGradientMode::kNone && has_vector_rows(params.bias_gradient, 2);
  return params;
}

// Finds row tile_index of kTiles.
template <typename T, int kTileIndex = 0>
const char* dispatch(int tile_index, const KernelParams& params, bool features, void* stream) {
  if constexpr (kTileIndex == kNumTiles) {
    return "short: no such tile";
  } else {
    if constexpr (is_built(kTiles[kTileIndex].head_dim)) {
      if (tile_index == kTileIndex) return launch<T, kTiles[kTileIndex].head_dim>(tile_index, params, features, stream);
    }
    return dispatch<T, kTileIndex + 1>(tile_index, params, features, stream);
  }
}

}  // namespace

const char* run(const AttentionBackwardParams& caller_params, const AttentionPlan& plan, void* stream) {
  const KernelPlan& kernel = plan.short_sequences;
  AttentionBackwardParams p = caller_params;
  if (const char* error = launch_bound_lengths(&p, plan.workspace, stream)) return error;
  const KernelParams params = make_params(p, plan);
  const char* const error = p.dtype == DType::kFloat16
                                ? dispatch<__half>(plan.config, params, kernel.features, stream)
                                : dispatch<__nv_bfloat16>(plan.config, params, kernel.features, stream);
  if (error != nullptr || kernel.bias_slots == 0) return error;
  return launch_reduce_bias_gradient(problem_of_sums(p, kernel), params.bias_gradient, kernel.bias_gradient, stream);
}

}  // namespace flashbwd::short_sequences

// Runs a plan: encodes the parameters of the kernels, then launches the preprocess and both kernels.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../../../common/tensor_map.h"
#include "../../pre_post/bounded_lengths.h"
#include "../../pre_post/launch.h"
#include "../../pre_post/sink_gradient.h"
#include "../config.h"
#include "../heads_map.h"
#include "config.h"
#include "kernel_params.h"
#include "launch.h"

namespace flashbwd::sm90::head_dim_512 {
namespace {

const char* make_params(const AttentionBackwardParams& p, const AttentionPlan& plan, KernelParams* params) {
  const bool packed_q = p.cu_seqlens_q != nullptr, packed_k = p.cu_seqlens_k != nullptr;
  params->attention = p;
  params->lse_delta = lse_delta_of(p, plan.workspace);
  params->dq = {p.dq, p.dq_dtype, p.head_dim, rows_aligned(p.dq, 2, 16)};
  params->dk = {p.dk, p.dk_dtype, p.head_dim, rows_aligned(p.dk, 2, 16)};
  params->dv = {p.dv, p.dv_dtype, p.head_dim_v, rows_aligned(p.dv, 2, 16)};
  params->key_tiles = static_cast<int32_t>(work_tiles(packed_k, p.batch, p.heads_kv, p.seqlen_k, p.total_k));
  params->query_tiles = static_cast<int32_t>(work_tiles(packed_q, p.batch, p.heads, p.seqlen_q, p.total_q));
  params->rows_may_be_poisoned = packed_q || packed_k || p.seqused_q != nullptr || p.seqused_k != nullptr;
  const MapShape of_q = {packed_q ? p.total_q : p.seqlen_q, p.heads, packed_q ? 1 : p.batch};
  const MapShape of_k = {packed_k ? p.total_k : p.seqlen_k, p.heads_kv, packed_k ? 1 : p.batch};
  const bool done = encode_heads(&params->q, p.dtype, p.q, p.workspace, p.head_dim, of_q, kRows) &&
                    encode_heads(&params->dout, p.dtype, p.dout, p.workspace, p.head_dim_v, of_q, kRows) &&
                    encode_heads(&params->k, p.dtype, p.k, p.workspace, p.head_dim, of_k, kRows) &&
                    encode_heads(&params->v, p.dtype, p.v, p.workspace, p.head_dim_v, of_k, kRows);
  return done ? nullptr : "sm90: the driver could not encode a tensor map";
}

// Finds row `index` of kHeadDims.
template <typename T, int kIndex = 0>
const char* dispatch(int32_t index, const KernelParams& params, void* stream) {
  if constexpr (kIndex == kNumHeadDims) {
    return "sm90: no such head dimension";
  } else {
    if constexpr (is_built(kHeadDims[kIndex])) {
      if (index == kIndex) return launch<T, kHeadDims[kIndex]>(params, stream);
    }
    return dispatch<T, kIndex + 1>(index, params, stream);
  }
}

}  // namespace

const char* run(const AttentionBackwardParams& caller_params, const AttentionPlan& plan, void* stream) {
  AttentionBackwardParams p = caller_params;
  if (const char* error = launch_bound_lengths(&p, plan.workspace, stream)) return error;
  KernelParams params;
  if (const char* error = make_params(p, plan, &params)) return error;
  if (const char* error = launch_preprocess(p, plan.workspace, params.lse_delta, stream)) return error;
  const int32_t index = plan.config - kNumTiles;
  const char* const error = p.dtype == DType::kBFloat16 ? dispatch<__nv_bfloat16>(index, params, stream)
                                                        : dispatch<__half>(index, params, stream);
  return error != nullptr ? error : launch_sink_gradient(p, params.lse_delta, stream);
}

}  // namespace flashbwd::sm90::head_dim_512

// The arguments of attention_backward as plain data, the one table of checks on them, and what they amount to.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "../common/types.h"
#include "params.h"

namespace flashbwd {

// The operator's arguments, before any check. Names are those of the public function, so that messages are too.
struct AttentionArguments {
  TensorDesc dout, q, k, v, out, softmax_lse;
  TensorDesc attn_bias, alibi_slopes, sink, dlse;
  TensorDesc rng_seed, rng_offset;
  TensorDesc cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k;
  std::optional<double> softmax_scale;
  std::string causal = "none";  // "none", "bottom_right", "top_left"
  int64_t window_left = -1;
  int64_t window_right = -1;
  double softcap = 0.0;
  double dropout_p = 0.0;
  std::string rng_layout;  // "", "flash", "efficient32", "efficient64"
  std::optional<int64_t> max_seqlen_q, max_seqlen_k;
  bool need_dbias = true;
  bool deterministic = false;
  std::string backend = "auto";      // or the name of a backend, which is then taken or refused with the reason
  bool allow_tf32 = false;           // products of float32 may be rounded to TF32
  TensorDesc dq, dk, dv, workspace;  // given by the caller, or undefined
  bool plan_only = false;            // nothing will run: lengths may lie on the CPU beside tensors that do not
};

// A checked problem: everything that plans and launchers ask about it.
struct AttentionProblem {
  DType dtype = DType::kFloat32;
  Device device;
  bool varlen = false;
  int64_t batch = 0;
  int64_t heads = 0;
  int64_t heads_kv = 0;
  int64_t head_dim = 0;
  int64_t head_dim_v = 0;
  int64_t seqlen_q = 0;  // the maximum when varlen
  int64_t seqlen_k = 0;
  int64_t total_q = 0;  // batch * seqlen_q when dense
  int64_t total_k = 0;
  // Physical lengths of each sequence where they are known on the host (CPU cu_seqlens); empty otherwise.
  std::vector<int64_t> seqlens_q, seqlens_k;
  double softmax_scale = 1.0;
  CausalAlignment causal = CausalAlignment::kNone;
  int64_t window_left = -1;
  int64_t window_right = -1;  // 0 when causal
  double softcap = 0.0;
  double dropout_p = 0.0;
  DropoutLayout dropout_layout = DropoutLayout::kNone;
  bool has_bias = false;
  bool need_dbias = false;
  DType bias_dtype = DType::kFloat32;
  bool bias_broadcast_batch = false, bias_broadcast_head = false, bias_broadcast_row = false,
       bias_broadcast_col = false;
  bool bias_has_rows = false;  // of its own for each query, of q's dtype, adjacent keys, 16-byte aligned
  bool bias_of_keys = false;   // the same for all queries
  bool has_alibi = false;
  bool has_sink = false;
  bool has_dlse = false;
  bool has_seqused = false;
  bool deterministic = false;
  bool tf32 = false;        // float32 inputs whose products may be rounded to TF32
  bool aligned_16 = false;  // every pointer and stride of q, k, v, out, dout is a multiple of 16 bytes
  DType dq_dtype = DType::kFloat32, dk_dtype = DType::kFloat32, dv_dtype = DType::kFloat32;
  std::string backend = "auto";
};

// Throws std::invalid_argument whose message names the argument, what was expected and what came.
AttentionProblem check_attention(const AttentionArguments& arguments);

// The same checks on what a forward is given: `arguments` hold no out, dout, softmax_lse or rng_state.
void check_attention_forward(AttentionArguments arguments);

// The parameters of a launch. `arguments` hold every output: dq, dk, dv and the workspace; dbias and dsink are
// undefined where not asked for. Philox seeds on the CPU are read here, those on the GPU are passed as pointers.
AttentionBackwardParams make_params(const AttentionArguments& arguments, const AttentionProblem& problem,
                                    const TensorDesc& dbias, const TensorDesc& dsink);

}  // namespace flashbwd

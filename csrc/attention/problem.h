// The arguments of attention_backward as plain data, and the checks that turn them into an AttentionProblem.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "../common/types.h"
#include "params.h"

namespace flashbwd {

// The tensors that a call may have. T is their type: TensorDesc here, a torch tensor in csrc/api.
template <typename T>
struct OptionalTensors {
  T attn_bias, key_mask, alibi_slopes, sink, dlse;
  T rng_seed, rng_offset;
  T cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k;
};

// The operator's arguments before any check. The names are those of the public function, because messages quote them.
// A new option is a member here or of OptionalTensors, and a line in for_each_tensor or for_each_scalar.
struct AttentionArguments : OptionalTensors<TensorDesc> {
  TensorDesc dout, q, k, v, out, softmax_lse;
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
  std::string backend = "auto";      // or a backend's name; the plan then uses this backend or reports why it cannot
  bool allow_tf32 = false;           // matrix products of float32 inputs may round their operands to TF32
  TensorDesc dq, dk, dv, workspace;  // passed by the caller, or undefined
  TensorDesc block_lists, block_entries, block_bits;  // of a block mask (params.h), or undefined
  bool block_mask_covers = false;                     // every query block of every head is in a list
  // Queries and keys of a tile of the lists. If both are 0, nothing will run: the plan shows which tile lists must
  // have.
  int64_t block_m = 0, block_n = 0;
  bool has_score_mod = false;  // generated and compiled at run time (families.h)
  bool plan_only = false;      // nothing will run: cu_seqlens and seqused may be on the CPU even if q is not
};

// The operators that have an option, besides the backward, which has all of them.
enum OptionOf : unsigned { kOfBackward = 0, kOfForward = 1, kOfReference = 2 };

// Calls visit(name, operators, pointer to member...) for each option, with one pointer for each of the given structs.
// The order is that of the operators' schemas, which have softmax_scale between the tensors and the scalars. It is not
// visited, because only the backward may omit it.
template <typename... Structs, typename Visit>
void for_each_tensor(Visit visit) {
  visit("attn_bias", kOfForward | kOfReference, &Structs::attn_bias...);
  visit("key_mask", kOfForward | kOfReference, &Structs::key_mask...);
  visit("alibi_slopes", kOfForward | kOfReference, &Structs::alibi_slopes...);
  visit("sink", kOfForward | kOfReference, &Structs::sink...);
  visit("dlse", kOfReference, &Structs::dlse...);
  visit("rng_seed", kOfReference, &Structs::rng_seed...);
  visit("rng_offset", kOfReference, &Structs::rng_offset...);
  visit("cu_seqlens_q", kOfForward | kOfReference, &Structs::cu_seqlens_q...);
  visit("cu_seqlens_k", kOfForward | kOfReference, &Structs::cu_seqlens_k...);
  visit("seqused_q", kOfReference, &Structs::seqused_q...);
  visit("seqused_k", kOfReference, &Structs::seqused_k...);
}

template <typename... Structs, typename Visit>
void for_each_scalar(Visit visit) {
  visit("causal", kOfForward | kOfReference, &Structs::causal...);
  visit("window_left", kOfForward | kOfReference, &Structs::window_left...);
  visit("window_right", kOfForward | kOfReference, &Structs::window_right...);
  visit("softcap", kOfForward | kOfReference, &Structs::softcap...);
  visit("dropout_p", kOfForward | kOfReference, &Structs::dropout_p...);
  visit("rng_layout", kOfReference, &Structs::rng_layout...);
  visit("max_seqlen_q", kOfForward, &Structs::max_seqlen_q...);
  visit("max_seqlen_k", kOfForward, &Structs::max_seqlen_k...);
  visit("need_dbias", kOfBackward, &Structs::need_dbias...);
  visit("deterministic", kOfForward, &Structs::deterministic...);
  visit("backend", kOfForward, &Structs::backend...);
  visit("allow_tf32", kOfBackward, &Structs::allow_tf32...);
}

// A checked problem: all that plans and launchers need to know about a call.
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
  // Physical length of each sequence if cu_seqlens is on the CPU, otherwise empty.
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
  bool bias_has_rows = false;  // 16-byte aligned rows of q's dtype, contiguous keys, not broadcast over queries or keys
  bool bias_of_keys = false;   // every query has the same bias
  bool has_block_mask = false;
  bool has_score_mod = false;  // AttentionArguments::has_score_mod
  bool block_mask_covers = false;
  int64_t block_m = 0, block_n = 0;     // AttentionArguments::block_m, block_n
  int64_t block_mask_queries_seen = 0;  // by a key block, on average, in whole tiles
  bool has_key_mask = false;
  bool has_alibi = false;
  bool has_sink = false;
  bool has_dlse = false;
  bool has_seqused = false;
  bool deterministic = false;
  bool tf32 = false;           // float32 inputs, and matrix products may round their operands to TF32
  bool aligned_16 = false;     // every pointer and stride of q, k, v, out and dout is a multiple of 16 bytes
  bool dq_aligned_16 = false;  // the same for dq; a dq that the caller does not pass is allocated like q
  DType dq_dtype = DType::kFloat32, dk_dtype = DType::kFloat32, dv_dtype = DType::kFloat32;
  std::string backend = "auto";
};

// Throws std::invalid_argument. Its message names the argument, its value and what was expected.
AttentionProblem check_attention(const AttentionArguments& arguments);

// Applies the same checks to the arguments of a forward pass. `arguments` has no out, dout, softmax_lse or rng_state.
void check_attention_forward(AttentionArguments arguments);

// The parameters of a launch. `arguments` has all outputs (dq, dk, dv) and the workspace. dbias and dsink are undefined
// if not requested. Philox seeds on the CPU are read here; seeds on the GPU are passed as pointers.
AttentionBackwardParams make_params(const AttentionArguments& arguments, const AttentionProblem& problem,
                                    const TensorDesc& dbias, const TensorDesc& dsink);

}  // namespace flashbwd

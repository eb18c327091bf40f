// One call of an attention backward: its tensors and options, from an operator's stack or from C++.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "../attention/problem.h"
#include "tensors.h"

namespace flashbwd {

// A call's tensors, which own what `arguments` point to.
struct AttentionCall {
  Tensor dout, q, k, v, out, softmax_lse;
  std::optional<Tensor> attn_bias, alibi_slopes, sink, dlse, rng_seed, rng_offset;
  std::optional<Tensor> cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k;
  AttentionArguments arguments;

  AttentionCall(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse);

  // In the order of the operators' schemas.
  explicit AttentionCall(ArgumentReader& reader);

  // Called once every argument has been read.
  void describe_tensors();
};

// Results of a kernel, or why there is none.
struct AttentionGradients {
  std::vector<Tensor> dq_dk_dv;
  std::optional<Tensor> dbias;
  std::string refusal;
};

// The backward by a kernel, or no gradients and a reason: nothing is raised but what a launch reports. A forced
// reference backend counts as a kernel.
// `heads_first`: q, k, v, out and dout are (B, H, S, D). `contiguous_grads`: dq, dk and dv are contiguous, dbias but
// for padded rows.
AttentionGradients attention_backward_or_refusal(AttentionCall& call, bool heads_first, bool contiguous_grads);

}  // namespace flashbwd

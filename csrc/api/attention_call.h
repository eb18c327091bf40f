// The tensors and options of one attention backward call, read from an operator's stack or set by C++ code.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "../attention/problem.h"
#include "tensors.h"

namespace flashbwd {

// Owns the tensors that `arguments` describes.
struct AttentionCall {
  Tensor dout, q, k, v, out, softmax_lse;
  std::optional<Tensor> attn_bias, alibi_slopes, sink, dlse, rng_seed, rng_offset;
  std::optional<Tensor> cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k;
  AttentionArguments arguments;

  AttentionCall(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse);

  // Reads all arguments in the order of the operators' schemas.
  explicit AttentionCall(ArgumentReader& reader);

  // Fills the descriptions in `arguments`. Call it after all arguments have been read, since it can throw.
  void describe_tensors();
};

// The gradients, or the reason why there are none.
struct AttentionGradients {
  std::vector<Tensor> dq_dk_dv;  // empty if refused
  std::optional<Tensor> dbias;
  std::string refusal;  // empty if the gradients were computed
};

// Runs the backward on a kernel, or returns the reason why no kernel supports the call. Throws only for launch errors.
// The reference runs only if arguments.backend forces it. `heads_first`: q, k, v, out and dout are (B, H, S, D).
// `contiguous_grads`: allocates contiguous dq, dk and dv, and dbias contiguous except for padded rows.
AttentionGradients attention_backward_or_refusal(AttentionCall& call, bool heads_first, bool contiguous_grads);

}  // namespace flashbwd

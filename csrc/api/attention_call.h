// The tensors and options of one attention backward call, read from an operator's stack or set by C++ code.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "../attention/problem.h"
#include "tensors.h"

namespace flashbwd {

using AttentionTensors = OptionalTensors<std::optional<Tensor>>;

// The options of an operator as text of its schema. Only the backward has defaults.
std::string option_schema(OptionOf of);

// Reads the options of the backward or the forward.
void read_options(ArgumentReader& reader, OptionOf of, AttentionTensors& tensors, AttentionArguments& arguments);

// Fills the descriptions of the optional tensors. Call it after all arguments have been read, since it can throw.
void describe_options(const AttentionTensors& tensors, AttentionArguments& arguments);

// Appends the options of the reference to its boxed arguments.
void box_options(const AttentionTensors& tensors, const AttentionArguments& arguments,
                 std::vector<StableIValue>& stack);

// Owns the tensors that `arguments` describes.
struct AttentionCall : AttentionTensors {
  Tensor dout, q, k, v, out, softmax_lse;
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

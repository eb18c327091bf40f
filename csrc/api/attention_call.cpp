#include "attention_call.h"

#include <utility>

namespace flashbwd {

AttentionCall::AttentionCall(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse)
    : dout(std::move(dout)),
      q(std::move(q)),
      k(std::move(k)),
      v(std::move(v)),
      out(std::move(out)),
      softmax_lse(std::move(softmax_lse)) {}

AttentionCall::AttentionCall(ArgumentReader& reader)
    : dout(reader.tensor()),
      q(reader.tensor()),
      k(reader.tensor()),
      v(reader.tensor()),
      out(reader.tensor()),
      softmax_lse(reader.tensor()),
      attn_bias(reader.optional_tensor()),
      alibi_slopes(reader.optional_tensor()),
      sink(reader.optional_tensor()),
      dlse(reader.optional_tensor()),
      rng_seed(reader.optional_tensor()),
      rng_offset(reader.optional_tensor()),
      cu_seqlens_q(reader.optional_tensor()),
      cu_seqlens_k(reader.optional_tensor()),
      seqused_q(reader.optional_tensor()),
      seqused_k(reader.optional_tensor()) {
  AttentionArguments& a = arguments;
  a.softmax_scale = reader.read<std::optional<double>>();
  a.causal = reader.read<std::string>();
  a.window_left = reader.read<int64_t>();
  a.window_right = reader.read<int64_t>();
  a.softcap = reader.read<double>();
  a.dropout_p = reader.read<double>();
  a.rng_layout = reader.read<std::string>();
  a.max_seqlen_q = reader.read<std::optional<int64_t>>();
  a.max_seqlen_k = reader.read<std::optional<int64_t>>();
  a.need_dbias = reader.read<bool>();
  a.deterministic = reader.read<bool>();
  a.backend = reader.read<std::string>();
  a.allow_tf32 = reader.read<bool>();
}

void AttentionCall::describe_tensors() {
  AttentionArguments& a = arguments;
  dout = with_contiguous_last_dim(dout);
  describe(dout, a.dout);
  describe(q, a.q);
  describe(k, a.k);
  describe(v, a.v);
  describe(out, a.out);
  describe(softmax_lse, a.softmax_lse);
  describe(attn_bias, a.attn_bias);
  describe(alibi_slopes, a.alibi_slopes);
  describe(sink, a.sink);
  describe(dlse, a.dlse);
  describe(rng_seed, a.rng_seed);
  describe(rng_offset, a.rng_offset);
  describe(cu_seqlens_q, a.cu_seqlens_q);
  describe(cu_seqlens_k, a.cu_seqlens_k);
  describe(seqused_q, a.seqused_q);
  describe(seqused_k, a.seqused_k);
}

}  // namespace flashbwd

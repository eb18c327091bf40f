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
  a.dout = describe(dout);
  a.q = describe(q);
  a.k = describe(k);
  a.v = describe(v);
  a.out = describe(out);
  a.softmax_lse = describe(softmax_lse);
  a.attn_bias = describe(attn_bias);
  a.alibi_slopes = describe(alibi_slopes);
  a.sink = describe(sink);
  a.dlse = describe(dlse);
  a.rng_seed = describe(rng_seed);
  a.rng_offset = describe(rng_offset);
  a.cu_seqlens_q = describe(cu_seqlens_q);
  a.cu_seqlens_k = describe(cu_seqlens_k);
  a.seqused_q = describe(seqused_q);
  a.seqused_k = describe(seqused_k);
}

}  // namespace flashbwd

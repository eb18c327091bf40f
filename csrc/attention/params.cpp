#include "params.h"

#include "problem.h"

namespace flashbwd {
namespace {

// (batch, seq, head, dim), or (total, head, dim) if packed.
HeadsView heads_view(const TensorDesc& t) {
  HeadsView view;
  view.data = t.data;
  const int seq = t.dim - 3;
  if (seq == 1) view.batch_stride = t.strides[0];
  view.seq_stride = t.strides[seq];
  view.head_stride = t.strides[seq + 1];
  return view;
}

// (batch, head, seq), (batch, head, seq, 1), or (head, total) if packed.
RowsView rows_view(const TensorDesc& t) {
  RowsView view;
  if (!t) return view;
  view.data = t.data;
  view.packed_rows = t.dim == 2;
  const int head = view.packed_rows ? 0 : 1;
  if (!view.packed_rows) view.batch_stride = t.strides[0];
  view.head_stride = t.strides[head];
  view.seq_stride = t.strides[head + 1];
  return view;
}

BiasView bias_view(const TensorDesc& t) {
  BiasView view;
  if (!t) return view;
  const auto stride = [&](int i) { return t.sizes[i] == 1 ? int64_t{0} : t.strides[i]; };
  return {t.data, t.dtype, stride(0), stride(1), stride(2), stride(3)};
}

KeyMaskView key_mask_view(const TensorDesc& t) {
  if (!t) return {};
  return {static_cast<const uint8_t*>(t.data), t.strides[0], t.strides[1]};
}

BlockMaskView block_mask_view(const AttentionArguments& a) {
  BlockMaskView view;
  if (!a.block_lists) return view;
  const TensorDesc& lists = a.block_lists;
  view.lists = static_cast<const KeyBlockList*>(lists.data);
  view.entries = static_cast<const QueryBlockEntry*>(a.block_entries.data);
  view.bits = static_cast<const int32_t*>(a.block_bits.data);
  view.head_stride = lists.sizes[1] == 1 ? 0 : lists.sizes[2];
  view.batch_stride = lists.sizes[0] == 1 ? 0 : lists.sizes[1] * lists.sizes[2];
  return view;
}

PhiloxArguments philox_arguments(const TensorDesc& seed, const TensorDesc& offset) {
  PhiloxArguments philox;
  const auto place = [](const TensorDesc& t, const uint64_t** pointer, uint64_t* value) {
    const auto* data = static_cast<const uint64_t*>(t.data);
    if (t.device.type == DeviceType::kCPU) {
      *value = *data;
    } else {
      *pointer = data;
    }
  };
  place(seed, &philox.seed_ptr, &philox.seed);
  place(offset, &philox.offset_ptr, &philox.offset);
  return philox;
}

template <typename T>
T* pointer_to(const TensorDesc& t) {
  return t ? static_cast<T*>(t.data) : nullptr;
}

}  // namespace

AttentionBackwardParams make_params(const AttentionArguments& a, const AttentionProblem& p, const TensorDesc& dbias,
                                    const TensorDesc& dsink) {
  AttentionBackwardParams params;
  params.batch = static_cast<int32_t>(p.batch);
  params.heads = static_cast<int32_t>(p.heads);
  params.heads_kv = static_cast<int32_t>(p.heads_kv);
  params.head_dim = static_cast<int32_t>(p.head_dim);
  params.head_dim_v = static_cast<int32_t>(p.head_dim_v);
  params.seqlen_q = static_cast<int32_t>(p.seqlen_q);
  params.seqlen_k = static_cast<int32_t>(p.seqlen_k);
  params.total_q = p.total_q;
  params.total_k = p.total_k;
  params.dtype = p.dtype;
  params.dq_dtype = p.dq_dtype;
  params.dk_dtype = p.dk_dtype;
  params.dv_dtype = p.dv_dtype;
  params.q = heads_view(a.q);
  params.k = heads_view(a.k);
  params.v = heads_view(a.v);
  params.out = heads_view(a.out);
  params.dout = heads_view(a.dout);
  params.dq = heads_view(a.dq);
  params.dk = heads_view(a.dk);
  params.dv = heads_view(a.dv);
  params.lse = rows_view(a.softmax_lse);
  params.dlse = rows_view(a.dlse);
  params.cu_seqlens_q = pointer_to<const int32_t>(a.cu_seqlens_q);
  params.cu_seqlens_k = pointer_to<const int32_t>(a.cu_seqlens_k);
  params.seqused_q = pointer_to<const int32_t>(a.seqused_q);
  params.seqused_k = pointer_to<const int32_t>(a.seqused_k);
  params.softmax_scale = static_cast<float>(p.softmax_scale);
  params.softcap = static_cast<float>(p.softcap);
  params.causal = p.causal;
  params.window_left = static_cast<int32_t>(p.window_left);
  params.window_right = static_cast<int32_t>(p.window_right);
  params.bias = bias_view(a.attn_bias);
  params.dbias = bias_view(dbias);
  params.key_mask = key_mask_view(a.key_mask);
  params.alibi_slopes = pointer_to<const float>(a.alibi_slopes);
  if (a.alibi_slopes.dim == 2) params.alibi_batch_stride = a.alibi_slopes.strides[0];
  params.block_mask = block_mask_view(a);
  params.sink = pointer_to<const float>(a.sink);
  params.dsink = pointer_to<float>(dsink);
  params.dropout_p = static_cast<float>(p.dropout_p);
  params.dropout_layout = p.dropout_layout;
  if (p.dropout_p > 0.0) params.philox = philox_arguments(a.rng_seed, a.rng_offset);
  params.deterministic = p.deterministic;
  params.tf32 = p.tf32;
  params.workspace = a.workspace.data;
  return params;
}

}  // namespace flashbwd

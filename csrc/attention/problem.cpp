#include "problem.h"

#include <cmath>
#include <initializer_list>
#include <limits>
#include <utility>

#include "../common/check.h"
#include "block_mask_checks.h"
#include "index/arithmetic.h"
#include "memory.h"
#include "tensor_checks.h"
#include "workspace.h"

namespace flashbwd {
namespace {

using Named = std::pair<const char*, const TensorDesc*>;

constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max();

DType statistics_dtype(DType dtype) { return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32; }

// cu_seqlens and seqused: int32, one-dimensional, contiguous, on q's device. A plan also accepts them on the CPU, which
// makes its sizes exact.
void check_lengths(const char* name, const TensorDesc& tensor, int64_t size, const char* size_in_words,
                   const AttentionArguments& a) {
  check_dtype(name, tensor, DType::kInt32, "");
  if (tensor.dim != 1 || tensor.sizes[0] != size) {
    refuse(name, " has shape ", shape_of(tensor), ", expected (", size, ",): ", size_in_words);
  }
  check(size <= 1 || tensor.strides[0] == 1, name, " has stride ", tensor.strides[0], ", expected 1 (contiguous)");
  if (!(a.plan_only && tensor.device.type == DeviceType::kCPU)) check_device(name, tensor, a.q.device);
}

void check_sizes(const AttentionArguments& a, AttentionProblem* p) {
  p->varlen = a.cu_seqlens_q.defined || a.cu_seqlens_k.defined;
  check(a.cu_seqlens_q.defined == a.cu_seqlens_k.defined, a.cu_seqlens_q.defined ? "cu_seqlens_k" : "cu_seqlens_q",
        " is missing, expected both cu_seqlens_q and cu_seqlens_k or neither");
  const int dim = p->varlen ? 3 : 4;
  const char* layout_q =
      p->varlen ? "(total_q, heads, head_dim) with cu_seqlens" : "(batch, seqlen_q, heads, head_dim)";
  if (a.q.dim != dim) refuse("q has shape ", shape_of(a.q), ", expected ", dim, " dimensions ", layout_q);
  for (const auto& [name, tensor] : {Named{"k", &a.k}, {"v", &a.v}, {"out", &a.out}, {"dout", &a.dout}}) {
    if (tensor->dim != dim) refuse(name, " has shape ", shape_of(*tensor), ", expected ", dim, " dimensions as q");
  }
  const auto size = [dim](const TensorDesc& t, int from_end) { return t.sizes[dim - from_end]; };
  p->heads = size(a.q, 2);
  p->heads_kv = size(a.k, 2);
  p->head_dim = size(a.q, 1);
  p->head_dim_v = size(a.v, 1);
  check(p->head_dim >= 1, "q has head dimension 0, expected at least 1");
  check(p->head_dim_v >= 1, "v has head dimension 0, expected at least 1");
  check(p->heads_kv > 0 ? p->heads % p->heads_kv == 0 : p->heads == 0, "k has ", p->heads_kv,
        " heads, which does not divide q's ", p->heads);
  if (p->varlen) {
    p->total_q = a.q.sizes[0];
    p->total_k = a.k.sizes[0];
    check_shape("k", a.k, {p->total_k, p->heads_kv, p->head_dim});
    check_shape("v", a.v, {p->total_k, p->heads_kv, p->head_dim_v});
    check_shape("out", a.out, {p->total_q, p->heads, p->head_dim_v});
    check_shape("dout", a.dout, {p->total_q, p->heads, p->head_dim_v});
    check(a.max_seqlen_q.has_value(), "max_seqlen_q is missing, expected it with cu_seqlens_q");
    check(a.max_seqlen_k.has_value(), "max_seqlen_k is missing, expected it with cu_seqlens_k");
    p->seqlen_q = *a.max_seqlen_q;
    p->seqlen_k = *a.max_seqlen_k;
    check(p->seqlen_q >= 0, "max_seqlen_q is ", p->seqlen_q, ", expected at least 0");
    check(p->seqlen_k >= 0, "max_seqlen_k is ", p->seqlen_k, ", expected at least 0");
    if (a.cu_seqlens_q.dim != 1 || a.cu_seqlens_q.sizes[0] < 1) {
      refuse("cu_seqlens_q has shape ", shape_of(a.cu_seqlens_q), ", expected (batch + 1,)");
    }
    p->batch = a.cu_seqlens_q.sizes[0] - 1;
  } else {
    p->batch = a.q.sizes[0];
    p->seqlen_q = a.q.sizes[1];
    p->seqlen_k = a.k.sizes[1];
    p->total_q = p->batch * p->seqlen_q;
    p->total_k = p->batch * p->seqlen_k;
    check_shape("k", a.k, {p->batch, p->seqlen_k, p->heads_kv, p->head_dim});
    check_shape("v", a.v, {p->batch, p->seqlen_k, p->heads_kv, p->head_dim_v});
    check_shape("out", a.out, {p->batch, p->seqlen_q, p->heads, p->head_dim_v});
    check_shape("dout", a.dout, {p->batch, p->seqlen_q, p->heads, p->head_dim_v});
    check(!a.max_seqlen_q || *a.max_seqlen_q == p->seqlen_q, "max_seqlen_q is ", a.max_seqlen_q.value_or(0),
          ", expected q's own length ", p->seqlen_q, " without cu_seqlens_q");
    check(!a.max_seqlen_k || *a.max_seqlen_k == p->seqlen_k, "max_seqlen_k is ", a.max_seqlen_k.value_or(0),
          ", expected k's own length ", p->seqlen_k, " without cu_seqlens_k");
  }
  for (const auto& [name, value] : {std::pair<const char*, int64_t>{"the batch", p->batch},
                                    {"the number of heads", p->heads},
                                    {"the head dimension", p->head_dim},
                                    {"v's head dimension", p->head_dim_v},
                                    {"the query length", p->seqlen_q},
                                    {"the key length", p->seqlen_k}}) {
    check(value <= kMaxSize, name, " is ", value, ", expected at most ", kMaxSize);
  }
}

void check_tensors(const AttentionArguments& a, AttentionProblem* p) {
  p->dtype = a.q.dtype;
  p->device = a.q.device;
  check(is_16bit(p->dtype) || p->dtype == DType::kFloat32 || p->dtype == DType::kFloat64, "q is ", name_of(p->dtype),
        ", expected float16, bfloat16, float32 or float64");
  for (const auto& [name, tensor] : {Named{"q", &a.q}, {"k", &a.k}, {"v", &a.v}, {"out", &a.out}, {"dout", &a.dout}}) {
    check_dtype(name, *tensor, p->dtype, " as q");
    check_device(name, *tensor, p->device);
    check_last_contiguous(name, *tensor);
  }
}

bool is_rows_shape(const TensorDesc& t, const AttentionProblem& p) {
  if (p.varlen) {
    if (t.dim == 2) return t.sizes[0] == p.heads && t.sizes[1] == p.total_q;
    return t.dim == 3 && t.sizes[0] == p.batch && t.sizes[1] == p.heads && t.sizes[2] == round_up(p.seqlen_q, 32);
  }
  const bool batch_heads = t.dim >= 3 && t.sizes[0] == p.batch && t.sizes[1] == p.heads;
  if (!batch_heads) return false;
  if (t.dim == 4) return t.sizes[2] == p.seqlen_q && t.sizes[3] == 1;
  return t.dim == 3 && (t.sizes[2] == p.seqlen_q || t.sizes[2] == round_up(p.seqlen_q, 32));
}

void check_rows(const char* name, const TensorDesc& tensor, const AttentionProblem& p) {
  check_dtype(name, tensor, statistics_dtype(p.dtype), "");
  check_device(name, tensor, p.device);
  if (is_rows_shape(tensor, p)) return;
  const auto shape = [&](std::initializer_list<int64_t> sizes) {
    TensorDesc like;
    for (const int64_t size : sizes) like.sizes[like.dim++] = size;
    return shape_of(like);
  };
  if (p.varlen) {
    refuse(name, " has shape ", shape_of(tensor), ", expected ", shape({p.heads, p.total_q}), " or ",
           shape({p.batch, p.heads, round_up(p.seqlen_q, 32)}));
  }
  refuse(name, " has shape ", shape_of(tensor), ", expected ", shape({p.batch, p.heads, p.seqlen_q}), ", ",
         shape({p.batch, p.heads, p.seqlen_q, 1}), " or ", shape({p.batch, p.heads, round_up(p.seqlen_q, 32)}));
}

// `lengths` is empty if the host does not know them.
void check_seqused(const char* name, const TensorDesc& tensor, const std::vector<int64_t>& lengths) {
  if (!tensor || tensor.device.type != DeviceType::kCPU) return;
  const auto* values = static_cast<const int32_t*>(tensor.data);
  for (size_t i = 0; i < lengths.size(); ++i) {
    check(values[i] >= 0 && values[i] <= lengths[i], name, " holds ", values[i], " at index ", i,
          ", expected at least 0 and at most the sequence's length, ", lengths[i]);
  }
}

void check_sequences(const AttentionArguments& a, AttentionProblem* p) {
  if (p->varlen) {
    check_lengths("cu_seqlens_q", a.cu_seqlens_q, p->batch + 1, "batch + 1", a);
    check_lengths("cu_seqlens_k", a.cu_seqlens_k, p->batch + 1, "one more than the sequences of cu_seqlens_q", a);
    p->seqlens_q = read_cu_seqlens("cu_seqlens_q", a.cu_seqlens_q, p->total_q, p->seqlen_q);
    p->seqlens_k = read_cu_seqlens("cu_seqlens_k", a.cu_seqlens_k, p->total_k, p->seqlen_k);
  }
  for (const auto& [name, tensor] : {Named{"seqused_q", &a.seqused_q}, {"seqused_k", &a.seqused_k}}) {
    if (!tensor->defined) continue;
    check_lengths(name, *tensor, p->batch, "the batch", a);
    p->has_seqused = true;
  }
  if (!p->has_seqused) return;
  check_seqused("seqused_q", a.seqused_q, p->varlen ? p->seqlens_q : std::vector<int64_t>(p->batch, p->seqlen_q));
  check_seqused("seqused_k", a.seqused_k, p->varlen ? p->seqlens_k : std::vector<int64_t>(p->batch, p->seqlen_k));
}

void check_bias(const AttentionArguments& a, AttentionProblem* p) {
  const TensorDesc& bias = a.attn_bias;
  if (!bias) return;
  const int64_t full[4] = {p->batch, p->heads, p->seqlen_q, p->seqlen_k};
  bool fits = bias.dim == 4;
  for (int i = 0; fits && i < 4; ++i) fits = bias.sizes[i] == full[i] || bias.sizes[i] == 1;
  if (!fits) {
    refuse("attn_bias has shape ", shape_of(bias), ", expected (", full[0], ", ", full[1], ", ", full[2], ", ", full[3],
           ") where any dimension may be 1");
  }
  check(bias.dtype == p->dtype || bias.dtype == DType::kFloat32, "attn_bias is ", name_of(bias.dtype),
        ", expected q's ", name_of(p->dtype), " or float32");
  check_device("attn_bias", bias, p->device);
  p->has_bias = true;
  p->need_dbias = a.need_dbias;
  p->bias_dtype = bias.dtype;
  p->bias_broadcast_batch = bias.sizes[0] != full[0];
  p->bias_broadcast_head = bias.sizes[1] != full[1];
  p->bias_broadcast_row = bias.sizes[2] != full[2];
  p->bias_broadcast_col = bias.sizes[3] != full[3];
  p->bias_of_keys = bias.sizes[2] == 1 || bias.strides[2] == 0;
  p->bias_has_rows = bias.dtype == p->dtype && bias.sizes[2] == full[2] && (bias.strides[2] != 0 || full[2] == 1) &&
                     bias.sizes[3] == full[3] && (bias.strides[3] == 1 || full[3] == 1) && aligned_16(bias);
}

void check_key_mask(const AttentionArguments& a, AttentionProblem* p) {
  if (!a.key_mask) return;
  check(!p->varlen,
        "key_mask came with cu_seqlens_q and cu_seqlens_k, expected it without them: pack only the keys that the "
        "mask shows");
  check_dtype("key_mask", a.key_mask, DType::kBool, "");
  check_device("key_mask", a.key_mask, p->device);
  check_shape("key_mask", a.key_mask, {p->batch, p->seqlen_k});
  p->has_key_mask = true;
}

void check_per_head(const AttentionArguments& a, AttentionProblem* p) {
  if (a.alibi_slopes) {
    const TensorDesc& slopes = a.alibi_slopes;
    check_dtype("alibi_slopes", slopes, DType::kFloat32, "");
    check_device("alibi_slopes", slopes, p->device);
    const bool per_head = slopes.dim == 1 && slopes.sizes[0] == p->heads;
    const bool per_batch = slopes.dim == 2 && slopes.sizes[0] == p->batch && slopes.sizes[1] == p->heads;
    if (!per_head && !per_batch) {
      refuse("alibi_slopes has shape ", shape_of(slopes), ", expected (", p->heads, ",) or (", p->batch, ", ", p->heads,
             ")");
    }
    check_last_contiguous("alibi_slopes", slopes);
    p->has_alibi = true;
  }
  if (a.sink) {
    check_dtype("sink", a.sink, statistics_dtype(p->dtype), "");
    check_device("sink", a.sink, p->device);
    check_shape("sink", a.sink, {p->heads});
    check_last_contiguous("sink", a.sink);
    p->has_sink = true;
  }
}

void check_mask(const AttentionArguments& a, AttentionProblem* p) {
  if (a.causal == "bottom_right") {
    p->causal = CausalAlignment::kBottomRight;
  } else if (a.causal == "top_left") {
    p->causal = CausalAlignment::kTopLeft;
  } else {
    check(a.causal == "none", "causal is ", a.causal, ", expected False, True or \"top_left\"");
  }
  check(a.window_left >= -1, "window_size[0] is ", a.window_left, ", expected -1 (unbounded) or more");
  check(a.window_right >= -1, "window_size[1] is ", a.window_right, ", expected -1 (unbounded) or more");
  p->window_left = std::min(a.window_left, kMaxSize);
  p->window_right = p->causal == CausalAlignment::kNone ? std::min(a.window_right, kMaxSize) : 0;
}

void check_dropout(const AttentionArguments& a, AttentionProblem* p) {
  check(a.dropout_p >= 0.0 && a.dropout_p < 1.0, "dropout_p is ", a.dropout_p, ", expected 0 <= dropout_p < 1");
  p->dropout_p = a.dropout_p;
  if (a.dropout_p == 0.0) return;
  check(a.rng_seed.defined && a.rng_offset.defined, "rng_state is missing, expected it with dropout_p ", a.dropout_p);
  if (a.rng_layout == "flash") {
    p->dropout_layout = DropoutLayout::kFlash;
  } else if (a.rng_layout == "efficient32") {
    p->dropout_layout = DropoutLayout::kEfficient32;
  } else if (a.rng_layout == "efficient64") {
    p->dropout_layout = DropoutLayout::kEfficient64;
  } else {
    refuse("rng_state.layout is \"", a.rng_layout, "\", expected \"flash\", \"efficient32\" or \"efficient64\"",
           a.rng_layout == "cudnn" ? "; cuDNN does not say how it draws its mask, so it cannot be drawn again" : "");
  }
  for (const auto& [name, tensor] : {Named{"rng_state.seed", &a.rng_seed}, {"rng_state.offset", &a.rng_offset}}) {
    if (tensor->numel() != 1) refuse(name, " has shape ", shape_of(*tensor), ", expected one element");
    check(tensor->dtype == DType::kInt64 || tensor->dtype == DType::kUInt64, name, " is ", name_of(tensor->dtype),
          ", expected int64 or uint64");
    if (tensor->device.type != DeviceType::kCPU && tensor->device != p->device) {
      refuse(name, " is on ", name_of(tensor->device), ", expected the CPU or q's ", name_of(p->device));
    }
  }
}

void check_scalars(const AttentionArguments& a, AttentionProblem* p) {
  p->softmax_scale = a.softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(p->head_dim)));
  check(std::isfinite(p->softmax_scale), "softmax_scale is ", p->softmax_scale, ", expected a finite number");
  check(std::isfinite(a.softcap) && a.softcap >= 0.0, "softcap is ", a.softcap,
        ", expected 0 (none) or a positive number");
  p->softcap = a.softcap;
}

void check_outputs(const AttentionArguments& a, AttentionProblem* p) {
  struct Output {
    const char* name;
    const TensorDesc* given;
    const TensorDesc* like;
    const char* like_name;
    DType* dtype;
  };
  for (const Output& o : {Output{"dq", &a.dq, &a.q, "q", &p->dq_dtype}, Output{"dk", &a.dk, &a.k, "k", &p->dk_dtype},
                          Output{"dv", &a.dv, &a.v, "v", &p->dv_dtype}}) {
    *o.dtype = p->dtype;
    if (!o.given->defined) continue;
    const TensorDesc& given = *o.given;
    bool same = given.dim == o.like->dim;
    for (int i = 0; same && i < given.dim; ++i) same = given.sizes[i] == o.like->sizes[i];
    if (!same) {
      refuse(o.name, " has shape ", shape_of(given), ", expected ", o.like_name, "'s ", shape_of(*o.like));
    }
    check(given.dtype == p->dtype || (is_16bit(p->dtype) && given.dtype == DType::kFloat32), o.name, " is ",
          name_of(given.dtype), ", expected ", o.like_name, "'s ", name_of(p->dtype),
          is_16bit(p->dtype) ? " or float32" : "");
    check_device(o.name, given, p->device);
    check_last_contiguous(o.name, given);
    check_not_expanded(o.name, given);
    *o.dtype = given.dtype;
  }
  if (!a.workspace) return;
  check_dtype("workspace", a.workspace, DType::kUInt8, "");
  check_device("workspace", a.workspace, p->device);
  if (a.workspace.dim != 1) refuse("workspace has shape ", shape_of(a.workspace), ", expected one dimension");
  check_last_contiguous("workspace", a.workspace);
  check(reinterpret_cast<uintptr_t>(a.workspace.data) % kAccumulatorAlignment == 0,
        "workspace starts at an address that is ",
        reinterpret_cast<uintptr_t>(a.workspace.data) % kAccumulatorAlignment, " modulo ", kAccumulatorAlignment,
        ", expected one aligned to ", kAccumulatorAlignment, " bytes");
}

}  // namespace

AttentionProblem check_attention(const AttentionArguments& a) {
  AttentionProblem p;
  check_sizes(a, &p);
  check_tensors(a, &p);
  check_rows("softmax_lse", a.softmax_lse, p);
  if (a.dlse) check_rows("dlse", a.dlse, p);
  check_sequences(a, &p);
  check_mask(a, &p);
  check_scalars(a, &p);
  check_bias(a, &p);
  check_key_mask(a, &p);
  check_per_head(a, &p);
  check_dropout(a, &p);
  check_block_mask(a, &p);
  check_outputs(a, &p);
  check_memory(a);
  p.has_dlse = a.dlse.defined;
  p.deterministic = a.deterministic;
  p.backend = a.backend;
  p.tf32 = a.allow_tf32 && p.dtype == DType::kFloat32;
  p.aligned_16 = true;
  for (const TensorDesc* t : {&a.q, &a.k, &a.v, &a.out, &a.dout}) p.aligned_16 = p.aligned_16 && aligned_16(*t);
  p.dq_aligned_16 = a.dq ? aligned_16(a.dq) : p.head_dim * size_of(p.dtype) % 16 == 0;
  return p;
}

void check_attention_forward(AttentionArguments a) {
  a.out = a.q;
  const int last = a.q.dim - 1;
  if (last >= 0 && a.v.dim > 0) a.out.sizes[last] = a.v.sizes[a.v.dim - 1];
  if (last >= 0) a.out.strides[last] = 1;
  a.dout = a.out;
  a.softmax_lse = a.q;
  a.softmax_lse.dtype = statistics_dtype(a.q.dtype);
  if (a.q.dim == 4) {
    a.softmax_lse.dim = 3;
    a.softmax_lse.sizes = {a.q.sizes[0], a.q.sizes[2], a.q.sizes[1]};
  } else {
    a.softmax_lse.dim = 2;
    a.softmax_lse.sizes = {a.q.sizes[1], a.q.sizes[0]};
  }
  a.rng_seed.defined = true;
  a.rng_seed.dtype = DType::kInt64;
  a.rng_offset = a.rng_seed;
  a.rng_layout = "flash";
  check_attention(a);
}

}  // namespace flashbwd

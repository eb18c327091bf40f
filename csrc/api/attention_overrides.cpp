// Overrides of PyTorch's attention backward operators, implemented with this library's kernels.
#include "attention_call.h"
#include "overrides.h"
#include "pytorch_kernels.h"

namespace flashbwd {
namespace {

using MaybeTensor = std::optional<Tensor>;

// Sets the options that all overrides share and that are not arguments of PyTorch's operators.
void set_options(AttentionArguments* a, std::optional<double> scale, const char* causal) {
  a->softmax_scale = scale;
  a->causal = causal;
  a->need_dbias = false;
  a->deterministic = deterministic_algorithms() == Determinism::kAsked;
  a->backend = forced_backend();
}

// With use_deterministic_algorithms(True, warn_only=True), PyTorch's attention uses its non-deterministic algorithm and
// warns. This function issues the same warning for this library's kernel.
void warn_if_requested(const char* forward) {
  if (deterministic_algorithms() != Determinism::kWarnOnly) return;
  const std::string message = std::string(forward) +
                              " defaults to a non-deterministic algorithm. To explicitly enable determinism call "
                              "torch.use_deterministic_algorithms(True, warn_only=False).";
  aoti_torch_warn(__func__, __FILE__, __LINE__, message.c_str());
}

Attempt run(AttentionCall& call, const char* forward, bool heads_first, bool contiguous_grads) {
  AttentionGradients grads = attention_backward_or_refusal(call, heads_first, contiguous_grads);
  if (!grads.refusal.empty()) return refused(std::move(grads.refusal));
  warn_if_requested(forward);
  if (grads.dbias.has_value()) grads.dq_dk_dv.push_back(*grads.dbias);
  return {std::move(grads.dq_dk_dv), {}};
}

// _scaled_dot_product_cudnn_attention_backward. Tensors are (B, H, S, D); the bias has no gradient.
Attempt cudnn_attention_backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                                 const Tensor& out, const Tensor& lse, const Tensor& /*philox_seed*/,
                                 const Tensor& /*philox_offset*/, const Tensor& attn_bias, const Tensor& cu_seqlens_q,
                                 const Tensor& /*cu_seqlens_k*/, const int64_t& /*max_q*/, const int64_t& /*max_k*/,
                                 const double& dropout_p, const bool& is_causal, const std::optional<double>& scale) {
  if (!is_given(dout)) return refused(kNoGradient);
  if (dropout_p > 0.0) return refused("cuDNN does not document its dropout mask, so the mask cannot be regenerated");
  if (is_given(cu_seqlens_q)) return refused("cuDNN's packed sequences");
  AttentionCall call(dout, q, k, v, out, lse);
  call.attn_bias = given(attn_bias);
  while (call.attn_bias.has_value() && call.attn_bias->dim() < 4) {
    call.attn_bias = torch::stable::unsqueeze(*call.attn_bias, 0);
  }
  set_options(&call.arguments, scale, is_causal ? "top_left" : "none");
  return run(call, "cuDNN Attention", true, false);
}

int64_t window_of(const std::optional<int64_t>& size) { return size.has_value() && *size >= 0 ? *size : -1; }

// _flash_attention_backward. Tensors are (B, S, H, D), or (total, H, D) with cu_seqlens. rng_state is (seed, offset).
Attempt flash_attention_backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                                 const Tensor& out, const Tensor& lse, const Tensor& cu_seqlens_q,
                                 const Tensor& cu_seqlens_k, const int64_t& max_q, const int64_t& max_k,
                                 const double& dropout_p, const bool& is_causal, const Tensor& rng_state,
                                 const Tensor& /*unused*/, const std::optional<double>& scale,
                                 const std::optional<int64_t>& window_left,
                                 const std::optional<int64_t>& window_right) {
  if (!is_given(dout)) return refused(kNoGradient);
  AttentionCall call(dout, q, k, v, out, lse);
  AttentionArguments& a = call.arguments;
  set_options(&a, scale, is_causal ? "bottom_right" : "none");
  a.window_left = window_of(window_left);
  a.window_right = window_of(window_right);
  call.cu_seqlens_q = given(cu_seqlens_q);
  call.cu_seqlens_k = given(cu_seqlens_k);
  if (call.cu_seqlens_q.has_value()) {
    a.max_seqlen_q = max_q;
    a.max_seqlen_k = max_k;
  }
  if (dropout_p > 0.0) {
    if (rng_state.numel() != 2) {
      return refused("rng_state has " + std::to_string(rng_state.numel()) + " elements, expected a seed and an offset");
    }
    a.dropout_p = dropout_p;
    a.rng_layout = "flash";
    call.rng_seed = torch::stable::select(rng_state, 0, 0);
    call.rng_offset = torch::stable::select(rng_state, 0, 1);
  }
  return run(call, "Flash Attention", false, false);
}

// Up to torch 2.11, PyTorch's memory-efficient kernel counts the elements of its dropout mask in 32 bits.
const char* efficient_rng_layout() { return aoti_torch_abi_version() >> 48 <= 0x020b ? "efficient32" : "efficient64"; }

constexpr const char* kEfficientMasks[] = {"none", "top_left", "bottom_right"};  // index: custom_mask_type

// _efficient_attention_backward. Tensors are (B, S, H, D), or (1, total, H, D) with cu_seqlens; results are contiguous.
// With a window of w, a query sees the key on the diagonal of its causal mask and the w - 1 keys before it.
Attempt efficient_attention_backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                                     const MaybeTensor& bias, const Tensor& out, const MaybeTensor& cu_seqlens_q,
                                     const MaybeTensor& cu_seqlens_k, const int64_t& max_q, const int64_t& max_k,
                                     const Tensor& lse, const double& dropout_p, const Tensor& philox_seed,
                                     const Tensor& philox_offset, const int64_t& mask, const bool& bias_has_gradient,
                                     const std::optional<double>& scale,
                                     const std::optional<int64_t>& /*num_splits_key*/,
                                     const std::optional<int64_t>& window_size, const bool& one_storage) {
  if (!is_given(dout)) return refused(kNoGradient);
  if (one_storage) return refused("dq, dk and dv are requested in one storage");
  if (mask < 0 || mask >= 3) return refused("custom_mask_type is " + std::to_string(mask));
  const bool windowed = window_size.has_value() && *window_size > 0;
  if (windowed && mask == 0) return refused("a window without a causal mask");
  const bool packed = is_given(cu_seqlens_q);
  const auto rows = [&](const Tensor& x) { return packed ? torch::stable::squeeze(x, 0) : x; };
  AttentionCall call(rows(dout), rows(q), rows(k), rows(v), rows(out), lse);
  AttentionArguments& a = call.arguments;
  set_options(&a, scale, kEfficientMasks[mask]);
  a.window_left = windowed ? *window_size - 1 : -1;
  call.attn_bias = given(bias);
  a.need_dbias = call.attn_bias.has_value() && bias_has_gradient;
  call.cu_seqlens_q = given(cu_seqlens_q);
  call.cu_seqlens_k = given(cu_seqlens_k);
  if (packed) {
    a.max_seqlen_q = max_q;
    a.max_seqlen_k = max_k;
  }
  if (dropout_p > 0.0) {
    a.dropout_p = dropout_p;
    a.rng_layout = efficient_rng_layout();
    call.rng_seed = philox_seed;
    call.rng_offset = philox_offset;
  }
  Attempt found = run(call, "Memory Efficient attention", false, true);
  if (!found.refusal.empty()) return found;
  if (packed) {
    for (Tensor& grad : found.results) grad = torch::stable::unsqueeze(grad, 0);
  }
  if (found.results.size() == 3) found.results.emplace_back();  // dbias: an undefined tensor
  return found;
}

}  // namespace

Override cudnn_attention_override{
    "_scaled_dot_product_cudnn_attention_backward", "flashbwd::fall_back_scaled_dot_product_cudnn_attention_backward",
    [](StableIValue* stack, uint64_t, uint64_t) {
      run_override(cudnn_attention_override, cudnn_attention_backward, stack, pytorch::cudnn_attention_backward);
    }};

Override flash_attention_override{"_flash_attention_backward", "flashbwd::fall_back_flash_attention_backward",
                                  [](StableIValue* stack, uint64_t, uint64_t) {
                                    run_override(flash_attention_override, flash_attention_backward, stack,
                                                 pytorch::flash_attention_backward);
                                  }};

Override efficient_attention_override{"_efficient_attention_backward",
                                      "flashbwd::fall_back_efficient_attention_backward",
                                      [](StableIValue* stack, uint64_t, uint64_t) {
                                        run_override(efficient_attention_override, efficient_attention_backward, stack,
                                                     pytorch::efficient_attention_backward);
                                      }};

}  // namespace flashbwd

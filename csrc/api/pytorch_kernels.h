// Direct calls of PyTorch's own CUDA backward kernels, bypassing the dispatcher and this library's overrides. They
// return an empty vector if this PyTorch does not export the kernel, or if an attention kernel failed.
#pragma once

#include <optional>
#include <vector>

#include "tensors.h"

namespace flashbwd::pytorch {

std::vector<Tensor> cudnn_attention_backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                                             const Tensor& out, const Tensor& lse, const Tensor& philox_seed,
                                             const Tensor& philox_offset, const Tensor& attn_bias,
                                             const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                                             const int64_t& max_q, const int64_t& max_k, const double& dropout_p,
                                             const bool& is_causal, const std::optional<double>& scale);

std::vector<Tensor> flash_attention_backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                                             const Tensor& out, const Tensor& lse, const Tensor& cu_seqlens_q,
                                             const Tensor& cu_seqlens_k, const int64_t& max_q, const int64_t& max_k,
                                             const double& dropout_p, const bool& is_causal, const Tensor& rng_state,
                                             const Tensor& unused, const std::optional<double>& scale,
                                             const std::optional<int64_t>& window_left,
                                             const std::optional<int64_t>& window_right);

std::vector<Tensor> efficient_attention_backward(
    const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& bias,
    const Tensor& out, const std::optional<Tensor>& cu_seqlens_q, const std::optional<Tensor>& cu_seqlens_k,
    const int64_t& max_q, const int64_t& max_k, const Tensor& lse, const double& dropout_p, const Tensor& philox_seed,
    const Tensor& philox_offset, const int64_t& mask, const bool& bias_has_gradient, const std::optional<double>& scale,
    const std::optional<int64_t>& num_splits_key, const std::optional<int64_t>& window_size, const bool& one_storage);

// Also supports CPU tensors.
std::vector<Tensor> layer_norm_backward(const Tensor& dz, const Tensor& x, const std::vector<int64_t>& normalized_shape,
                                        const Tensor& mean, const Tensor& rstd, const std::optional<Tensor>& weight,
                                        const std::optional<Tensor>& bias, const std::vector<bool>& mask);

std::vector<Tensor> rms_norm_backward(const Tensor& dz, const Tensor& x, const std::vector<int64_t>& normalized_shape,
                                      const Tensor& rstd, const std::optional<Tensor>& weight,
                                      const std::vector<bool>& mask);

}  // namespace flashbwd::pytorch

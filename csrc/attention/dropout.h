// Numbers of a forward's dropout that kernels are given.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

#include "params.h"

namespace flashbwd {

// What kept probabilities are multiplied by. PyTorch's memory-efficient forward rounds it to the type of its inputs.
inline float dropout_scale(const AttentionBackwardParams& p) {
  const double scale = 1.0 / (1.0 - p.dropout_p);
  if (p.dropout_layout == DropoutLayout::kFlash || p.dtype == DType::kFloat32) return static_cast<float>(scale);
  if (p.dtype == DType::kBFloat16) return __bfloat162float(__float2bfloat16(static_cast<float>(scale)));
  return __half2float(__float2half(static_cast<float>(scale)));
}

// FlashAttention-2 keeps what has drawn a byte up to this one.
inline uint32_t flash_threshold(float dropout_p) {
  return static_cast<uint32_t>(std::floor(double{1.f - dropout_p} * 255.0));
}

}  // namespace flashbwd

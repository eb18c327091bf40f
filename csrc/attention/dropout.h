// Scale and threshold with which kernels reproduce the dropout of a forward pass.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

#include "params.h"

namespace flashbwd {

// The scale of the probabilities that dropout keeps. PyTorch's memory-efficient forward rounds it to the input dtype.
inline float dropout_scale(const AttentionBackwardParams& p) {
  const double scale = 1.0 / (1.0 - p.dropout_p);
  if (p.dropout_layout == DropoutLayout::kFlash || p.dtype == DType::kFloat32) return static_cast<float>(scale);
  if (p.dtype == DType::kBFloat16) return __bfloat162float(__float2bfloat16(static_cast<float>(scale)));
  return __half2float(__float2half(static_cast<float>(scale)));
}

// FlashAttention-2 keeps an element if its random byte is at most this threshold.
inline uint32_t flash_threshold(float dropout_p) {
  return static_cast<uint32_t>(std::floor(double{1.f - dropout_p} * 255.0));
}

// PyTorch's memory-efficient forward keeps an element with random 32-bit word x iff fl32(fl32(x) * 2^-32 + 2^-33) > p.
// The left side grows with x, so this function returns the smallest x that is kept.
inline uint32_t efficient_threshold(float dropout_p) {
  uint32_t first = 0;
  for (uint32_t bit = uint32_t{1} << 31; bit != 0; bit >>= 1) {
    const float before = static_cast<float>((first | bit) - 1);
    if (!(std::fma(before, 0x1p-32f, 0x1p-33f) > dropout_p)) first |= bit;
  }
  return first;
}

}  // namespace flashbwd

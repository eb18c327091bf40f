// What a modification (score_mod or mask_mod) captures, as kernels read it. NVRTC compiles this file too,
// so it includes no header.
#pragma once

namespace flashbwd {

constexpr int kMaxCaptured = 16;  // tensors per kernel
constexpr int kMaxNumbers = 16;   // per kernel; other numbers are part of its source

struct CapturedTensor {
  static constexpr int kMaxDims = 5;
  const void* data;
  long long strides[kMaxDims];  // elements
  int sizes[kMaxDims];          // to wrap negative indices
};

}  // namespace flashbwd

// A captured tensor as kernels read it, from its description on the host.
#pragma once

#include "../common/types.h"
#include "captured_tensor.h"

namespace flashbwd {

// The tensor has at most CapturedTensor::kMaxDims dimensions.
inline CapturedTensor describe_captured(const TensorDesc& tensor) {
  CapturedTensor captured = {};
  captured.data = tensor.data;
  for (int d = 0; d < tensor.dim; ++d) {
    captured.strides[d] = tensor.strides[d];
    captured.sizes[d] = static_cast<int>(tensor.sizes[d]);
  }
  return captured;
}

}  // namespace flashbwd

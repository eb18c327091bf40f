// Whether tensors share memory. Computed on the host from addresses, sizes and strides, without reading data.
#pragma once

#include "types.h"

namespace flashbwd {

// True if an element of `a` and an element of `b` have a byte in common. Views that interleave without a common
// element, such as q and k in one packed (B, S, 3, H, D) buffer, do not share memory. False for tensors without memory
// (meta).
bool share_memory(const TensorDesc& a, const TensorDesc& b);

// True if two different elements of `tensor` have a byte in common.
bool elements_overlap(const TensorDesc& tensor);

}  // namespace flashbwd

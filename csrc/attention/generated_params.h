// What the host passes to a kernel with a score_mod that is compiled at run time. Params: the kernel's own parameters.
#pragma once

#include "../mods/captured_tensor.h"

namespace flashbwd {

struct CapturedValues {
  CapturedTensor captured[kMaxCaptured];
  void* gradients[kMaxCaptured];  // fp32 or fp64, contiguous; only where the score_mod has a gradient of this tensor
  int numbers[kMaxNumbers];       // that the score_mod's source does not contain: int32, or the bits of a float
};

template <typename Params>
struct WithCapturedValues : Params, CapturedValues {};

}  // namespace flashbwd

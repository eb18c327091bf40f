// What the host passes to a kernel with a score_mod that is compiled at run time. Params: the kernel's own parameters.
#pragma once

#include "../mods/captured_tensor.h"

namespace flashbwd {

template <typename Params>
struct WithCapturedTensors : Params {
  CapturedTensor captured[kMaxCaptured];
  void* gradients[kMaxCaptured];  // fp32 or fp64, contiguous; only where the score_mod has a gradient of this tensor
};

}  // namespace flashbwd

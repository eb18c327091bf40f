// What the host passes to a kernel with a score_mod that is compiled at run time.
#pragma once

#include "../../mods/captured_tensor.h"
#include "kernel_params.h"

namespace flashbwd::sm90 {

struct GeneratedParams : KernelParams {
  CapturedTensor captured[kMaxCaptured];
  void* gradients[kMaxCaptured];  // fp32 or fp64, contiguous; only where the score_mod has a gradient of this tensor
};

}  // namespace flashbwd::sm90

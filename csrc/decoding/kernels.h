// The prebuilt kernels by dtype; instantiations/ has one file per dtype.
#pragma once

#include "backward_params.h"
#include "plan.h"

namespace flashbwd {

struct DecodingKernels {
  using Kernel = void (*)(DecodingParams);
  Kernel (*split)(DecodingTile, bool aligned, int kind);  // kind: BuiltInMod::Kind; returns null if no kernel fits
  Kernel combine;
  using BackwardKernel = void (*)(DecodingBackwardParams);
  BackwardKernel (*backward)(int head_dim, bool aligned, int kind);
  BackwardKernel sum_slots;
};

DecodingKernels half_decoding_kernels();
DecodingKernels bfloat16_decoding_kernels();
DecodingKernels float_decoding_kernels();

}  // namespace flashbwd

// The prebuilt kernels of a dtype and padded head dimension; instantiations/ has one file for each.
#pragma once

#include "backward_params.h"
#include "plan.h"

namespace flashbwd {

struct DecodingKernels {
  using Kernel = void (*)(DecodingParams);
  Kernel (*split)(DecodingTile, bool aligned, int kind);  // kind: BuiltInMod::Kind; returns null if no kernel fits
  using BackwardKernel = void (*)(DecodingBackwardParams);
  BackwardKernel (*backward)(bool aligned, int kind);
};

// T: Half, BFloat16 or Float (elements.cuh).
template <int kD, class T>
DecodingKernels decoding_kernels();

}  // namespace flashbwd

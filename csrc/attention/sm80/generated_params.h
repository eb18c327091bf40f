#pragma once

#include "../generated_params.h"
#include "kernel_params.h"

namespace flashbwd::sm80 {

struct GeneratedParams : WithCapturedValues<KernelParams> {
  using CapturedValues::gradients;  // KernelParams::gradients are those of large head dimensions
};

}  // namespace flashbwd::sm80

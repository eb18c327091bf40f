#pragma once

#include "../generated_params.h"
#include "kernel_params.h"

namespace flashbwd::sm80 {

using GeneratedParams = WithCapturedTensors<KernelParams>;

}  // namespace flashbwd::sm80

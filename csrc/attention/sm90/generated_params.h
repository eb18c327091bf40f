#pragma once

#include "../generated_params.h"
#include "kernel_params.h"

namespace flashbwd::sm90 {

using GeneratedParams = WithCapturedValues<KernelParams>;

}  // namespace flashbwd::sm90

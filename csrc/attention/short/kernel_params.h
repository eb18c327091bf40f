// The kernel's arguments: the problem, and values that the launcher derives from it.
#pragma once

#include <cstdint>

#include "../params.h"
#include "../pre_post/bias_gradient.h"
#include "../sm80/kernel_params.h"
#include "layout.h"

namespace flashbwd::short_sequences {

using sm80::GradientTarget;

struct KernelParams {
  AttentionBackwardParams attention;
  int32_t slots = 0;  // CTA (h, s) of the grid (heads_kv, slots) processes KV head h of sequences s, s + slots, ...
  int32_t heads_per_kv = 1;
  GradientTarget dq, keys[2];  // keys: dv, dk
  SharedRegions shared;
  // kNone, or kStore: to the gradient itself, or to a partial sum per CTA, see KernelPlan
  BiasGradient bias_gradient;
  int32_t bias_planes = 1;
  // True if two adjacent columns of a row can be accessed as one aligned vector.
  bool bias_pairs = false, bias_gradient_pairs = false;
};

}  // namespace flashbwd::short_sequences

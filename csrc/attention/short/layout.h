// What the plan computes for the launcher: the grid, the layout of shared memory and of the workspace. No CUDA here.
#pragma once

#include <cstdint>

#include "../pre_post/bias_gradient.h"
#include "../problem.h"

namespace flashbwd::short_sequences {

// Byte offsets of the optional regions of shared memory (config.h); 0: the region is not used.
struct SharedRegions {
  int32_t key_sums = 0;   // dk and dv of a KV head, summed over its query heads
  int32_t bias = 0;       // the bias, if all pairs of a CTA have the same
  int32_t bias_sums = 0;  // sums of the bias gradient over the pairs of a CTA
  int32_t bytes = 0;      // of all shared memory
};

struct KernelPlan {
  bool features = false;  // the variant of the kernel
  SharedRegions shared;
  int32_t slots = 0;  // CTAs per KV head
  // Partial sums of the gradient of a shared bias: (bias_slots, bias_planes, seqlen_q, seqlen_k), one plane per CTA.
  int32_t bias_slots = 0, bias_planes = 1;
  BiasGradientScratch bias_gradient;
};

}  // namespace flashbwd::short_sequences

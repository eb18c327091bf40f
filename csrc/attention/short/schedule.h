// The schedule of a call: the variant of the kernel, the regions of shared memory, and the grid. Chosen once from the
// problem and the device; the launcher encodes it. No CUDA here.
#pragma once

#include <string>

#include "config.h"
#include "layout.h"

namespace flashbwd {
struct DeviceInfo;
}  // namespace flashbwd

namespace flashbwd::short_sequences {

// True if heads or batches share elements of the bias whose gradient the call wants.
bool sums_bias_gradient(const AttentionProblem& problem);

SharedRegions shared_regions(const AttentionProblem& problem, const Tile& tile, const DeviceInfo& device);

KernelPlan plan_kernel(const AttentionProblem& problem, const Tile& tile, const DeviceInfo& device);

}  // namespace flashbwd::short_sequences

// Launches of flex decoding.
#pragma once

#include "../common/types.h"
#include "backward_params.h"
#include "plan.h"

namespace flashbwd {

// Of a stream: what its calls may use, one after the other.
struct StreamMemory {
  static constexpr int64_t kArrivals = 1 << 14;
  static constexpr int64_t kScratch = 1 << 21;  // what one wave of thread blocks writes at head dimension 256, and more
  int* arrivals = nullptr;                      // zeros between calls
  float* scratch = nullptr;
};

// Runs the split kernel, `kernel` (a CUkernel compiled at run time) or, when null, the one of params.ordinary, and
// with more than one slot of partial results and no arrivals the combine kernel. `aligned`: rows of q, k and v begin at
// multiples of 16 bytes. Returns null or a message.
const char* run_decoding(const DecodingParams& params, DecodingTile tile, DType dtype, bool aligned, void* kernel,
                         const DeviceInfo& info, void* stream);

// Gradients of q, k and v: the backward kernel, as above, and the sum of its slots of dq.
const char* run_decoding_backward(const DecodingBackwardParams& params, int head_dim, DType dtype, bool aligned,
                                  void* kernel, const DeviceInfo& info, void* stream);

}  // namespace flashbwd

// Launchers of the flex decoding kernels.
#pragma once

#include "../common/types.h"
#include "backward_params.h"
#include "plan.h"

namespace flashbwd {

// Device memory that all calls on one stream share; stream order serializes its use.
struct StreamMemory {
  static constexpr int64_t kArrivals = 1 << 14;
  static constexpr int64_t kScratch = 1 << 21;  // floats; enough for one wave of CTAs at head dimension 256
  int* arrivals = nullptr;                      // (kArrivals,), zeros between calls
  float* scratch = nullptr;                     // (kScratch,)
};

// Launches the split-KV kernel: `kernel` (a CUkernel compiled at run time), or the prebuilt kernel for params.built_in
// if `kernel` is null. Then launches the combine kernel if there are several slots and params.arrivals is null.
// `aligned` is the result of rows_are_aligned() for q, k and v. Returns null, or an error message.
const char* run_decoding(const DecodingParams& params, DecodingTile tile, DType dtype, bool aligned, void* kernel,
                         const DeviceInfo& info, void* stream);

// Launches the backward kernel (`kernel` as in run_decoding()), then the kernel that sums the slots of dq.
const char* run_decoding_backward(const DecodingBackwardParams& params, int head_dim, DType dtype, bool aligned,
                                  void* kernel, const DeviceInfo& info, void* stream);

}  // namespace flashbwd

// What the host passes to both kernels.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "../../params.h"
#include "../../pre_post/lse_delta.h"

namespace flashbwd::sm90::head_dim_512 {

struct Gradient {
  HeadsView view;
  DType dtype = DType::kBFloat16;
  int32_t columns = 0;
  bool vectors = false;  // rows can be written 16 bytes at a time
};

struct KernelParams {
  CUtensorMap q, k, v, dout;  // (D, rows, heads, batch); boxes of 64 columns and kRows rows
  AttentionBackwardParams attention;
  LseDelta lse_delta;
  Gradient dq, dk, dv;
  int32_t key_tiles = 0, query_tiles = 0;  // work tiles of the kernel for dk and dv, and of the one for dq
  // Rows past the logical end of a sequence hold other data, not the zeros that TMA loads past the end of a tensor.
  bool rows_may_be_poisoned = false;
};

// Launches the kernel for dk and dv, then the kernel for dq, on `stream`; returns null or a message. Defined in
// launch.cuh, which the files in instantiations/ compile for one head dimension and dtype each.
template <typename T, int kHeadDim>
const char* launch(const KernelParams& params, void* stream);

}  // namespace flashbwd::sm90::head_dim_512

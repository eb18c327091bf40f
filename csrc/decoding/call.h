// Converts the tensors of a decoding call to launch parameters, without copies. Rejects a call if Python must prepare
// its tensors first.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "../common/types.h"
#include "params.h"
#include "plan.h"

namespace flashbwd {

struct DecodingCall {
  TensorDesc q, k, v;
  // Empty: no mask. One tensor: block states (B or 1, H or 1, nq, nk). Two or four: counts and indices of the partial
  // blocks, then of the full blocks.
  std::vector<TensorDesc> mask;
  // (q_block, kv_block, seqlen_q, seqlen_k): the block sizes and the sequence lengths of the mask.
  std::array<int64_t, 4> mask_shape{};
  std::vector<TensorDesc> captured;
  bool enable_gqa = false;
};

// True if the kernels support these tensors as they are. In particular, no tensor may be empty and rows must be
// contiguous.
bool kernel_takes(const DecodingCall& call);

// True if every row of q, k and v is 16-byte aligned and a multiple of 16 bytes long.
bool rows_are_aligned(const DecodingCall& call);

// The properties of q, k and v that the planner uses.
DecodingShape shape_of(const DecodingCall& call);

// Launch parameters of a call, except outputs, scale and splits. Requires kernel_takes(call).
DecodingParams params_of(const DecodingCall& call, DecodingTile tile);

}  // namespace flashbwd

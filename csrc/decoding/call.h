// From the tensors of a call to the parameters of a launch, as they are: what Python has to prepare first is refused.
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
  // None; the states of all blocks; or counts and indices of the partial blocks, and perhaps of the full ones.
  std::vector<TensorDesc> mask;
  // Queries and keys of a block, and the lengths that the mask was made for.
  std::array<int64_t, 4> mask_shape{};
  std::vector<TensorDesc> captured;
  bool enable_gqa = false;
};

// Whether the kernels take these tensors, which must not be empty and whose rows must be contiguous.
bool kernel_takes(const DecodingCall& call);

// Whether the rows of q, k and v begin at multiples of 16 bytes and have such a length.
bool rows_are_aligned(const DecodingCall& call);

// What the planner is told of q, k and v.
DecodingShape shape_of(const DecodingCall& call);

// Parameters of a call that kernel_takes(), but for its outputs, scale and splits.
DecodingParams params_of(const DecodingCall& call, DecodingTile tile);

}  // namespace flashbwd

// A step past the dispatcher, for _C_python, which is built with PyTorch's own headers.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>

namespace flashbwd {

constexpr int kMostPassed = 8, kMostResults = 3;

}  // namespace flashbwd

// Tensors are query, key, value, and `passed` more; where a mask is among those, it was made for `lengths`. How many
// results there are, which the caller owns: none where no kernel takes the call as it is. Throws what goes wrong.
extern "C" __attribute__((visibility("default"))) int flashbwd_decoding_step(int64_t number, const int64_t* lengths,
                                                                             const AtenTensorHandle* tensors,
                                                                             int passed, AtenTensorHandle* results);

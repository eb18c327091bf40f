// Boxed implementations of the LayerNorm and RMSNorm operators; layer_norm.cpp registers them.
#pragma once

#include <torch/csrc/stable/library.h>

namespace flashbwd {

void layer_norm_backward(StableIValue* stack, uint64_t, uint64_t);
void rms_norm_backward(StableIValue* stack, uint64_t, uint64_t);
void norm_backward_from_output(StableIValue* stack, uint64_t, uint64_t);
void dropout_add_norm_backward(StableIValue* stack, uint64_t, uint64_t);
void layer_norm(StableIValue* stack, uint64_t, uint64_t);
void rms_norm(StableIValue* stack, uint64_t, uint64_t);
void dropout_add_norm_forward(StableIValue* stack, uint64_t, uint64_t);

}  // namespace flashbwd

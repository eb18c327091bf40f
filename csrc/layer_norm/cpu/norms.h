// LayerNorm and RMSNorm on CPUs: one pass over the rows, vectorised by the compiler, with sums in float32.
#pragma once

#include <cstdint>
#include <functional>

#include "../params.h"

namespace flashbwd::cpu {

// Threads that the caller provides.
struct Threads {
  int64_t count = 1;
  // Runs task(0) to task(tasks - 1), each exactly once, and returns after the last one.
  std::function<void(int64_t tasks, const std::function<void(int64_t)>& task)> run;
};

// True if the functions below support x's dtype, which must not be float64. They do not add a residual, and x is the
// norm's input, not its output.
bool supports(DType x_dtype);

// Pointers are to host memory. The workspace is not used. Results depend on the number of threads, not on their timing.
void layer_norm_backward(const LayerNormBackwardParams& params, const Threads& threads);
void layer_norm_forward(const LayerNormForwardParams& params, const Threads& threads);

}  // namespace flashbwd::cpu

// The kernels by form and dtype, filled in instantiations/.
#pragma once

#include <cuda_runtime.h>

#include "backward.cuh"
#include "row_sums.cuh"

namespace flashbwd::layer_norm {

struct Variant {
  void (*backward)(BackwardArguments);
  void (*row_sums)(BackwardArguments, float2*);
};

template <Form kForm, typename TX, typename TDZ>
constexpr Variant kernels() {
  constexpr Form kSums = kForm == Form::kOutput ? Form::kOutput : Form::kPlain;
  return {backward_kernel<kForm, TX, TDZ>, row_sums_kernel<kSums, TX, TDZ>};
}

// For x (or z, in Form::kOutput) of one dtype: by form and by dtype of dz; null functions where there is none. Dropout
// takes x of dz's dtype or fp32, the output form z of dz's.
Variant variant_of_float16(Form form, DType dz_dtype);
Variant variant_of_bfloat16(Form form, DType dz_dtype);
Variant variant_of_float32(Form form, DType dz_dtype);

}  // namespace flashbwd::layer_norm

// The kernels by form and dtype; instantiations/ defines them.
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

// The kernels for one dtype of x (or z in Form::kOutput); null pointers if the combination is not supported.
// Form::kDropout requires x in dz's dtype or in fp32, Form::kOutput requires z in dz's dtype.
Variant variant_of_float16(Form form, DType dz_dtype);
Variant variant_of_bfloat16(Form form, DType dz_dtype);
Variant variant_of_float32(Form form, DType dz_dtype);

}  // namespace flashbwd::layer_norm

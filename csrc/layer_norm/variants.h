// The kernels by dtype: one entry for each pair of dtypes of x and dz, filled in instantiations/.
#pragma once

#include <cuda_runtime.h>

#include "arguments.h"

namespace flashbwd::layer_norm {

struct Variant {
  void (*backward)(BackwardArguments);
  void (*row_sums)(BackwardArguments, float2*);
};

// By dtype of dz; null functions where there is none.
Variant variant_of_float16(DType dz_dtype);
Variant variant_of_bfloat16(DType dz_dtype);
Variant variant_of_float32(DType dz_dtype);

}  // namespace flashbwd::layer_norm

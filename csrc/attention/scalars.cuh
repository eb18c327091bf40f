// Stores an element whose dtype is known only at run time. The gradient of a bias has the bias's dtype.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../common/types.h"

namespace flashbwd {

__device__ __forceinline__ void store_scalar(void* data, int64_t index, DType dtype, float value) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(data)[index] = value;
  } else if (dtype == DType::kBFloat16) {
    static_cast<__nv_bfloat16*>(data)[index] = __float2bfloat16_rn(value);
  } else {
    static_cast<__half*>(data)[index] = __float2half_rn(value);
  }
}

}  // namespace flashbwd

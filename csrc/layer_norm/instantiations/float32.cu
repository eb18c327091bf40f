// x in float32, dz in each dtype.
#include "../backward.cuh"
#include "../row_sums.cuh"
#include "../variants.h"

namespace flashbwd::layer_norm {

Variant variant_of_float32(DType dz_dtype) {
  switch (dz_dtype) {
    case DType::kFloat16:
      return {backward_kernel<float, __half>, row_sums_kernel<float, __half>};
    case DType::kBFloat16:
      return {backward_kernel<float, __nv_bfloat16>, row_sums_kernel<float, __nv_bfloat16>};
    case DType::kFloat32:
      return {backward_kernel<float, float>, row_sums_kernel<float, float>};
    default:
      return {};
  }
}

}  // namespace flashbwd::layer_norm

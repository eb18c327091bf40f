// x in float16, dz in each dtype.
#include "../backward.cuh"
#include "../row_sums.cuh"
#include "../variants.h"

namespace flashbwd::layer_norm {

Variant variant_of_float16(DType dz_dtype) {
  switch (dz_dtype) {
    case DType::kFloat16:
      return {backward_kernel<__half, __half>, row_sums_kernel<__half, __half>};
    case DType::kBFloat16:
      return {backward_kernel<__half, __nv_bfloat16>, row_sums_kernel<__half, __nv_bfloat16>};
    case DType::kFloat32:
      return {backward_kernel<__half, float>, row_sums_kernel<__half, float>};
    default:
      return {};
  }
}

}  // namespace flashbwd::layer_norm

// x in bfloat16, dz in each dtype.
#include "../backward.cuh"
#include "../row_sums.cuh"
#include "../variants.h"

namespace flashbwd::layer_norm {

Variant variant_of_bfloat16(DType dz_dtype) {
  switch (dz_dtype) {
    case DType::kFloat16:
      return {backward_kernel<__nv_bfloat16, __half>, row_sums_kernel<__nv_bfloat16, __half>};
    case DType::kBFloat16:
      return {backward_kernel<__nv_bfloat16, __nv_bfloat16>, row_sums_kernel<__nv_bfloat16, __nv_bfloat16>};
    case DType::kFloat32:
      return {backward_kernel<__nv_bfloat16, float>, row_sums_kernel<__nv_bfloat16, float>};
    default:
      return {};
  }
}

}  // namespace flashbwd::layer_norm

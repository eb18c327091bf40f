// Backward kernels for x in float16 and dz in any dtype.
#include "../variants.h"

namespace flashbwd::layer_norm {
namespace {

template <typename TDZ>
Variant variant_of(Form form) {
  constexpr bool kSame = std::is_same_v<TDZ, __half>;
  if (form == Form::kPlain) return kernels<Form::kPlain, __half, TDZ>();
  if constexpr (kSame) {
    return form == Form::kDropout ? kernels<Form::kDropout, __half, TDZ>() : kernels<Form::kOutput, __half, TDZ>();
  }
  return {};
}

}  // namespace

Variant variant_of_float16(Form form, DType dz_dtype) {
  switch (dz_dtype) {
    case DType::kFloat16:
      return variant_of<__half>(form);
    case DType::kBFloat16:
      return variant_of<__nv_bfloat16>(form);
    case DType::kFloat32:
      return variant_of<float>(form);
    default:
      return {};
  }
}

}  // namespace flashbwd::layer_norm

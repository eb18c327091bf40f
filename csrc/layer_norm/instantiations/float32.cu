// Backward kernels for x in float32 and dz in any dtype.
#include "../variants.h"

namespace flashbwd::layer_norm {
namespace {

template <typename TDZ>
Variant variant_of(Form form) {
  constexpr bool kSame = std::is_same_v<TDZ, float>;
  if (form == Form::kPlain) return kernels<Form::kPlain, float, TDZ>();
  if (form == Form::kDropout) return kernels<Form::kDropout, float, TDZ>();
  if constexpr (kSame) return kernels<Form::kOutput, float, TDZ>();
  return {};
}

}  // namespace

Variant variant_of_float32(Form form, DType dz_dtype) {
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

// All prebuilt kernels of a dtype and head dimension: without a modification, and for the built-in modifications.
#pragma once

#include "backward.cuh"
#include "built_in.cuh"
#include "built_in_gradient.cuh"
#include "kernels.h"
#include "split_kv.cuh"

namespace flashbwd {

template <int kD, int kM, int kWarps, class T, bool kAligned, class Mod>
__global__ void __launch_bounds__(kWarps * 32, 1) split_kv_kernel(const __grid_constant__ DecodingParams p) {
  extern __shared__ __align__(128) unsigned char shared[];
  split_kv<kD, kM, kWarps, T, kAligned, Mod>(p, shared);
}

template <int kD, int kM, int kWarps, class T, class Mod>
DecodingKernels::Kernel either_alignment(bool aligned) {
  return aligned ? split_kv_kernel<kD, kM, kWarps, T, true, Mod> : split_kv_kernel<kD, kM, kWarps, T, false, Mod>;
}

template <int kD, class T, class Mod>
DecodingKernels::Kernel kernel_of_mod(DecodingTile tile, bool aligned) {
  constexpr int kFewWarps = kD == 256 ? 2 : 4;
  if (tile == DecodingTile{kD, 16, kFewWarps}) return either_alignment<kD, 16, kFewWarps, T, Mod>(aligned);
  if (tile == DecodingTile{kD, 16, 2 * kFewWarps}) return either_alignment<kD, 16, 2 * kFewWarps, T, Mod>(aligned);
  if constexpr (!kIsFloat<T> && kD < 256) {
    if (tile == DecodingTile{kD, 32, kFewWarps}) return either_alignment<kD, 32, kFewWarps, T, Mod>(aligned);
    if (tile == DecodingTile{kD, 32, 2 * kFewWarps}) return either_alignment<kD, 32, 2 * kFewWarps, T, Mod>(aligned);
  }
  return nullptr;
}

template <int kD, class T>
DecodingKernels::Kernel split_kernel(DecodingTile tile, bool aligned, int kind) {
  if (kind == BuiltInMod::kScore) return kernel_of_mod<kD, T, BuiltInKernelMod<true, false>>(tile, aligned);
  if (kind == BuiltInMod::kMask) return kernel_of_mod<kD, T, BuiltInKernelMod<false, true>>(tile, aligned);
  if (kind == BuiltInMod::kBoth) return kernel_of_mod<kD, T, BuiltInKernelMod<true, true>>(tile, aligned);
  return kernel_of_mod<kD, T, NoMod>(tile, aligned);
}

template <int kD, class T, bool kAligned, class Mod>
__global__ void __launch_bounds__(kBackwardWarps * 32, 1)
    backward_kernel(const __grid_constant__ DecodingBackwardParams p) {
  extern __shared__ __align__(128) unsigned char shared[];
  Backward<kD, T, kAligned, Mod>(p, shared).run();
}

template <int kD, class T, class Mod>
DecodingKernels::BackwardKernel backward_kernel_of_mod(bool aligned) {
  return aligned ? backward_kernel<kD, T, true, Mod> : backward_kernel<kD, T, false, Mod>;
}

template <int kD, class T>
DecodingKernels::BackwardKernel backward_kernel_of(bool aligned, int kind) {
  if (kind == BuiltInMod::kNone) return backward_kernel_of_mod<kD, T, NoModGradient>(aligned);
  if (kind == BuiltInMod::kScore) return backward_kernel_of_mod<kD, T, BuiltInGradient<false>>(aligned);
  return backward_kernel_of_mod<kD, T, BuiltInGradient<true>>(aligned);
}

template <int kD, class T>
DecodingKernels decoding_kernels() {
  return {split_kernel<kD, T>, backward_kernel_of<kD, T>};
}

}  // namespace flashbwd

// All prebuilt kernels of a dtype: without a modification, and for the built-in modifications.
#pragma once

#include "backward.cuh"
#include "built_in.cuh"
#include "built_in_gradient.cuh"
#include "combine.cuh"
#include "kernels.h"
#include "split_kv.cuh"
#include "sum_slots.cuh"

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

template <class T, class Mod>
DecodingKernels::Kernel kernel_of_mod(DecodingTile tile, bool aligned) {
  if (tile == DecodingTile{64, 16, 4}) return either_alignment<64, 16, 4, T, Mod>(aligned);
  if (tile == DecodingTile{64, 16, 8}) return either_alignment<64, 16, 8, T, Mod>(aligned);
  if (tile == DecodingTile{128, 16, 4}) return either_alignment<128, 16, 4, T, Mod>(aligned);
  if (tile == DecodingTile{128, 16, 8}) return either_alignment<128, 16, 8, T, Mod>(aligned);
  if (tile == DecodingTile{256, 16, 2}) return either_alignment<256, 16, 2, T, Mod>(aligned);
  if (tile == DecodingTile{256, 16, 4}) return either_alignment<256, 16, 4, T, Mod>(aligned);
  if constexpr (!kIsFloat<T>) {
    if (tile == DecodingTile{64, 32, 4}) return either_alignment<64, 32, 4, T, Mod>(aligned);
    if (tile == DecodingTile{64, 32, 8}) return either_alignment<64, 32, 8, T, Mod>(aligned);
    if (tile == DecodingTile{128, 32, 4}) return either_alignment<128, 32, 4, T, Mod>(aligned);
    if (tile == DecodingTile{128, 32, 8}) return either_alignment<128, 32, 8, T, Mod>(aligned);
  }
  return nullptr;
}

template <class T>
DecodingKernels::Kernel split_kernel(DecodingTile tile, bool aligned, int kind) {
  if (kind == BuiltInMod::kScore) return kernel_of_mod<T, BuiltInKernelMod<true, false>>(tile, aligned);
  if (kind == BuiltInMod::kMask) return kernel_of_mod<T, BuiltInKernelMod<false, true>>(tile, aligned);
  if (kind == BuiltInMod::kBoth) return kernel_of_mod<T, BuiltInKernelMod<true, true>>(tile, aligned);
  return kernel_of_mod<T, NoMod>(tile, aligned);
}

template <int kD, class T, bool kAligned, class Mod>
__global__ void __launch_bounds__(kBackwardWarps * 32, 1)
    backward_kernel(const __grid_constant__ DecodingBackwardParams p) {
  extern __shared__ __align__(128) unsigned char shared[];
  Backward<kD, T, kAligned, Mod>(p, shared).run();
}

template <class T, class Mod>
DecodingKernels::BackwardKernel backward_kernel_of_mod(int head_dim, bool aligned) {
  if (head_dim == 64) return aligned ? backward_kernel<64, T, true, Mod> : backward_kernel<64, T, false, Mod>;
  if (head_dim == 128) return aligned ? backward_kernel<128, T, true, Mod> : backward_kernel<128, T, false, Mod>;
  if (head_dim == 256) return aligned ? backward_kernel<256, T, true, Mod> : backward_kernel<256, T, false, Mod>;
  return nullptr;
}

template <class T>
DecodingKernels::BackwardKernel backward_kernel_of(int head_dim, bool aligned, int kind) {
  if (kind == BuiltInMod::kNone) return backward_kernel_of_mod<T, NoModGradient>(head_dim, aligned);
  if (kind == BuiltInMod::kScore) return backward_kernel_of_mod<T, BuiltInGradient<false>>(head_dim, aligned);
  return backward_kernel_of_mod<T, BuiltInGradient<true>>(head_dim, aligned);
}

template <class T>
DecodingKernels decoding_kernels() {
  return {split_kernel<T>, combine_kernel<T>, backward_kernel_of<T>, sum_slots_kernel<T>};
}

}  // namespace flashbwd

// The kernel that NVRTC compiles with a generated score_mod (score_mod/generated.cuh). flashbwd/flex/generated.py
// writes the rest of the source.
#pragma once

#include "kernel.cuh"

namespace flashbwd::sm90 {

// kHeadDim: of a row of kTiles. Mod_: the generated score_mod.
template <typename T, int kHeadDim, typename Mod_>
struct GeneratedTraits
    : Traits<T, find_tile(kHeadDim, kHeadDim, feature::kBlockMask | feature::kGenerated, false), false, false> {
  using Mod = Mod_;
};

template <typename T, int kHeadDim, typename Mod>
__device__ __forceinline__ void generated_backward(const GeneratedParams& params) {
  using Traits = GeneratedTraits<T, kHeadDim, Mod>;
  static_assert(sizeof(typename Traits::SharedStorage) <= kSharedMemoryBytes, "the tile does not fit in shared memory");
  backward<Traits>(params);
}

}  // namespace flashbwd::sm90

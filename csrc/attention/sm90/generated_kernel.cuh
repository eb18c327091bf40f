// The kernel that NVRTC compiles with a generated score_mod (score_mod/generated.cuh). flashbwd/flex/generated.py
// writes the rest of the source.
#pragma once

#include "kernel.cuh"
#include "large_head_dim/kernel.cuh"

namespace flashbwd::sm90 {

template <typename T, int kTileIndex, typename Mod_>
struct GeneratedTraits : Traits<T, kTileIndex, false, false> {
  using Mod = Mod_;
};

// The body of a kernel for a row of kTiles, with threads_of(tile) threads. Mod: the generated score_mod. Clusters are
// launched as the row says.
template <typename T, int kTileIndex, typename Mod>
__device__ __forceinline__ void generated_backward(const GeneratedParams& params) {
  static_assert(has(kTiles[kTileIndex], feature::kGenerated), "a row of another kernel");
  if constexpr (is_large(kTiles[kTileIndex])) {
    large_head_dim::backward<large_head_dim::Traits<T, kTileIndex, false, Mod>>(params);
  } else {
    sm90::backward<GeneratedTraits<T, kTileIndex, Mod>>(params);
  }
}

}  // namespace flashbwd::sm90

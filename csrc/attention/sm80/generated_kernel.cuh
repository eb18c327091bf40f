// The kernel that NVRTC compiles with a generated score_mod. flashbwd/flex/generated.py writes the rest of the source.
#pragma once

#include "kernel.cuh"

namespace flashbwd::sm80 {

// kTileIndex: a row of kTiles. Mod_: the generated score_mod. kTf32: fp32 products are single TF32 products.
template <typename T, int kTileIndex, bool kTf32, typename Mod_>
struct GeneratedTraits
    : Traits<T, kTileIndex, Variant::kGenerated, std::conditional_t<kTf32, MmaFp32<Fp32Products::kOne>, Mma<T>>> {
  using Mod = Mod_;
};

template <typename T, int kTileIndex, bool kTf32, typename Mod>
__device__ __forceinline__ void generated_backward(const GeneratedParams& params) {
  using Traits = GeneratedTraits<T, kTileIndex, kTf32, Mod>;
  static_assert(sizeof(typename Traits::SharedStorage) <= generated_shared_bytes(Traits::kTile),
                "the tile table counts too little");
  backward<Traits>(params);
}

}  // namespace flashbwd::sm80

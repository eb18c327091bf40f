// The key mask of a work tile: one bool per key, for all queries and heads of a batch entry.
#pragma once

#include <cstdint>

#include "../../common/mma.cuh"
#include "scheduler.cuh"

namespace flashbwd::sm80 {

// Which keys the mask shows, counted from the first key of a work tile. load_tile fills the other rows with zeros, so
// that NaN in a hidden key does not reach dq.
struct ShownKeys {
  const uint8_t* shown = nullptr;  // of the first key; null: all keys are shown
  int64_t stride = 0;

  ShownKeys() = default;
  __device__ __forceinline__ ShownKeys(const KeyMaskView& mask, int32_t batch, int32_t first_key) {
    if (mask.data == nullptr) return;
    shown = mask.data + batch * mask.batch_stride + first_key * mask.key_stride;
    stride = mask.key_stride;
  }
  __device__ __forceinline__ bool all() const { return shown == nullptr; }
  __device__ __forceinline__ bool operator()(int32_t key) const { return shown == nullptr || shown[key * stride] != 0; }
};

// The mask of a warp's keys as bits, bit n for key n. Each warp has a word in shared memory and reads it again for each
// tile, because the kernels have no register left for it.
template <typename Traits>
struct KeyBits {
  static constexpr int kKeys = Traits::kKeyTiles * 16;
  static_assert(kKeys <= 32, "each lane reads one key");

  // Called by all lanes, for a work tile with keys. Does nothing without a key mask. `words`: one per warp. Bits of
  // keys past the end of the sequence have no meaning, because ScorePosition::mask hides these keys.
  static __device__ __forceinline__ void store(const KernelParams& params, const WorkTile& work, uint32_t* words) {
    const KeyMaskView& mask = params.attention.key_mask;
    if (mask.data == nullptr) return;
    const int32_t first = work.key_block * Traits::kBlockN + Traits::warp_n() * kKeys;
    const int32_t key = min(first + Traits::lane(), work.sequence.seqlen_k - 1);
    const bool shown = mask.data[work.batch * mask.batch_stride + key * mask.key_stride] != 0;
    const uint32_t bits = __ballot_sync(0xffffffffu, shown);
    if (Traits::lane() == 0) store_shared_word(smem_address(words + Traits::warp()), bits);
    __syncwarp();  // lane 0 has written the word
  }

  static __device__ __forceinline__ uint32_t load(const uint32_t* words) {
    return load_shared_word(smem_address(words) + Traits::warp() * 4);
  }
};

}  // namespace flashbwd::sm80

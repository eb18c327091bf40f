// A key mask beside a bias: one bool per key of a batch entry. Each consumer thread keeps bits of its keys in shared
// memory, because the main loop has no register left for them.
#pragma once

#include "kernel_params.h"
#include "traits.cuh"

namespace flashbwd::sm90 {

template <typename Traits>
struct KeyMask {
  // Called by the consumers when k and v of a work tile have arrived. Zeroes the rows that the mask hides, so that NaN
  // in them reaches no product, and sets the thread's bits: of batch entry m bit 2 m for its first key, bit 2 m + 1 for
  // the key 8 rows after it. An entry past the end of the batch has no visible keys, and TMA has loaded zeros for it.
  // `c` is the consumer warpgroup (Mainloop).
  template <typename Consumer>
  static __device__ __forceinline__ void apply(const Consumer& c) {
    const AttentionBackwardParams& p = c.params.attention;
    uint32_t hidden = 0;
    if (p.key_mask.data != nullptr) {
#pragma unroll
      for (int m = 0; m < Traits::kBatchEntries; ++m) {
        if (c.work.batch + m < p.batch) hidden |= zero_hidden_rows(c, m) << 2 * m;
      }
      fence_async_shared();
      named_barrier_sync(kConsumersBarrier, kConsumerThreads);
    }
    if (Traits::kBatchEntries > 1 && c.work.batch + 1 >= p.batch) hidden |= 0b1100;
    c.smem.hidden_keys[threadIdx.x - kWarpgroupThreads] = static_cast<uint8_t>(hidden);
  }

  // Masks scores of hidden keys. `value`: as for keep_visible.
  template <typename Consumer, typename Value>
  static __device__ __forceinline__ void hide(const Consumer& c, typename Consumer::Scores& scores, Value value) {
    const uint32_t hidden = c.smem.hidden_keys[threadIdx.x - kWarpgroupThreads];
    if (hidden == 0) return;
#pragma unroll
    for (int m = 0; m < Traits::kMmaTiles; ++m) {
      keep_visible(scores[m], [&](int half) { return hidden >> (2 * m + half) & 1 ? 0u : ~0u; }, value);
    }
  }

 private:
  // Returns the bits of batch entry m.
  template <typename Consumer>
  static __device__ __forceinline__ uint32_t zero_hidden_rows(const Consumer& c, int m) {
    const KeyMaskView& mask = c.params.attention.key_mask;
    const int32_t keys = c.work.visibility.seqlen_k - c.work.first_key;
    const uint8_t* const shown =
        mask.data + (c.work.batch + m) * mask.batch_stride + c.work.first_key * mask.key_stride;
    const auto hides = [&](int32_t key) { return key < keys && shown[key * mask.key_stride] == 0; };
    const int32_t thread = threadIdx.x % kConsumerThreads, row = thread / kThreadsPerRow;
    if (hides(row)) {
      const int32_t first = m * Traits::kKeyBytes + row * Traits::kRowBytes + thread % kThreadsPerRow * kBytes;
#pragma unroll
      for (int atom = 0; atom < Traits::kAtoms; ++atom) {
#pragma unroll
        for (int vector = 0; vector < kBytes; vector += sizeof(uint4)) {
          const int32_t byte = first + atom * Traits::kKeyAtomBytes + vector;
          *reinterpret_cast<uint4*>(c.smem.k + byte) = uint4{};
          *reinterpret_cast<uint4*>(c.smem.v + byte) = uint4{};
        }
      }
    }
    const int32_t key = c.first_own_key();
    return static_cast<uint32_t>(hides(key)) | static_cast<uint32_t>(hides(key + 8)) << 1;
  }

  static constexpr int kThreadsPerRow = kConsumerThreads / Traits::kBlockN;
  static constexpr int kBytes = Traits::kRowBytes / kThreadsPerRow;  // of a row of an atom, per thread
};

}  // namespace flashbwd::sm90

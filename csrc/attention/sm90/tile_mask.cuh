// Probabilities and masks of S^T, (64 keys, kBlockM queries), in the registers of a warpgroup
// (../../common/wgmma_fragments.cuh). BandMask and BitMask are policies of the main loop: which scores are visible.
#pragma once

#include <type_traits>

#include "../../common/hopper.cuh"
#include "../../common/wgmma_fragments.cuh"
#include "../index/query_iterator.h"
#include "../index/tile_visibility.h"
#include "../params.h"
#include "config.h"

namespace flashbwd::sm90 {

// S becomes scale * S - lse, the exponent of P.
template <int kValues, int kEarly>
__device__ __forceinline__ void scale_scores(float (&s)[kValues], const QueryValues<kEarly>& lse_log2,
                                             float scale_log2) {
  for_each_query<0, kValues>(lse_log2, [&](int i, float lse) { s[i] = s[i] * scale_log2 - lse; });
}

// Exponents become P, in values kBegin to kEnd.
template <int kBegin, int kEnd, int kValues>
__device__ __forceinline__ void exponentiate(float (&exponents)[kValues]) {
#pragma unroll
  for (int i = kBegin; i < kEnd; ++i) exponents[i] = exp2_approximate(exponents[i]);
}

// S becomes P = exp(scale * S - lse).
template <int kValues, int kEarly>
__device__ __forceinline__ void exponentiate(float (&s)[kValues], const QueryValues<kEarly>& lse_log2,
                                             float scale_log2) {
  scale_scores(s, lse_log2, scale_log2);
  exponentiate<0, kValues>(s);
}

// Masks values, or packed pairs of them, of key `row` and key row + 8 in a tile of kBlockM queries. `column` is the
// thread's first column. `hidden`: as for keep_visible.
template <int kBlockM, typename Values, typename... Hidden>
__device__ __forceinline__ void mask(Values& values, const TileVisibility& tile, int32_t row, int32_t column,
                                     Hidden... hidden) {
  keep_visible(values, [&](int half) { return columns_that_see<kBlockM>(tile, row + 8 * half, column); }, hidden...);
}

// The mask is a band, i.e. two bounds of j - i (index/visibility.h). `c` is the consumer warpgroup (Mainloop).
template <typename Traits>
struct BandMask {
  using Iterator = QueryIterator;

  BlockRange interior;  // a copy, because every iteration needs it and shared memory would answer too late

  template <typename WorkTile>
  __device__ explicit BandMask(const WorkTile& work) : interior(work.interior) {}

  template <typename SharedStorage, typename WorkTile>
  static __device__ Iterator first_iteration(const SharedStorage&, const WorkTile& work) {
    return Iterator(work);
  }

  template <typename Consumer>
  __device__ __forceinline__ void find(const Consumer&) {}

  // Masks scores, or packed pairs of them. `hidden`: as for keep_visible, for each MMA tile.
  template <typename Consumer, typename Values, typename... Hidden>
  __device__ __forceinline__ void apply(const Consumer& c, Values& values, Hidden... hidden) const {
    if (interior.contains(c.it.query_block())) return;
    const TileVisibility tile(c.work.visibility, c.work.first_key, c.it.query_block() * Traits::kBlockM);
#pragma unroll
    for (int m = 0; m < Traits::kMmaTiles; ++m) {
      mask<Traits::kOwnQueries>(values[m], tile, c.first_own_key() + m * Traits::kTileKeys, c.own_query + c.pair,
                                hidden...);
    }
  }
};

// A consumer's position in the query loop of a block mask. The loader says what is in each stage of q;
// QueryBlockEntry::head is the query head itself there.
template <int kStages>
struct ListedIterator {
  const QueryBlockEntry* stages;
  int32_t index, end;

  template <typename Tile>
  __device__ void advance(const Tile&) {
    ++index;
  }
  __device__ __forceinline__ const QueryBlockEntry& entry() const { return stages[index % kStages]; }
  __device__ __forceinline__ int32_t head() const { return entry().head; }
  __device__ __forceinline__ int32_t query_block() const { return entry().query_block; }
};

// A thread's bits of a tile, which say which of its scores are visible: those of key `row` from the lowest bit on, then
// those of row + 8.
template <int kWords>
struct VisibleBits {
  static_assert(kWords <= 2, "a thread has two keys");
  uint32_t words[kWords];

  // Of value i of an accumulator.
  __device__ __forceinline__ bool operator[](int i) const {
    const int bit = i % 4 / 2 * (16 * kWords) + i / 4 * 2 + i % 2;
    return words[bit / 32] >> bit % 32 & 1;
  }
  // The bits of key `row` if half is 0, and of row + 8 if half is 1, from the lowest bit on.
  __device__ __forceinline__ uint32_t of_key(int half) const {
    return kWords == 2 ? words[half] : words[0] >> 16 * half;
  }
};

// A tile has kWords words of bits for each consumer thread, or no bits if every pair is visible. The loader leaves the
// bits of each warp where the warp will write dS of the same iteration.
template <typename Traits>
struct BitMask {
  using Iterator = ListedIterator<Traits::kStages>;
  static constexpr int kWords = Traits::kBlockM / 64;
  using Bits = VisibleBits<kWords>;
  static constexpr int kWarps = kConsumerThreads / 32;
  static constexpr uint32_t kWarpBytes = 32 * kWords * sizeof(uint32_t);
  static constexpr uint32_t kDsBytes = 16 * kAtomRowBytes;  // from the dS of a warp, with 16 keys, to that of the next

  int32_t tile = -1;  // of this iteration

  template <typename WorkTile>
  __device__ explicit BitMask(const WorkTile&) {}

  template <typename SharedStorage, typename WorkTile>
  static __device__ Iterator first_iteration(const SharedStorage& smem, const WorkTile& work) {
    return {smem.listed, work.first_index, work.first_index + work.iterations};
  }

  // Called by the loader. `tile`: of bits, or -1. `ds`: the dS buffer of the iteration. `barrier` expects the bytes.
  static __device__ __forceinline__ uint32_t bytes(int32_t tile) { return tile >= 0 ? kWarps * kWarpBytes : 0; }
  static __device__ __forceinline__ void load(const int32_t* bits, int32_t tile, uint8_t* ds, uint64_t* barrier) {
    if (tile < 0) return;
    bits += int64_t{tile} * kConsumerThreads * kWords;
#pragma unroll 1
    for (int warp = 0; warp < kWarps; ++warp) {
      bulk_load(ds + warp * kDsBytes, bits + warp * 32 * kWords, kWarpBytes, barrier);
    }
  }

  // Called before the wait for S: shared memory answers while S is computed.
  template <typename Consumer>
  __device__ __forceinline__ void find(const Consumer& c) {
    tile = c.it.entry().bits;
  }

  // The bits of this thread. The warp has not written dS yet.
  template <typename Consumer>
  __device__ __forceinline__ Bits bits(const Consumer& c) const {
    Bits bits;
    const uint32_t* const words = own_words(c);
#pragma unroll
    for (int i = 0; i < kWords; ++i) bits.words[i] = tile >= 0 ? words[i] : ~0u;
    return bits;
  }

  // Masks scores, or packed pairs of them. `hidden`: as for keep_visible, for each MMA tile.
  template <typename Consumer, typename Values, typename... Hidden>
  __device__ __forceinline__ void apply(const Consumer& c, Values& values, Hidden... hidden) const {
    if (__builtin_expect(tile < 0, true)) return;
    const Bits visible = *reinterpret_cast<const Bits*>(own_words(c));
    keep_visible(values[0], [&](int half) { return visible.of_key(half); }, hidden...);
  }

 private:
  template <typename Consumer>
  static __device__ __forceinline__ const uint32_t* own_words(const Consumer& c) {
    const int32_t thread = read_thread() - kWarpgroupThreads;
    const uint8_t* const ds = c.smem.ds[c.it.index % Traits::kDsBuffers][0] + thread / 32 * kDsBytes;
    return reinterpret_cast<const uint32_t*>(ds) + thread % 32 * kWords;
  }
};

template <typename Traits>
using TileMask = std::conditional_t<Traits::kBlockMask, BitMask<Traits>, BandMask<Traits>>;

}  // namespace flashbwd::sm90

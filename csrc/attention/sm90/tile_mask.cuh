// Probabilities and masks of S^T, (64 keys, kBlockM queries), in the registers of a warpgroup
// (../../common/wgmma_fragments.cuh). BandMask and BitMask are policies of the main loop: which scores are visible.
#pragma once

#include <type_traits>

#include "../../common/ordered.cuh"
#include "../../common/wgmma_fragments.cuh"
#include "../index/query_iterator.h"
#include "../index/tile_visibility.h"
#include "../params.h"
#include "config.h"

namespace flashbwd::sm90 {

// S becomes P = exp(scale * S - lse).
template <int kValues, int kEarly>
__device__ __forceinline__ void exponentiate(float (&s)[kValues], const QueryValues<kEarly>& lse_log2,
                                             float scale_log2) {
  for_each_query<0, kValues>(lse_log2, [&](int i, float lse) { s[i] = exp2_approximate(s[i] * scale_log2 - lse); });
}

// Zeroes values, or packed pairs of them, for which key `row` of a tile of kBlockM queries (or row + 8) is invisible.
// `column` is the thread's first column.
template <int kBlockM, typename Values>
__device__ __forceinline__ void mask(Values& values, const TileVisibility& tile, int32_t row, int32_t column) {
  keep_visible(values, [&](int half) { return columns_that_see<kBlockM>(tile, row + 8 * half, column); });
}

// The mask is a band, i.e. two bounds of j - i (index/visibility.h). `c` is the consumer warpgroup (Mainloop).
template <typename Traits>
struct BandMask {
  using Iterator = QueryIterator;
  static constexpr int kWords = 0;

  BlockRange interior;  // a copy, because every iteration needs it and shared memory would answer too late

  template <typename WorkTile>
  __device__ explicit BandMask(const WorkTile& work) : interior(work.interior) {}

  template <typename SharedStorage, typename WorkTile>
  static __device__ Iterator first_iteration(const SharedStorage&, const WorkTile& work) {
    return Iterator(work);
  }

  template <typename Consumer>
  __device__ __forceinline__ void load(const Consumer&) {}
  __device__ __forceinline__ const uint32_t* words() const { return nullptr; }

  // Zeroes what is invisible: scores, or packed pairs of them.
  template <typename Consumer, typename Values>
  __device__ __forceinline__ void apply(const Consumer& c, Values& values) const {
    if (interior.contains(c.it.query_block())) return;
    const TileVisibility tile(c.work.visibility, c.work.first_key, c.it.query_block() * Traits::kBlockM);
#pragma unroll
    for (int m = 0; m < Traits::kMmaTiles; ++m) {
      mask<Traits::kOwnQueries>(values[m], tile, c.first_own_key() + m * Traits::kTileKeys, c.own_query + c.pair);
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

// Bit of value i of kValues of a thread, in its words of a tile of bits: the values of key `row` from the lowest bit
// on, then those of row + 8.
template <int kValues>
__device__ __forceinline__ bool bit_of_value(const uint32_t* words, int i) {
  const int bit = i % 4 / 2 * (kValues / 2) + i / 4 * 2 + i % 2;
  return words[bit / 32] >> bit % 32 & 1;
}

// The mask is a tile of bits, with kWords words for each consumer thread, or every pair of the tile is visible.
template <typename Traits>
struct BitMask {
  using Iterator = ListedIterator<Traits::kStages>;
  static constexpr int kWords = Traits::kBlockM / 64;

  uint32_t visible[kWords];

  template <typename WorkTile>
  __device__ explicit BitMask(const WorkTile&) {}

  template <typename SharedStorage, typename WorkTile>
  static __device__ Iterator first_iteration(const SharedStorage& smem, const WorkTile& work) {
    return {smem.listed, work.first_index, work.first_index + work.iterations};
  }

  // Loads early: ptxas would sink a plain load to the use of the words, behind the wait for S.
  template <typename Consumer>
  __device__ __forceinline__ void load(const Consumer& c) {
    const int32_t tile = c.it.entry().bits;
    const int64_t word = (int64_t{tile} * kConsumerThreads + read_thread() - kWarpgroupThreads) * kWords;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      visible[i] = tile >= 0 ? load_relaxed(c.params.attention.block_mask.bits + word + i) : ~0u;
    }
  }
  __device__ __forceinline__ const uint32_t* words() const { return visible; }

  // The policies that pack scores early have used words().
  template <typename Consumer, typename Values>
  __device__ __forceinline__ void apply(const Consumer&, Values& values) const {
    if constexpr (std::is_same_v<Values, typename Consumer::Scores>) {
      if ((visible[0] & visible[kWords - 1]) == ~0u) return;
      keep_visible(values[0], [&](int half) { return kWords == 2 ? visible[half] : visible[0] >> 16 * half; });
    }
  }
};

template <typename Traits>
using TileMask = std::conditional_t<Traits::kBlockMask, BitMask<Traits>, BandMask<Traits>>;

}  // namespace flashbwd::sm90

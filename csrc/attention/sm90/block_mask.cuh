// Query loops that a block mask lists: what the producer reads, what it tells the consumers, and the bits of partial
// tiles. docs/kernels/attention_sm90_features.md describes the lists.
#pragma once

#include <cstdint>

#include "../params.h"

namespace flashbwd::sm90 {

// The query loop of a work tile with a block mask.
template <bool kListed>
struct ListedLoop {};

template <>
struct ListedLoop<true> {
  const QueryBlockEntry* entries;
};

// A position in the query loop of a work tile with a block mask, which says what to visit.
struct ListIterator {
  int32_t index;  // as in QueryIterator
  int32_t end;
  int32_t bits;         // QueryBlockEntry::bits
  int32_t adds_before;  // QueryBlockEntry::adds_before

  template <typename Tile>
  __device__ explicit ListIterator(const Tile& tile)
      : index(tile.first_index), end(tile.first_index + tile.iterations) {
    if (index < end) read(tile);
  }

  __device__ int32_t head() const { return head_; }
  __device__ int32_t query_block() const { return query_block_; }

  template <typename Tile>
  __device__ void advance(const Tile& tile) {
    if (++index < end) read(tile);
  }

 private:
  template <typename Tile>
  __device__ __forceinline__ void read(const Tile& tile) {
    const int4 entry = __ldg(reinterpret_cast<const int4*>(tile.entries) + (index - tile.first_index));
    query_block_ = entry.x;
    head_ = tile.first_head + entry.y;
    bits = entry.z;
    adds_before = entry.w;
  }

  int32_t head_, query_block_;
};

// What the loader tells the consumers about the query blocks in the stages of q: `head` is the query head.
template <int kStages>
struct ListedStages {
  QueryBlockEntry entries[kStages];
};

template <>
struct ListedStages<0> {};

// A consumer's position in the query loop of a work tile with a block mask. What it visits lies in the stage of q.
struct ListedStep {
  int32_t index, end;

  template <typename Tile>
  __device__ explicit ListedStep(const Tile& tile) : index(tile.first_index), end(tile.first_index + tile.iterations) {}

  template <typename Tile>
  __device__ void advance(const Tile&) {
    ++index;
  }
};

// Bit of value i of kValues of a thread, in a tile of bits of a block mask: the values of key `row` from the lowest bit
// on, then those of row + 8.
template <int kValues>
__device__ __forceinline__ bool bit_of_value(const uint32_t* bits, int i) {
  const int bit = i % 4 / 2 * (kValues / 2) + i / 4 * 2 + i % 2;
  return bits[bit / 32] >> bit % 32 & 1;
}

// Zeroes the values that a tile of bits hides.
template <int kValues, int kWords>
__device__ __forceinline__ void mask_by_bits(float (&p)[kValues], const uint32_t (&visible)[kWords]) {
#pragma unroll
  for (int i = 0; i < kValues; ++i) p[i] = bit_of_value<kValues>(visible, i) ? p[i] : 0.f;
}

}  // namespace flashbwd::sm90

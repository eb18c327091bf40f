// The key tiles that the rows of a row tile visit. Block lists are device data that the host cannot check. So the
// kernel clamps a count to the number of columns, and treats an index out of range as a block without keys.
#pragma once

#include "params.h"
#include "ptx.cuh"

#ifdef __CUDACC__

namespace flashbwd {

// The key tiles of kKeys keys that the rows of a row tile visit, in order: all of them, or those of the mask blocks in
// the block lists that these rows share (first the partial blocks, then the full ones).
template <int kKeys>
struct KeyTileList {
  const int* partial = nullptr;
  const int* full = nullptr;
  int partial_blocks = 0;
  int tiles_per_block = 0;  // key tiles per mask block; 0: there are no lists, visit all keys
  int kv_block = 0;
  int seqlen_k = 0;
  int total = 0;  // key tiles
};

struct KeyTile {
  int first_key;
  int end_key;  // end of the mask block, or of all keys; the tile may reach beyond it
  int full;     // true if the tile is in a full block, which needs no mask_mod
};

// Iterates over key tile `start` and then every kWarps-th key tile. It reads each list entry one iteration before it is
// needed, to hide the latency of the load.
template <int kKeys, int kWarps>
class KeyTileIterator {
 public:
  int index;  // of the current key tile in the list

  __device__ KeyTileIterator(const KeyTileList<kKeys>& list, int start, int end)
      : index(start), list_(list), end_(end) {
    if (list.tiles_per_block == 0) return;
    entry_ = start / list.tiles_per_block;
    inside_ = start - entry_ * list.tiles_per_block;
    if (start < end) block_ = read();
    set_tile_and_read_ahead();
  }

  __device__ bool at_end() const { return index >= end_; }

  __device__ KeyTile tile() const {
    if (list_.tiles_per_block == 0) return {index * kKeys, list_.seqlen_k, 0};
    return tile_;
  }

  __device__ void advance() {
    index += kWarps;
    if (list_.tiles_per_block > 0) set_tile_and_read_ahead();
  }

 private:
  const KeyTileList<kKeys>& list_;
  const int end_;
  KeyTile tile_;
  // The next key tile: its entry in the lists, its index within that mask block, and the block index that was read.
  int entry_ = 0, inside_ = 0, block_ = 0;

  __device__ int read() const {
    return entry_ < list_.partial_blocks ? list_.partial[entry_] : list_.full[entry_ - list_.partial_blocks];
  }

  __device__ void set_tile_and_read_ahead() {
    // The cast to unsigned makes a negative index large too. An index that is too large is clamped to seqlen_k.
    const unsigned long long key = static_cast<unsigned long long>(static_cast<unsigned>(block_)) * list_.kv_block;
    const int first = static_cast<int>(min(key, static_cast<unsigned long long>(list_.seqlen_k)));
    tile_ = {first + inside_ * kKeys, min(first + list_.kv_block, list_.seqlen_k), entry_ >= list_.partial_blocks};
    inside_ += kWarps;
    if (inside_ < list_.tiles_per_block) return;
    do {
      inside_ -= list_.tiles_per_block;
      ++entry_;
    } while (inside_ >= list_.tiles_per_block);
    if (index + kWarps < end_) block_ = read();
  }
};

// The first of split `split`, if `total` items are divided among `splits` splits whose sizes differ by at most one.
__device__ inline int begin_of_split(int total, int split, int splits) {
  const int least = total / splits;
  return least * split + min(split, total - least * splits);
}

// True if a row tile visits only the mask blocks in its lists; false if it visits all keys.
template <class Mod>
__device__ bool uses_block_lists(const DecodingParams& p) {
  return Mod::kHasMask && p.states == nullptr;
}

// The list of one query block: the addresses of its count and of its indices. Null if there is no list.
struct QueryBlockList {
  const int* count = nullptr;
  const int* indices = nullptr;
  int columns = 0;

  QueryBlockList() = default;
  __device__ QueryBlockList(const BlockList& list, int b, int h, int q) {
    if (list.counts == nullptr || list.columns == 0) return;
    columns = list.columns;
    count = list.counts + b * list.count_strides[0] + h * list.count_strides[1] + q * list.count_strides[2];
    indices = list.indices + b * list.index_strides[0] + h * list.index_strides[1] + q * list.index_strides[2];
  }

  // Prefetches the count and the first indices of a split. The first entry of a split depends on the counts, which have
  // not been loaded yet, so this prefetches the entry that would be the first one if the list were full.
  __device__ void prefetch_first(const BlockList& list, int split, int splits) const {
    if (count == nullptr) return;
    prefetch(count);
    prefetch(indices + begin_of_split(list.columns, split, splits));
  }
  __device__ int blocks() const { return count == nullptr ? 0 : min(max(*count, 0), columns); }
};

template <int kKeys, class Mod>
__device__ KeyTileList<kKeys> key_tile_list(const DecodingParams& p, const QueryBlockList& partial,
                                            const QueryBlockList& full) {
  KeyTileList<kKeys> list;
  list.seqlen_k = p.seqlen_k;
  list.total = (p.seqlen_k + kKeys - 1) / kKeys;
  if (!uses_block_lists<Mod>(p)) return list;
  list.partial = partial.indices;
  list.full = full.indices;
  list.partial_blocks = partial.blocks();
  // If blocks are longer than seqlen_k, there is only block 0, and the clamp keeps index * kv_block in 32 bits.
  list.kv_block = min(p.kv_block, p.seqlen_k);
  list.tiles_per_block = (list.kv_block + kKeys - 1) / kKeys;
  list.total = (list.partial_blocks + full.blocks()) * list.tiles_per_block;
  return list;
}

}  // namespace flashbwd

#endif

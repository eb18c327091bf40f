// Which key chunks the rows of a tile visit. Block lists are device data that the host cannot check, so the kernel
// clamps a count to the number of columns and treats an index out of range as a block without keys.
#pragma once

#include "params.h"
#include "ptx.cuh"

#ifdef __CUDACC__

namespace flashbwd {

// The chunks of kKeys keys that the rows of a tile visit: all chunks, or those of the blocks in their shared lists
// (first the partial blocks, then the full ones).
template <int kKeys>
struct ChunkList {
  const int* partial = nullptr;
  const int* full = nullptr;
  int partial_blocks = 0;
  int chunks_per_block = 0;  // 0: all keys
  int kv_block = 0;
  int seqlen_k = 0;
  int total = 0;
};

// The keys of a chunk.
struct Place {
  int first_key;
  int end_key;  // end of the chunk's block, or of all keys; the chunk may reach beyond it
  int full;     // the chunk is in a full block, which needs no mask_mod
};

// Visits chunk `start` and then every kWarps-th chunk. It reads each list entry one iteration before it is needed, to
// hide the latency of the load.
template <int kKeys, int kWarps>
class Cursor {
 public:
  int chunk;

  __device__ Cursor(const ChunkList<kKeys>& list, int start, int end) : chunk(start), list_(list), end_(end) {
    if (list.chunks_per_block == 0) return;
    entry_ = start / list.chunks_per_block;
    inside_ = start - entry_ * list.chunks_per_block;
    if (start < end) block_ = read();
    keep_and_read_ahead();
  }

  __device__ Place place() const {
    if (list_.chunks_per_block == 0) return {chunk * kKeys, list_.seqlen_k, 0};
    return place_;
  }

  __device__ void advance() {
    chunk += kWarps;
    if (list_.chunks_per_block > 0) keep_and_read_ahead();
  }

 private:
  const ChunkList<kKeys>& list_;
  const int end_;
  Place place_;
  // The next chunk: its entry in the lists, its chunk index within that block, and the block index that was read.
  int entry_ = 0, inside_ = 0, block_ = 0;

  __device__ int read() const {
    return entry_ < list_.partial_blocks ? list_.partial[entry_] : list_.full[entry_ - list_.partial_blocks];
  }

  __device__ void keep_and_read_ahead() {
    // As unsigned, a negative index is too large as well, and any index that is too large is clamped to seqlen_k.
    const unsigned long long key = static_cast<unsigned long long>(static_cast<unsigned>(block_)) * list_.kv_block;
    const int first = static_cast<int>(min(key, static_cast<unsigned long long>(list_.seqlen_k)));
    place_ = {first + inside_ * kKeys, min(first + list_.kv_block, list_.seqlen_k), entry_ >= list_.partial_blocks};
    inside_ += kWarps;
    if (inside_ < list_.chunks_per_block) return;
    do {
      inside_ -= list_.chunks_per_block;
      ++entry_;
    } while (inside_ >= list_.chunks_per_block);
    if (chunk + kWarps < end_) block_ = read();
  }
};

// First chunk of split `split` of `total` chunks. The sizes of the splits differ by at most one.
__device__ inline int begin_of_share(int total, int split, int splits) {
  const int least = total / splits;
  return least * split + min(split, total - least * splits);
}

// True if a tile visits only the blocks in its lists; false if it visits all keys.
template <class Mod>
__device__ bool uses_block_lists(const DecodingParams& p) {
  return Mod::kHasMask && p.states == nullptr;
}

// One row of a BlockList: the address of its count and of its indices. Null if there is no list.
struct ListOfRow {
  const int* count = nullptr;
  const int* indices = nullptr;
  int columns = 0;

  ListOfRow() = default;
  __device__ ListOfRow(const BlockList& list, int b, int h, int q) {
    if (list.counts == nullptr || list.columns == 0) return;
    columns = list.columns;
    count = list.counts + b * list.count_strides[0] + h * list.count_strides[1] + q * list.count_strides[2];
    indices = list.indices + b * list.index_strides[0] + h * list.index_strides[1] + q * list.index_strides[2];
  }

  // Prefetches the count and the first indices of a split. The split's first entry depends on the counts, which are not
  // loaded yet, so this guesses it as if the list were full.
  __device__ void prefetch_first(const BlockList& list, int split, int splits) const {
    if (count == nullptr) return;
    prefetch(count);
    prefetch(indices + begin_of_share(list.columns, split, splits));
  }
  __device__ int blocks() const { return count == nullptr ? 0 : min(max(*count, 0), columns); }
};

template <int kKeys, class Mod>
__device__ ChunkList<kKeys> chunk_list(const DecodingParams& p, const ListOfRow& partial, const ListOfRow& full) {
  ChunkList<kKeys> list;
  list.seqlen_k = p.seqlen_k;
  list.total = (p.seqlen_k + kKeys - 1) / kKeys;
  if (!uses_block_lists<Mod>(p)) return list;
  list.partial = partial.indices;
  list.full = full.indices;
  list.partial_blocks = partial.blocks();
  list.kv_block = min(p.kv_block, p.seqlen_k);  // a larger block is only block 0; the clamp keeps products in 32 bits
  list.chunks_per_block = (list.kv_block + kKeys - 1) / kKeys;
  list.total = (list.partial_blocks + full.blocks()) * list.chunks_per_block;
  return list;
}

}  // namespace flashbwd

#endif

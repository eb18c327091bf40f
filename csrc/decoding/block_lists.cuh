// Which keys the rows of a tile walk. Lists lie on the GPU, so the host cannot check them: a count beyond the columns
// of a list is cut to them, and a number that is no block's stands for a block without keys.
#pragma once

#include "params.h"
#include "ptx.cuh"

#ifdef __CUDACC__

namespace flashbwd {

// The chunks, of kKeys keys each, that the rows of a tile walk: all keys, or those of their common block lists.
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

// Where a chunk lies.
struct Place {
  int first_key;
  int end_key;  // of the block, or of all keys
  int full;
};

// The place of a chunk, and then of every kWarps-th after it. An entry of the list is read one chunk before it is
// needed.
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
  int entry_ = 0, inside_ = 0, block_ = 0;  // of the chunk after this one

  __device__ int read() const {
    return entry_ < list_.partial_blocks ? list_.partial[entry_] : list_.full[entry_ - list_.partial_blocks];
  }

  __device__ void keep_and_read_ahead() {
    // A negative number is as large as can be, unsigned: it comes to lie after the last key, as too large ones do.
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

// Where a split's share of `total` begins; of two of them the larger is larger by one.
__device__ inline int begin_of_share(int total, int split, int splits) {
  const int least = total / splits;
  return least * split + min(split, total - least * splits);
}

// Whether the rows of a tile walk the blocks of their common lists; else all keys.
template <class Mod>
__device__ bool walks_lists(const DecodingParams& p) {
  return Mod::kHasMask && p.states == nullptr;
}

// A list of a row: where its number of blocks is, and where they are. Null when there is none.
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

  // Brings closer what is read first. Where a split begins is known when the numbers of blocks are: until then it is
  // taken for a part of a list of all blocks.
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
  if (!walks_lists<Mod>(p)) return list;
  list.partial = partial.indices;
  list.full = full.indices;
  list.partial_blocks = partial.blocks();
  list.kv_block = min(p.kv_block, p.seqlen_k);  // a larger one is block 0, and its products stay in 32 bits
  list.chunks_per_block = (list.kv_block + kKeys - 1) / kKeys;
  list.total = (list.partial_blocks + full.blocks()) * list.chunks_per_block;
  return list;
}

}  // namespace flashbwd

#endif

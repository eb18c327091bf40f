// The work tiles and query loops that a block mask lists (params.h). They take the place of WorkTile and
// QueryIteration.
#pragma once

#include "scheduler.cuh"

namespace flashbwd::sm80 {

struct ListedWorkTile : WorkTile {
  const QueryBlockEntry* entries = nullptr;  // of the query loop

  ListedWorkTile() = default;

  // Work tiles of a KV head are handed out in the order of its lists: the longest first. They are not split.
  __device__ __forceinline__ ListedWorkTile(const KernelParams& params, int32_t index, int32_t, int32_t block_n) {
    const AttentionBackwardParams& p = params.attention;
    const WorkTileIndex found = work_tile_at(params, index, block_n);
    batch = found.batch;
    head_kv = found.head;
    heads_per_kv = p.heads / p.heads_kv;
    set_sequence(params);
    const BlockMaskView& mask = p.block_mask;
    const KeyBlockList& list = mask.lists[batch * mask.batch_stride + head_kv * mask.head_stride + found.key_block];
    key_block = list.key_block;
    iterations = {0, list.entries};
    entries = mask.entries + list.first_entry;
    exists = true;
  }
};

struct ListedIteration {
  int32_t index = 0;  // from 0 to num_iterations()
  int32_t head = 0;   // query head
  QueryBlockEntry entry = {};

  ListedIteration() = default;
  // The first iteration. The work tile has at least one.
  __device__ __forceinline__ explicit ListedIteration(const ListedWorkTile& work) { read(work); }
  // The iteration after `iteration`, which is not the last one.
  __device__ __forceinline__ ListedIteration(const ListedIteration& iteration, const ListedWorkTile& work)
      : index(iteration.index + 1) {
    read(work);
  }

  __device__ __forceinline__ int32_t query_block(const ListedWorkTile&) const { return entry.query_block; }
  __device__ __forceinline__ int32_t adds_before(const ListedWorkTile&, int32_t, int32_t, int32_t) const {
    return entry.adds_before();
  }

 private:
  __device__ __forceinline__ void read(const ListedWorkTile& work) {
    entry = work.entries[index];
    head = work.head_kv * work.heads_per_kv + entry.head;
  }
};

}  // namespace flashbwd::sm80

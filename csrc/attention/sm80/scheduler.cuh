// The tile scheduler: which (batch, KV head, key block) a CTA processes, and its query loop.
#pragma once

#include "../../common/ordered.cuh"
#include "../index/dq_order.h"
#include "../index/query_loop.h"
#include "../index/tile_order.h"
#include "../sequence.cuh"
#include "kernel_params.h"

namespace flashbwd::sm80 {

// Maps key block `index` of the call to (batch, KV head, key block).
__device__ __forceinline__ WorkTileIndex work_tile_at(const KernelParams& params, int32_t index, int32_t block_n) {
  const AttentionBackwardParams& p = params.attention;
  if (params.schedule.packed_work_tiles) {
    return varlen_work_tile(
        index, p.cu_seqlens_k, p.batch, p.heads_kv, block_n,
        [swizzle_heads = int64_t{params.schedule.swizzle_heads}](int32_t) { return swizzle_heads; });
  }
  const WorkTileIndex found =
      dense_work_tile(index, p.batch, p.heads_kv, params.schedule.key_blocks, params.schedule.swizzle_heads);
  if (!params.swizzle_batches) return found;
  const int32_t head = found.batch * p.heads_kv + found.head;
  return {head % p.batch, head / p.batch, found.key_block};
}

struct WorkTile {
  Sequence sequence;
  Visibility visibility;
  BlockRange query_range;  // query blocks that see the key block, for each query head
  BlockRange interior;     // query blocks that need no mask
  BlockRange iterations;   // of this CTA: a range of the query tiles of all query heads of the KV head
  int64_t dq_begin = 0;    // the sequence's first element of the dq accumulator
  int32_t batch = 0;
  int32_t head_kv = 0;
  int32_t key_block = 0;
  int32_t split_cta = -1;  // index among the CTAs of all split work tiles; -1: not split
  int32_t heads_per_kv = 1;
  int32_t heads_at_once = 1;  // query heads that the loop interleaves, see heads_per_pass
  bool descending = false;    // the loop starts at the last query block
  bool exists = false;        // false: past the end of its sequence, nothing to load and nothing to write

  WorkTile() = default;

  __device__ __forceinline__ WorkTile(const KernelParams& params, int32_t index, int32_t block_m, int32_t block_n) {
    const AttentionBackwardParams& p = params.attention;
    // The CTAs of one key block have consecutive indices, so the indices of all earlier key blocks are smaller.
    int32_t split = 0, splits = 1;
    const auto whole = static_cast<int32_t>(params.schedule.unsplit_work_tiles);
    if (index >= whole) {
      split_cta = index - whole;
      splits = params.schedule.split_tiles.splits;
      split = split_cta % splits;
      index = whole + split_cta / splits;
    }
    const WorkTileIndex found = work_tile_at(params, index, block_n);
    if (found.batch < 0) return;
    batch = found.batch;
    head_kv = found.head;
    heads_per_kv = p.heads / p.heads_kv;
    heads_at_once = heads_per_pass(heads_per_kv, splits);
    set_sequence(params);
    set_key_block(found.key_block, block_m, block_n, split, splits);
    // Deterministic: in ascending order, key block n would start at its diagonal tile and wait there for all lower key
    // blocks, which reach that tile later. GQA: under a causal mask all key blocks of a KV head see the last queries,
    // so they read the same query tiles at the same time, and L2 serves all but one of them.
    descending = (params.dq_semaphores != nullptr || heads_per_kv > 1) && !visibility.full();
    // A stored bias gradient is as wide as the longest sequence.
    const bool whole_bias = params.bias_gradient.mode == BiasGradientMode::kStore;
    exists = key_block * block_n < (whole_bias ? p.seqlen_k : sequence.rows_k);
  }

  __device__ __forceinline__ void set_sequence(const KernelParams& params) {
    const AttentionBackwardParams& p = params.attention;
    sequence = load_sequence(p, batch);
    visibility = visibility_of(p, sequence);
    const int64_t first_row = p.cu_seqlens_q != nullptr ? sequence.begin_q : int64_t{batch} * p.seqlen_q;
    dq_begin = first_row * p.heads * params.dq_row_stride;
  }
  __device__ __forceinline__ void set_key_block(int32_t block, int32_t block_m, int32_t block_n, int32_t split,
                                                int32_t splits) {
    key_block = block;
    query_range = query_blocks(visibility, block, block_m, block_n);
    interior = interior_query_blocks(visibility, block, block_m, block_n);
    iterations = split_query_loop(query_range.size() * heads_per_kv, split, splits);
  }

  __device__ __forceinline__ int32_t num_iterations() const { return iterations.size(); }
};

// One iteration of the query loop, which runs over the query tiles of all query heads of the KV head.
struct QueryIteration {
  int32_t index = 0;  // from 0 to num_iterations()
  int32_t head = 0;   // query head
  QueryLoopPosition position;

  QueryIteration() = default;
  // The first iteration.
  __device__ __forceinline__ explicit QueryIteration(const WorkTile& work)
      : position(work.iterations.begin, work.query_range.size(), work.heads_at_once) {
    head = work.head_kv * work.heads_per_kv + position.head;
  }
  // The iteration after `iteration`.
  __device__ __forceinline__ QueryIteration(const QueryIteration& iteration, const WorkTile& work)
      : QueryIteration(iteration) {
    advance(work);
  }

  __device__ __forceinline__ void advance(const WorkTile& work) {
    ++index;
    const int32_t before = position.head;
    position.advance(work.query_range.size(), work.heads_at_once);
    head += position.head - before;
  }
  __device__ __forceinline__ int32_t query_block(const WorkTile& work) const {
    return work.descending ? work.query_range.end - 1 - position.tile : work.query_range.begin + position.tile;
  }
  // Key blocks that add to dq tile `query_block`, which is the one of this iteration, before this work tile does.
  __device__ __forceinline__ int32_t adds_before(const WorkTile& work, int32_t query_block, int32_t block_m,
                                                 int32_t block_n) const {
    return adds_before_ascending(key_blocks(work.visibility, query_block, block_m, block_n), work.key_block);
  }
};

// The ordered semaphore of dq tile `query_block` of `head`, which are those of `iteration`: key blocks add in ascending
// order, or in the order of the lists of a block mask. A CTA waits only for work tiles of the same (batch, head) that
// were taken earlier; index/dq_order.h shows why this cannot deadlock.
struct DqSemaphore {
  int32_t* counter;
  int32_t number;

  template <typename WorkTile, typename Iteration>
  __device__ DqSemaphore(const KernelParams& params, const WorkTile& work, const Iteration& iteration, int32_t head,
                         int32_t query_block, int32_t block_m, int32_t block_n) {
    const AttentionBackwardParams& p = params.attention;
    const int64_t first = p.cu_seqlens_q != nullptr ? first_block(work.sequence.begin_q, work.batch, block_m)
                                                    : int64_t{work.batch} * params.schedule.query_blocks;
    counter = params.dq_semaphores + head * params.semaphores_per_head + first + query_block;
    number = iteration.adds_before(work, query_block, block_m, block_n);
  }
  // Called by all threads.
  __device__ void wait() const {
    if (threadIdx.x == 0) {
      while (load_acquire(counter) != number) {
      }
    }
    __syncthreads();  // thread 0 has waited for the semaphore
  }
  // Called by all threads after their adds.
  __device__ void release() const {
    __syncthreads();  // all threads have added; the release below covers their adds
    if (threadIdx.x == 0) store_release(counter, number + 1);
  }
};

// kFirstStores: the first key block that sees a query tile stores its dq. The other key blocks wait for this store and
// then add. They wait only for smaller key blocks of the same (batch, head), as above. One thread calls these
// functions.
struct FirstAdd {
  int32_t* word = nullptr;  // bits of 32 tiles, see KernelParams::stored
  int32_t bit = 0;          // of this tile
  int32_t seen = 0;         // the word's value when it was last read
  bool stores = false;

  __device__ void find(const KernelParams& params, const WorkTile& work, int32_t head, int32_t query_block,
                       int32_t block_m, int32_t block_n) {
    const int64_t index = int64_t{work.batch} * params.attention.heads + head;
    int32_t* const next_word = params.stored + index * params.stored_words + query_block / 32;
    if (next_word != word) seen = 0;
    word = next_word;
    bit = static_cast<int32_t>(1u << query_block % 32);
    stores = work.key_block == key_blocks(work.visibility, query_block, block_m, block_n).begin;
    if (!stores && (bit & ~seen) != 0) seen = load_acquire(word);
  }
  __device__ void wait() {
    while (!stores && (bit & ~seen) != 0) seen = load_acquire(word);
  }
  // Call after a barrier that follows the stores of all threads.
  __device__ void release() const {
    if (stores) or_release(word, bit);
  }
};

}  // namespace flashbwd::sm80

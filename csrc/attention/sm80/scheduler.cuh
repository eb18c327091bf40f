// Which (batch, KV head, key block) a CTA works on, and the query tiles that it walks.
#pragma once

#include "../../common/ordered.cuh"
#include "../schedule.h"
#include "../sequence.cuh"
#include "kernel_params.h"

namespace flashbwd::sm80 {

// Key block `index` of the call.
__device__ __forceinline__ Job key_block_job(const KernelParams& params, int32_t index, int32_t block_n) {
  const AttentionBackwardParams& p = params.attention;
  if (params.packed_jobs) {
    return varlen_job(index, p.cu_seqlens_k, p.batch, p.heads_kv, block_n,
                      [head_group = int64_t{params.head_group}](int32_t) { return head_group; });
  }
  const Job job = dense_job(index, p.batch, p.heads_kv, params.key_blocks, params.head_group);
  if (!params.batches_abreast) return job;
  const int32_t head = job.batch * p.heads_kv + job.head;
  return {head % p.batch, head / p.batch, job.key_block};
}

struct Work {
  Sequence sequence;
  Visibility visibility;
  BlockRange query_range;  // query blocks of each head of the group
  BlockRange interior;     // those of them that need no mask
  BlockRange walk;         // of all steps over query tiles, those of this CTA
  int32_t batch = 0;
  int32_t head_kv = 0;
  int32_t key_block = 0;
  int32_t part = -1;  // of all parts of shared jobs; -1: the whole job
  int32_t heads_per_kv = 1;
  int32_t heads_abreast = 1;  // in the walk, see heads_of_walk
  bool descending = false;    // the walk goes from the last query block to the first
  bool exists = false;        // false: past the end of its sequence, nothing to load and nothing to write

  Work() = default;

  __device__ __forceinline__ Work(const KernelParams& params, int32_t index, int32_t block_m, int32_t block_n) {
    const AttentionBackwardParams& p = params.attention;
    // CTAs of one key block follow one another, so that all of earlier key blocks have been taken before.
    int32_t split = 0, splits = 1;
    const auto whole = static_cast<int32_t>(params.whole_jobs);
    if (index >= whole) {
      part = index - whole;
      splits = params.splits;
      split = part % splits;
      index = whole + part / splits;
    }
    const Job job = key_block_job(params, index, block_n);
    if (job.batch < 0) return;
    batch = job.batch;
    head_kv = job.head;
    heads_per_kv = p.heads / p.heads_kv;
    heads_abreast = heads_of_walk(heads_per_kv, splits);
    sequence = load_sequence(p, batch);
    visibility = visibility_of(p, sequence);
    set_key_block(job.key_block, block_m, block_n, split, splits);
    // In order: see ordered_query_block. Under a diagonal all key blocks then start at the same queries too, and those
    // of a group, which L2 would not hold, pass through it once.
    descending = (params.turns != nullptr || heads_per_kv > 1) && !visibility.full();
    // Where the gradient of a bias is stored, its columns reach up to the longest sequence.
    const bool whole_bias = params.bias_gradient.mode == BiasGradientMode::kStore;
    exists = key_block * block_n < (whole_bias ? p.seqlen_k : sequence.rows_k);
  }

  __device__ __forceinline__ void set_key_block(int32_t block, int32_t block_m, int32_t block_n, int32_t split,
                                                int32_t splits) {
    key_block = block;
    query_range = query_blocks(visibility, block, block_m, block_n);
    interior = interior_query_blocks(visibility, block, block_m, block_n);
    walk = split_walk(query_range.size() * heads_per_kv, split, splits);
  }

  __device__ __forceinline__ int32_t steps() const { return walk.size(); }
};

// A step of the walk over the query tiles of all heads of the group.
struct Step {
  int32_t index = 0;  // 0 .. steps
  int32_t head = 0;   // query head
  WalkPosition position;

  Step() = default;
  // The first one.
  __device__ __forceinline__ explicit Step(const Work& work)
      : position(work.walk.begin, work.query_range.size(), work.heads_abreast) {
    head = work.head_kv * work.heads_per_kv + position.head;
  }
  // The one after `step`.
  __device__ __forceinline__ Step(const Step& step, const Work& work) : Step(step) { advance(work); }

  __device__ __forceinline__ void advance(const Work& work) {
    ++index;
    const int32_t before = position.head;
    position.advance(work.query_range.size(), work.heads_abreast);
    head += position.head - before;
  }
  __device__ __forceinline__ int32_t query_block(const Work& work) const {
    return work.descending ? work.query_range.end - 1 - position.tile : work.query_range.begin + position.tile;
  }
};

// Adds into dq tile `query_block` of `head` in the order of the key blocks. Waits happen for jobs with smaller key
// blocks of the same (batch, head) only, and those were taken from the counter before this one: schedule.h shows that
// this ends.
struct Turn {
  int32_t* counter;
  int32_t number;

  __device__ Turn(const KernelParams& params, const Work& work, int32_t head, int32_t query_block, int32_t block_m,
                  int32_t block_n) {
    const AttentionBackwardParams& p = params.attention;
    const int64_t first = p.cu_seqlens_q != nullptr ? first_block(work.sequence.begin_q, work.batch, block_m)
                                                    : int64_t{work.batch} * params.query_blocks;
    counter = params.turns + head * params.turns_of_head + first + query_block;
    number = ordered_turn(work.visibility, query_block, work.key_block, block_m, block_n, 1);
  }
  // By all threads.
  __device__ void wait() const {
    if (threadIdx.x == 0) {
      while (load_acquire(counter) != number) {
      }
    }
    __syncthreads();  // thread 0 has seen that the tile is ours
  }
  // By all threads, after their adds.
  __device__ void pass_on() const {
    __syncthreads();  // every thread has added; the release below is for all that came before it
    if (threadIdx.x == 0) store_release(counter, number + 1);
  }
};

// The first key block that sees a query tile stores its part of dq, the others add theirs when that is there. They wait
// for jobs with smaller key blocks of the same (batch, head) only, as above. All by one thread.
struct FirstAdd {
  int32_t* word = nullptr;  // of 32 tiles, see KernelParams::stored
  int32_t bit = 0;          // this tile's
  int32_t seen = 0;         // bits of the word, when it was read last
  bool stores = false;

  __device__ void find(const KernelParams& params, const Work& work, int32_t head, int32_t query_block, int32_t block_m,
                       int32_t block_n) {
    const int64_t index = int64_t{work.batch} * params.attention.heads + head;
    int32_t* const place = params.stored + index * params.stored_words + query_block / 32;
    if (place != word) seen = 0;
    word = place;
    bit = static_cast<int32_t>(1u << query_block % 32);
    stores = work.key_block == key_blocks(work.visibility, query_block, block_m, block_n).begin;
    if (!stores && (bit & ~seen) != 0) seen = load_acquire(word);
  }
  __device__ void wait() {
    while (!stores && (bit & ~seen) != 0) seen = load_acquire(word);
  }
  // Behind a barrier that follows the stores of all threads.
  __device__ void pass_on() const {
    if (stores) or_release(word, bit);
  }
};

}  // namespace flashbwd::sm80

// Which (batch, KV head, key block) this CTA works on, and the query tiles that it walks. One thread finds it and
// leaves it in shared memory, so that every role agrees on what there is to do.
#pragma once

#include "../schedule.h"
#include "../sequence.cuh"
#include "kernel_params.h"

namespace flashbwd::sm90 {

template <int kBlockM, int kBlockN>
struct Work {
  Sequence sequence;
  Visibility visibility;
  BlockRange query_range;  // query blocks of each head of the group
  BlockRange interior;     // those of them that need no mask
  int32_t steps;           // query_range.size() for each head of the group
  int32_t batch;
  int32_t head_kv;
  int32_t first_head;  // of the group
  int32_t key_block;
  int32_t first_key;
  bool descending;  // the walk goes from the last query block to the first
  bool exists;      // false: past the end of its sequence, nothing to load and nothing to write

  __device__ void find(const KernelParams& params) {
    const AttentionBackwardParams& p = params.attention;
    const Job job = p.cu_seqlens_k != nullptr
                        ? varlen_job(blockIdx.x, p.cu_seqlens_k, p.batch, p.heads_kv, kBlockN, params.head_group)
                        : dense_job(blockIdx.x, p.batch, p.heads_kv, params.key_blocks, params.head_group);
    exists = job.batch >= 0;
    if (!exists) return;
    batch = job.batch;
    head_kv = job.head;
    first_head = job.head * (p.heads / p.heads_kv);
    key_block = job.key_block;
    first_key = key_block * kBlockN;
    sequence = load_sequence(p, batch);
    visibility = visibility_of(p, sequence);
    query_range = query_blocks(visibility, key_block, kBlockM, kBlockN);
    interior = interior_query_blocks(visibility, key_block);
    steps = query_range.size() * (p.heads / p.heads_kv);
    descending = params.semaphores != nullptr && !visibility.full();  // see ordered_query_block
    exists = first_key < sequence.rows_k;
  }

  // Blocks m of which every pair is visible: m * kBlockM <= first_key - lo - (kBlockM - 1), and so on.
  static __device__ BlockRange interior_query_blocks(const Visibility& v, int32_t key_block) {
    const int64_t first_key = int64_t{key_block} * kBlockN;
    const int64_t last_key = first_key + kBlockN - 1;
    if (last_key >= v.seqlen_k) return {};
    const int64_t end = at_least(at_most(first_key - v.lo + 1, v.seqlen_q), 0) / kBlockM;
    const int64_t begin = ceil_div(at_least(last_key - v.hi + 1, 0), kBlockM);
    return {static_cast<int32_t>(begin), static_cast<int32_t>(end)};
  }
};

// A position in the walk over the query tiles of all heads of the group.
struct Step {
  int32_t index = 0;  // 0 .. work.steps
  int32_t head;       // query head
  int32_t query_block;

  template <typename Work>
  __device__ explicit Step(const Work& work)
      : head(work.first_head),
        query_block(work.descending ? work.query_range.end - 1 : work.query_range.begin),
        first_(query_block),
        last_(work.descending ? work.query_range.begin : work.query_range.end - 1),
        stride_(work.descending ? -1 : 1) {}

  __device__ void advance() {
    ++index;
    if (query_block == last_) {
      query_block = first_;
      ++head;
    } else {
      query_block += stride_;
    }
  }

 private:
  int32_t first_, last_, stride_;
};

// Stage and parity of a ring of kStages buffers at step `index`.
template <int kStages>
struct Ring {
  static __device__ __forceinline__ int32_t stage(int32_t index) { return index % kStages; }
  static __device__ __forceinline__ uint32_t phase(int32_t index) { return index / kStages & 1; }
};

}  // namespace flashbwd::sm90

// Which (batch, KV head, key block) this CTA works on next, and the query tiles that it walks. One thread takes jobs
// from a counter, or is dealt them in waves, and leaves them in shared memory, so that every role agrees on what there
// is to do.
#pragma once

#include "../schedule.h"
#include "../sequence.cuh"
#include "kernel_params.h"

namespace flashbwd::sm90 {

// The two places of shared memory where jobs lie, as each role goes through them: wait for the job, work, let go of it.
struct JobSlot {
  uint32_t jobs_before = 0;
  __device__ __forceinline__ uint32_t index() const { return jobs_before % 2; }
  __device__ __forceinline__ uint32_t phase() const { return jobs_before / 2 % 2; }
  __device__ __forceinline__ void advance() { ++jobs_before; }
};

// The scheduler's own, in shared memory: it has few registers.
struct JobCursor {
  JobSlot slot;              // of the next job
  int32_t job = 0;           // as the counter has it, or as dealt
  bool second = true;        // the second part, where jobs are pairs of key blocks
  int32_t steps_before = 0;  // of the jobs before it
  uint32_t taken = 0;        // of wide tiles: numbers taken from the counter
  uint32_t keys_phase = 0;   // of the barriers of k and v
};

// kStepsApart: of jobs of a ring that come to a tile, at most. kCounted: jobs of waves come from the counter, and each
// of a ring waits for the one taken before it. kByHeads_: the walk goes through all query blocks of a head, then those
// of the next (Step).
template <int kBlockM, int kBlockN, int kStepsApart, bool kCounted, bool kByHeads_>
struct Work {
  static constexpr int kKeys = kBlockN;
  static constexpr bool kByHeads = kByHeads_;

  JobSlot slot;         // of wide tiles: where it lies
  uint32_t keys_phase;  // of the barriers of k and v
  Sequence sequence;
  Visibility visibility;
  BlockRange tiles;        // query blocks of each head of the group
  BlockRange query_range;  // the same as the walk counts them: in a ring on behind the last one (Step::advance_in)
  BlockRange interior;     // those of them that need no mask
  int32_t steps;           // query_range.size() for each head of the group
  int32_t first_index;     // steps of this CTA's jobs before
  int32_t batch;
  int32_t head_kv;
  int32_t list;        // head_kv and which of its splits: dk and dv go there
  int32_t first_head;  // of the group
  int32_t end_head;
  int32_t key_block;
  int32_t first_key;
  int32_t finished_count;         // number of the count that it adds to, see KernelParams::finished
  int32_t first_flag, last_flag;  // of rows of the first head whose statistics it needs, see rows_ready
  bool descending;                // the walk goes from the last query block to the first
  bool from_last_key;             // the head's key blocks are taken, and add in turn, from the last to the first
  bool is_part;                   // of a key block, see LastRound; dk and dv are parts too
  bool copies_dkdv;               // the copy engine stores dk and dv: no row of the block is another sequence's
  bool exhausted;                 // no job is left
  bool exists;                    // false: past the end of its sequence, nothing to load and nothing to write
  uint16_t rotation;              // of the heads of the group, see head_of
  bool heads_apart;               // pairs of this wave begin kHeadsApart heads apart
  bool second;                    // the second part of a pair
  bool cyclic;                    // the walk begins in the middle, see cyclic_turn
  bool fetches_sums;              // of dq, into L2: the first of its wave that adds to sums which left it long ago
  Abreast abreast;                // in waves: of a head; else all of them
  Abreast ring;                   // those of them that walk together
  Starts starts;                  // of the ring, in the query blocks

  __device__ bool settled() const { return exhausted || exists; }
  // Of the walk over the query blocks of a head: the first one, and where it is past the last one.
  __device__ int32_t first_block() const { return descending ? query_range.end - 1 : query_range.begin; }
  __device__ int32_t past_block() const { return descending ? query_range.begin - 1 : query_range.end; }

  // The key that query 0 is aligned with.
  __device__ __forceinline__ int32_t diagonal(const AttentionBackwardParams& params) const {
    return params.causal == CausalAlignment::kTopLeft ? 0 : sequence.seqlen_k - sequence.seqlen_q;
  }

  // What is written so far is read back from shared memory: the thread has few registers.
  static __device__ void forget_registers() { asm volatile("" ::: "memory"); }

  __device__ void find(const KernelParams& params, const JobCursor& cursor) {
    const AttentionBackwardParams& p = params.attention;
    exhausted = cursor.job >= params.jobs;
    if (exhausted) return;
    const int32_t lists = p.heads_kv * params.grouped.splits;
    const int32_t whole = params.whole_jobs, parts = params.last_round.parts;
    is_part = cursor.job >= whole;
    const int32_t number = cursor.job < whole ? cursor.job : whole + (cursor.job - whole) / parts;
    const auto heads_of_list = [&](int32_t blocks) {
      return at_least(params.head_group, params.list_blocks / at_least(blocks, 1));
    };
    const Job job =
        p.cu_seqlens_k != nullptr
            ? varlen_job(cursor.job, p.cu_seqlens_k, p.batch, lists, kBlockN, heads_of_list)
            : dense_job(number, p.batch, lists, params.key_blocks_of_list, params.head_group, params.jobs_before_last);
    exists = job.batch >= 0;
    if (!exists) return;
    batch = job.batch;
    list = job.head;
    from_last_key = params.from_last_key && cursor.job < params.jobs_before_last;
    key_block = job.key_block;
    // Where pairs take turns the one in the middle comes first.
    if (params.grouped.pairs && p.deterministic) key_block = params.key_blocks_of_list - 1 - key_block;
    if (from_last_key || (params.grouped.pairs && !cursor.second)) {
      const int32_t key_blocks =
          p.cu_seqlens_k != nullptr ? jobs_of_sequence(p.cu_seqlens_k, batch, kBlockN) : params.key_blocks;
      key_block = key_blocks - 1 - key_block;
    }
    forget_registers();
    head_kv = list / params.grouped.splits;
    const int32_t heads = p.heads / (p.heads_kv * params.grouped.splits);
    first_head = list * heads;
    end_head = first_head + heads;
    const bool rotates = params.grouped.pairs && params.key_blocks_of_list >= heads && !p.deterministic;
    rotation = static_cast<uint16_t>(rotates ? key_block % heads : 0);
    first_key = key_block * kBlockN;
    sequence = load_sequence(p, batch);
    visibility = visibility_of(p, sequence);
    forget_registers();
    query_range = query_blocks(visibility, key_block, kBlockM, kBlockN);
    if (is_part) {  // 32 parts at most: 32 bits hold the products
      const int32_t part = (cursor.job - params.whole_jobs) % params.last_round.parts, steps_of_all = query_range.end;
      query_range = {steps_of_all * part / params.last_round.parts,
                     steps_of_all * (part + 1) / params.last_round.parts};
      list = (batch * p.heads + list - p.batch * p.heads + params.head_group) * params.last_round.parts + part;
    }
    tiles = query_range;
    finished_count = (batch * p.heads_kv + head_kv) * params.counts_a_head + min(key_block, params.counts_a_head - 1);
    forget_registers();
    first_flag = last_flag = (batch * p.heads + first_head) * params.flags_a_head;
    first_flag += query_range.begin * kBlockM >> params.rows_of_flag_log2;
    last_flag += query_range.end * kBlockM - 1 >> params.rows_of_flag_log2;
    forget_registers();
    second = cursor.second;
    cyclic = params.wave_size > 0 && !params.grouped.pairs;
    abreast = {0, job.key_block, params.key_blocks_of_list};
    if (params.wave_size > 0) find_abreast(params, cursor.job, job.key_block);
    heads_apart = params.grouped.heads_apart && abreast.size == params.key_blocks_of_list;
    if (heads_apart) rotation = static_cast<uint16_t>(kHeadsApart * abreast.place);
    fetches_sums = params.grouped.pairs && p.deterministic && second && abreast.place == 0;
    forget_registers();
    interior = interior_query_blocks(visibility, key_block, kBlockM, kBlockN);
    steps = query_range.size() * (end_head - first_head);
    // Ordered adds ask for it, see ordered_query_block. For grouped heads it keeps the key blocks of a head abreast.
    descending = (p.deterministic || p.heads != p.heads_kv) && !cursor.second && !from_last_key && !visibility.full();
    copies_dkdv =
        params.copies_dkdv && !is_part && (p.cu_seqlens_k == nullptr || first_key + kBlockN <= sequence.rows_k);
    // The block in the middle of an odd number is its own partner: it is done once.
    exists = !(cursor.second && 2 * key_block + 1 == params.key_blocks);
    exists = exists && first_key < sequence.rows_k;
  }

  // The keys of CTA `rank` of a cluster, each with kKeys of the block. All walk the query blocks that one of them sees.
  template <int kKeys>
  __device__ void take_part(int32_t rank) {
    key_block = key_block * (kBlockN / kKeys) + rank;
    first_key += rank * kKeys;
    interior = interior_query_blocks(visibility, key_block, kBlockM, kKeys);
  }

 private:
  // `number`: of the key block or pair among those of its head.
  __device__ void find_abreast(const KernelParams& params, int32_t job, int32_t number) {
    const AttentionBackwardParams& p = params.attention;
    const int32_t parts = params.last_round.parts;
    int32_t first = params.whole_jobs, end = params.jobs, stride = params.head_group * parts;
    if (!is_part) {
      const int32_t list_jobs = params.head_group * params.key_blocks_of_list;
      const int32_t lists = p.batch * p.heads_kv * params.grouped.splits;
      first = job / list_jobs * list_jobs;
      end = min(first + list_jobs, params.whole_jobs);
      stride = min(params.head_group, lists - job / list_jobs * params.head_group);
    }
    abreast = abreast_in_wave(job, first, end, stride, params.wave_size);
    if (!cyclic) return;
    abreast.before = number - abreast.place;
    ring = ring_of(abreast, tiles.size());
    if (kCounted) ring.place = ring.size - 1 - ring.place;
    starts = Starts::of(ring.size, tiles.size(), end_head - first_head > 1 ? 1 : kStepsApart);
    query_range.begin += starts.tile(ring.place);
    query_range.end += starts.tile(ring.place);
    // Queries are counted on, so that each block is behind the one before. Behind the last of a head is nothing: zeros,
    // of probability 0.
    visibility.seqlen_q = 2 * params.query_blocks * kBlockM;
    visibility.lo = -visibility.seqlen_q;
  }
};

// A position in the walk over the query tiles of a job: all heads of the group in one query block, then the next block.
// By heads, all query blocks of one head, then those of the next. So it is in windows: jobs that begin together are in
// the same head, and L2 holds what all of them need of it.
struct Step {
  int32_t index;  // counts on from job to job: rings of buffers know nothing of jobs
  int32_t end;    // index behind the last step of this job
  int32_t head;   // query head
  int32_t query_block;

  template <typename Work>
  __device__ Step(const Work& work, int32_t first_index)
      : index(first_index),
        end(first_index + work.steps),
        head(work.first_head),
        query_block(work.first_block()),
        first_head_(work.first_head),
        end_head_(work.end_head),
        stride_(work.descending ? -1 : 1) {}

  template <typename Work>
  __device__ void advance(const Work& work) {
    advance(work, stride_, first_head_, end_head_);
  }

  // By a thread that has few registers: what does not change is read from shared memory again.
  template <typename Work>
  __device__ void advance_rereading(const Work& work) {
    advance(work, work.descending ? -1 : 1, work.first_head, work.end_head);
  }

  // Either, from behind the last query block back to the first.
  template <bool kRereads = false, typename Work>
  __device__ void advance_in(const Work& work) {
    if constexpr (kRereads) {
      advance_rereading(work);
    } else {
      advance(work);
    }
    if (!Work::kByHeads && query_block == work.tiles.end) query_block = work.tiles.begin;
  }

  // The query head of this step. Pairs of key blocks are all in the same query block, and begin there with different
  // heads (kRotates): else all of them would add to one tile, and wait until its first sums are stored. Where they are
  // fewer than the heads that was 2 % slower: the tiles in use by many heads do not stay in L2.
  template <bool kRotates, typename Work>
  __device__ __forceinline__ int32_t head_of(const Work& work) const {
    if constexpr (!kRotates) return head;
    const int32_t rotated = head + work.rotation;
    return rotated < work.end_head ? rotated : rotated - (work.end_head - work.first_head);
  }

 private:
  // References, so that only what is needed is read.
  template <typename Work>
  __device__ __forceinline__ void advance(const Work& work, int32_t stride, const int32_t& first_head,
                                          const int32_t& end_head) {
    ++index;
    if constexpr (Work::kByHeads) {
      query_block += stride;
      if (query_block == work.past_block()) {
        query_block = work.first_block();
        ++head;
      }
    } else if (++head == end_head) {
      head = first_head;
      query_block += stride;
    }
  }

  int32_t first_head_, end_head_, stride_;  // the heads that it is in at the same query block
};

// Stage and parity of a ring of kStages buffers at step `index`.
template <int kStages>
struct Ring {
  static __device__ __forceinline__ int32_t stage(int32_t index) { return index % kStages; }
  static __device__ __forceinline__ uint32_t phase(int32_t index) { return index / kStages & 1; }
};

}  // namespace flashbwd::sm90

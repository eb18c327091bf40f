// Which work tile a CTA computes next, and the query blocks that it visits. One thread, the scheduler, finds work tiles
// and leaves them in shared memory, so that all roles of the CTA agree on what there is to do.
#pragma once

#include <type_traits>

#include "../../common/pipeline.cuh"
#include "../index/dq_order.h"
#include "../index/list_iterator.h"
#include "../index/query_iterator.h"
#include "../index/query_loop.h"
#include "../index/tile_order.h"
#include "../sequence.cuh"
#include "kernel_params.h"

namespace flashbwd::sm90 {

__device__ __forceinline__ void prefetch_tensor_maps(const TensorMaps& maps) {
  prefetch_tensor_map(&maps.q);
  prefetch_tensor_map(&maps.k);
  prefetch_tensor_map(&maps.v);
  prefetch_tensor_map(&maps.dout);
  prefetch_tensor_map(&maps.dq_accumulator);
}

// A slot of the queue of two work tiles in shared memory. Each role waits until a slot is full, works on the tile, and
// releases the slot.
struct TileSlot {
  uint32_t tiles_before = 0;
  __device__ __forceinline__ uint32_t index() const { return tiles_before % 2; }
  __device__ __forceinline__ uint32_t phase() const { return tiles_before / 2 % 2; }
  __device__ __forceinline__ void advance() { ++tiles_before; }
};

// The scheduler's own state, in shared memory because the thread has few registers.
struct SchedulerState {
  TileSlot slot;                  // of the next work tile
  int32_t tile = 0;               // its index in the order of the schedule
  bool second = true;             // the second tile of a mirrored pair
  int32_t iterations_before = 0;  // of the work tiles before it
  uint32_t taken = 0;             // static dispatch, large head dimensions: indices taken before
  // Phase of the barriers of k and v. It flips only for work tiles with query blocks. Otherwise the consumers could get
  // two phases ahead of the loader, and the loader would wait forever.
  uint32_t keys_phase = 0;
};

// Static dispatch: the index of the work tile that `worker`, a CTA or cluster, computes after `taken` others.
__device__ __forceinline__ int32_t static_tile(const Schedule& schedule, uint32_t worker, uint32_t taken) {
  return static_cast<int32_t>(worker + taken * schedule.wave_size);
}

// One key block of one KV head; a mirrored pair is two of these, one after the other. kByHeads_: heads are outermost in
// the query loop (Schedule::heads_outermost). kStaggers_: staggered start (Schedule::query_blocks_apart). kListed_: a
// block mask lists the query loop. kBatchEntries: as many consecutive batch entries share the work tile. kBiased: with
// a bias that they may share.
template <int kBlockM, int kBlockN, bool kByHeads_, bool kStaggers_, bool kListed_ = false, int kBatchEntries = 1,
          bool kBiased = false>
struct WorkTile : ListedLoop<kListed_> {
  static constexpr bool kListed = kListed_;
  using Iterator = std::conditional_t<kListed, ListIterator, QueryIterator>;
  static constexpr int kKeys = kBlockN;
  static constexpr bool kByHeads = kByHeads_;
  static constexpr bool kStaggers = kStaggers_;

  TileSlot slot;        // where this lies
  uint32_t keys_phase;  // of the barriers of k and v
  Sequence sequence;
  Visibility visibility;
  BlockRange query_range;  // query blocks of each head
  BlockRange interior;     // those of them that need no mask
  int32_t first_block;     // of the query loop
  int32_t past_block;      // after the last one of a head; a staggered loop continues at query_range.begin
  int32_t iterations;      // query blocks of all heads
  int32_t first_index;     // iterations of this CTA's work tiles before this one
  int32_t batch;           // the first one
  int32_t head_kv;
  int32_t gradient_head;  // head of dk and dv: head_kv, or with GQA splits head_kv * splits + split
  int32_t first_head;     // query heads
  int32_t end_head;
  int32_t key_block;
  int32_t first_key;
  int32_t first_flag, last_flag;  // of the rows that it needs, see RowsReadyFlags
  TilesInWave in_wave;            // its position in its wave, if adds go by waves
  bool descending;                // the query loop goes from the last query block to the first
  bool reversed;                  // Schedule::reversed holds for this tile
  bool second;                    // the second tile of a mirrored pair
  bool tma_dkdv;                  // TMA stores dk and dv: no row of the key block belongs to another sequence
  bool exhausted;                 // no work tile is left
  bool exists;                    // false: past the end of its sequence, nothing to load and nothing to write

  __device__ bool is_final() const { return exhausted || exists; }

  // The key that query 0 is aligned with.
  __device__ __forceinline__ int32_t diagonal(const AttentionBackwardParams& params) const {
    return params.causal == CausalAlignment::kTopLeft ? 0 : sequence.seqlen_k - sequence.seqlen_q;
  }

  // Compiler barrier: later reads of members come from shared memory again, because the thread has few registers.
  static __device__ void reload_from_smem() { asm volatile("" ::: "memory"); }

  __device__ void find(const KernelParams& params, const SchedulerState& state) {
    const AttentionBackwardParams& p = params.attention;
    const Schedule& schedule = params.schedule;
    exhausted = state.tile >= schedule.work_tiles;
    if (exhausted) return;
    const int32_t heads_kv = p.heads_kv * schedule.gqa_splits;
    const auto heads_per_group = [&](int32_t blocks) {
      return at_least(schedule.heads_per_group, schedule.key_blocks_per_group / at_least(blocks, 1));
    };
    WorkTileIndex tile = p.cu_seqlens_k != nullptr
                             ? varlen_work_tile(state.tile, p.cu_seqlens_k, p.batch, heads_kv, kBlockN, heads_per_group)
                             : dense_work_tile(state.tile, (p.batch + kBatchEntries - 1) / kBatchEntries, heads_kv,
                                               schedule.tiles_per_head, schedule.heads_per_group, schedule.last_group);
    exists = tile.batch >= 0;
    if (!exists) return;
    if (kBiased && schedule.batches_innermost) {
      tile = with_batches_innermost(tile, (p.batch + kBatchEntries - 1) / kBatchEntries, heads_kv);
    }
    batch = tile.batch * kBatchEntries;
    gradient_head = tile.head;
    find_key_block(params, state, tile.key_block);
    reload_from_smem();
    head_kv = gradient_head / schedule.gqa_splits;
    if constexpr (kListed) find_list(p);
    reload_from_smem();
    const int32_t heads = p.heads / heads_kv;
    first_head = gradient_head * heads;
    end_head = first_head + heads;
    first_key = key_block * kBlockN;
    sequence = load_sequence(p, batch);
    visibility = visibility_of(p, sequence);
    reload_from_smem();
    query_range = query_blocks(visibility, key_block, kBlockM, kBlockN);
    reload_from_smem();
    interior = interior_query_blocks(visibility, key_block, kBlockM, kBlockN);
    if constexpr (!kListed) {
      iterations = query_range.size() * (end_head - first_head);
    } else if (iterations > 0) {  // with one query head per KV head, which the flags below are for
      const int32_t first = this->entries[0].query_block;
      const int32_t last = this->entries[(iterations - 1) * this->entry_step].query_block;
      query_range = {min(first, last), max(first, last) + 1};
    }
    reload_from_smem();
    first_flag = last_flag = (batch * p.heads + first_head) * params.preprocess.flags_per_head;
    first_flag += query_range.begin * kBlockM >> params.preprocess.rows_log2;
    last_flag += query_range.end * kBlockM - 1 >> params.preprocess.rows_log2;
    reload_from_smem();
    // With ascending query blocks, key block n would start on its diagonal and wait there for all lower key blocks.
    // With descending ones they have added by the time it arrives. With GQA this also keeps the key blocks of a head
    // together.
    descending = (schedule.counts_adds() || p.heads != p.heads_kv) && !second && !reversed && !visibility.full();
    first_block = descending ? query_range.end - 1 : query_range.begin;
    past_block = descending ? query_range.begin - 1 : query_range.end;
    if (kStaggers && schedule.query_blocks_apart > 0) {
      const int32_t rank = schedule.dispatch == Dispatch::kStatic ? in_wave.rank : key_block;
      first_block = staggered_start(rank, schedule.query_blocks_apart, schedule.query_blocks);
    }
    reload_from_smem();
    tma_dkdv = params.tma_dkdv && (p.cu_seqlens_k == nullptr || first_key + kBlockN <= sequence.rows_k);
    // The middle one of an odd number of key blocks is its own partner, and done once.
    exists = !(second && 2 * key_block + 1 == schedule.key_blocks) && first_key < sequence.rows_k;
  }

  // Sets the index of the tile's first iteration and its phase, and advances the scheduler's counters.
  __device__ void assign_indices(SchedulerState& state) {
    slot = state.slot;
    first_index = state.iterations_before;
    keys_phase = state.keys_phase;
    if (exhausted) return;
    state.iterations_before += iterations;
    state.keys_phase ^= iterations > 0;
  }

  // Narrows the tile to the keys of CTA `rank` of a cluster, kCtaKeys each. All CTAs visit the same query blocks.
  template <int kCtaKeys>
  __device__ void narrow_to_cta(int32_t rank) {
    key_block = key_block * (kBlockN / kCtaKeys) + rank;
    first_key += rank * kCtaKeys;
    interior = interior_query_blocks(visibility, key_block, kBlockM, kCtaKeys);
  }

 private:
  // Reads a list: `key_block`, its number, becomes the key block that it belongs to.
  __device__ void find_list(const AttentionBackwardParams& p) {
    const KeyBlockList& list =
        p.block_mask.lists[batch * p.block_mask.batch_stride + head_kv * p.block_mask.head_stride + key_block];
    key_block = list.key_block;
    iterations = list.entries;
    this->entries = p.block_mask.entries + list.first_entry + (reversed ? iterations - 1 : 0);
    this->entry_step = reversed ? -1 : 1;
  }

  // `number`: index of the key block or pair within its head, in the order of the schedule.
  __device__ void find_key_block(const KernelParams& params, const SchedulerState& state, int32_t number) {
    const AttentionBackwardParams& p = params.attention;
    const Schedule& schedule = params.schedule;
    second = state.second;
    reversed = schedule.reversed && state.tile < schedule.last_group;
    key_block = number;
    in_wave = {0, number, schedule.tiles_per_head};
    if (schedule.dispatch == Dispatch::kStatic) {
      const int32_t heads = p.batch * p.heads_kv * schedule.gqa_splits;
      const int32_t group_tiles = schedule.heads_per_group * schedule.tiles_per_head;
      const int32_t first = state.tile / group_tiles * group_tiles;
      const int32_t end = min(first + group_tiles, schedule.work_tiles);
      const int32_t stride = min(schedule.heads_per_group, heads - state.tile / group_tiles * schedule.heads_per_group);
      in_wave = tiles_in_wave(state.tile, first, end, stride, schedule.wave_size);
    }
    // If adds are counted, the pair in the middle is handed out first.
    if (schedule.mirrored_pairs && schedule.counts_adds()) key_block = schedule.tiles_per_head - 1 - key_block;
    if (reversed || (schedule.mirrored_pairs && !second)) {
      const int32_t key_blocks =
          p.cu_seqlens_k != nullptr ? work_tiles_of_sequence(p.cu_seqlens_k, batch, kBlockN) : schedule.key_blocks;
      key_block = key_blocks - 1 - key_block;
    }
  }
};

// Calls visit(work) for each work tile of this CTA; every role uses this loop. It reads the slot again after each
// visit, because registers are few.
template <typename SharedStorage, typename Visit>
__device__ __forceinline__ void for_each_work_tile(SharedStorage& smem, Visit visit) {
  for (TileSlot slot;;) {
    mbarrier_wait(&smem.work_full[slot.index()], slot.phase());
    const auto& work = smem.work[slot.index()];
    if (work.exhausted) return;
    visit(work);
    slot = work.slot;
    mbarrier_arrive(&smem.work_empty[slot.index()]);
    slot.advance();
  }
}

}  // namespace flashbwd::sm90

// The schedule of a call: which CTA computes which work tile, in which order, and how dq is accumulated. The plan
// chooses it once, from the problem alone; the launcher encodes it. docs/kernels/attention_sm90.md, "Schedule",
// explains each choice. No CUDA here.
#pragma once

#include <cstdint>
#include <string>

#include "../../common/macros.h"
#include "config.h"

namespace flashbwd {
struct AttentionProblem;
}

namespace flashbwd::sm90 {

enum class Dispatch : int8_t {
  kDynamic,  // CTAs take work tiles from an atomic counter
  kStatic,   // work tile i belongs to worker i % wave_size; a cooperative launch, because workers wait for one another
};

enum class DqOrder : int8_t {
  kUnordered,     // the first add to arrive stores, the others add in any order; packed inputs: all add into zeros
  kFirstAndLast,  // the first add stores, the last waits for all others and can write dq, the rest add in any order
  kOrdered,       // adds happen in the order of index/dq_order.h: deterministic
};

struct Schedule {
  Dispatch dispatch = Dispatch::kDynamic;

  // Work tiles and their order (index/tile_order.h)
  int32_t key_blocks = 0;  // of the longest sequence, as query_blocks
  int32_t query_blocks = 0;
  bool mirrored_pairs = false;       // a work tile is two key blocks of a causal head, so that all are equally long
  int32_t gqa_splits = 1;            // work tiles that share the query heads of a KV head
  int32_t tiles_per_head = 0;        // key blocks or pairs; dense inputs
  int32_t heads_per_group = 1;       // L2 swizzle: KV heads (times gqa_splits) whose work tiles are interleaved
  int32_t key_blocks_per_group = 0;  // packed inputs: a group gets more heads until it has so many key blocks
  int32_t last_group = 0;            // first work tile of the last group, which may have more heads
  bool reversed = false;             // before last_group, a head's key blocks (or lists) go from the last to the first
  int32_t work_tiles = 0;            // an upper bound for packed inputs
  int32_t wave_size = 0;             // work tiles that run at the same time, each on a CTA or a cluster

  // The query loop
  bool heads_outermost = false;    // all query blocks of a query head, then the next head; else heads are innermost
  int32_t query_blocks_apart = 0;  // staggered start: distance of the starts of neighbouring key blocks; 0: none
  bool fetches_early = false;      // a CTA takes its next work tile before it has loaded all of the current one

  // dq
  DqOrder dq_order = DqOrder::kUnordered;
  bool last_add_writes_dq = false;  // the last add to a dq tile writes dq, so no dq postprocess follows

  // Work tiles go through all batch entries of a head, then of the next head, because these share a bias
  bool batches_innermost = false;

  // SMs that run the preprocess while the others start on the first work tiles; 0: the preprocess runs before
  int32_t preprocess_ctas = 0;

  FLASHBWD_HOST_DEVICE bool counts_adds() const { return dq_order != DqOrder::kUnordered; }
};

Schedule choose_schedule(const AttentionProblem& problem, const Tile& tile, int64_t sm_count);

// fp32 elements of the partial dk and dv of all GQA splits; 0 without splits.
int64_t partial_elements(const AttentionProblem& problem, const Schedule& schedule);

// Queries that a key block sees, on average.
int64_t queries_seen(const AttentionProblem& problem);

std::string in_words(const Schedule& schedule, const Tile& tile);

}  // namespace flashbwd::sm90

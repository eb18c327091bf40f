// Index arithmetic that host and device share: which tiles of the scores are visible, who works on which key block in
// which order, how many workers touch a dq tile, and where a row of the dq accumulator lies. Integer code without
// state; the tests brute-force every function on the host.
//
// Units: i is a query row, j a key row, both local to their sequence; m counts tiles of block_m query rows, n tiles of
// block_n key rows. Ranges are half-open.
#pragma once

#include <cstdint>

#include "../common/macros.h"
#include "params.h"

namespace flashbwd {

FLASHBWD_HOST_DEVICE constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
FLASHBWD_HOST_DEVICE constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
FLASHBWD_HOST_DEVICE constexpr int64_t at_least(int64_t a, int64_t floor) { return a < floor ? floor : a; }
FLASHBWD_HOST_DEVICE constexpr int64_t at_most(int64_t a, int64_t ceiling) { return a > ceiling ? ceiling : a; }

// ---------------------------------------------------------------------------------------------------------------------
// Visibility: masks as a band of the (seqlen_q, seqlen_k) scores

// [begin, end); {0, 0} when empty.
struct BlockRange {
  int32_t begin = 0;
  int32_t end = 0;
  FLASHBWD_HOST_DEVICE constexpr int32_t size() const { return end - begin; }
  FLASHBWD_HOST_DEVICE constexpr bool empty() const { return end <= begin; }
  FLASHBWD_HOST_DEVICE constexpr bool contains(int32_t block) const { return begin <= block && block < end; }
};

// Pair (i, j) is visible iff 0 <= i < seqlen_q, 0 <= j < seqlen_k and lo <= j - i < hi. Causal, windows and their
// absence differ in the two numbers only: an unbounded side is one that no pair reaches.
struct Visibility {
  int32_t seqlen_q = 0;  // logical lengths of this sequence
  int32_t seqlen_k = 0;
  int32_t lo = 0;  // in [-seqlen_q, seqlen_k], as is hi, so that no sum below leaves 64 and no j - i leaves 32 bits
  int32_t hi = 0;

  FLASHBWD_HOST_DEVICE constexpr bool visible(int32_t i, int32_t j) const {
    return 0 <= i && i < seqlen_q && 0 <= j && j < seqlen_k && lo <= j - i && j - i < hi;
  }
  // No mask inside the lengths: every query sees every key. Says nothing where there are none of either.
  FLASHBWD_HOST_DEVICE constexpr bool full() const { return lo <= 1 - seqlen_q && hi >= seqlen_k; }
};

// The windows reach `window_left` keys before and `window_right` keys after the diagonal j = i + off, which ends in the
// bottom right corner (off = seqlen_k - seqlen_q) but for kTopLeft (off = 0). Negative: unbounded. Causal has already
// made window_right 0. A difference j - i of two rows lies in [1 - seqlen_q, seqlen_k - 1], so clamping lo and hi to
// [-seqlen_q, seqlen_k] changes no pair.
FLASHBWD_HOST_DEVICE constexpr Visibility make_visibility(int32_t seqlen_q, int32_t seqlen_k, int64_t window_left,
                                                          int64_t window_right, CausalAlignment causal) {
  const int64_t off = causal == CausalAlignment::kTopLeft ? 0 : int64_t{seqlen_k} - seqlen_q;
  // No length reaches 2^31: a longer window is cut there before it is added to.
  const int64_t left = at_most(window_left, INT32_MAX);
  const int64_t right = at_most(window_right, INT32_MAX);
  const int64_t lo = left < 0 ? -int64_t{seqlen_q} : at_most(at_least(off - left, -int64_t{seqlen_q}), seqlen_k);
  const int64_t hi = right < 0 ? int64_t{seqlen_k} : at_most(at_least(off + right + 1, -int64_t{seqlen_q}), seqlen_k);
  return {seqlen_q, seqlen_k, static_cast<int32_t>(lo), static_cast<int32_t>(hi)};
}

// Blocks that hold at least one of the rows [first, last + 1), where rows below 0 or from `limit` on do not exist.
FLASHBWD_HOST_DEVICE constexpr BlockRange blocks_of_rows(int64_t first, int64_t last, int32_t limit, int32_t block) {
  first = at_least(first, 0);
  last = at_most(last, int64_t{limit} - 1);
  if (last < first) return {};
  return {static_cast<int32_t>(first / block), static_cast<int32_t>(last / block + 1)};
}

// Key blocks that query block m sees: exactly those with a visible pair in tile (m, n). Exact, for the keys of a row
// are one interval of hi - lo >= 1 places that moves by one a row, so those of a block of rows are one interval too.
FLASHBWD_HOST_DEVICE constexpr BlockRange key_blocks(const Visibility& v, int32_t m, int32_t block_m, int32_t block_n) {
  const int64_t first_row = int64_t{m} * block_m;
  const int64_t last_row = at_most(first_row + block_m, v.seqlen_q) - 1;
  if (last_row < first_row) return {};
  return blocks_of_rows(first_row + v.lo, last_row + v.hi - 1, v.seqlen_k, block_n);
}

// Query blocks that see key block n: exactly those with a visible pair in tile (m, n). lo <= j - i < hi read for i:
// j - hi < i <= j - lo.
FLASHBWD_HOST_DEVICE constexpr BlockRange query_blocks(const Visibility& v, int32_t n, int32_t block_m,
                                                       int32_t block_n) {
  const int64_t first_key = int64_t{n} * block_n;
  const int64_t last_key = at_most(first_key + block_n, v.seqlen_k) - 1;
  if (last_key < first_key) return {};
  return blocks_of_rows(first_key - v.hi + 1, last_key - v.lo, v.seqlen_q, block_m);
}

// Of those, the ones of which every pair of the whole tile is visible: m * block_m <= first_key - lo - (block_m - 1),
// and so on. A range without blocks may lie anywhere.
FLASHBWD_HOST_DEVICE constexpr BlockRange interior_query_blocks(const Visibility& v, int32_t n, int32_t block_m,
                                                                int32_t block_n) {
  const int64_t first_key = int64_t{n} * block_n;
  const int64_t last_key = first_key + block_n - 1;
  if (last_key >= v.seqlen_k) return {};
  const int64_t end = at_least(at_most(first_key - v.lo + 1, v.seqlen_q), 0) / block_m;
  const int64_t begin = ceil_div(at_least(last_key - v.hi + 1, 0), block_m);
  return {static_cast<int32_t>(begin), static_cast<int32_t>(end)};
}

// Row i sees a key. 0 <= i; the sums fit in 32 bits, see Visibility.
FLASHBWD_HOST_DEVICE constexpr bool sees_a_key(const Visibility& v, int32_t i) {
  const int32_t first = i + v.lo > 0 ? i + v.lo : 0;
  const int32_t end = i < v.seqlen_k - v.hi ? i + v.hi : v.seqlen_k;
  return i < v.seqlen_q && first < end;
}

enum class TileKind : int32_t {
  kEmpty,     // no visible pair: nothing to do
  kMasked,    // some pairs of the tile are invisible or beyond the lengths
  kInterior,  // every pair of the whole tile is visible
};

// The one answer to "what is to be done with tile (m, n)" for every role of a kernel.
FLASHBWD_HOST_DEVICE constexpr TileKind tile_kind(const Visibility& v, int32_t m, int32_t n, int32_t block_m,
                                                  int32_t block_n) {
  if (!query_blocks(v, n, block_m, block_n).contains(m)) return TileKind::kEmpty;
  const int64_t first_row = int64_t{m} * block_m, last_row = first_row + block_m - 1;
  const int64_t first_key = int64_t{n} * block_n, last_key = first_key + block_n - 1;
  const bool inside = last_row < v.seqlen_q && last_key < v.seqlen_k;
  return inside && first_key - last_row >= v.lo && last_key - first_row < v.hi ? TileKind::kInterior
                                                                               : TileKind::kMasked;
}

// ---------------------------------------------------------------------------------------------------------------------
// Splits: the walk of one key block over the query blocks of a head group, shared by num_splits CTAs
//
// Key blocks are jobs of their own, so that what is left to share where there are few of them is the walk. Each pair of
// a query tile and a key block still belongs to one CTA: key_blocks(m).size() CTAs add into dq tile m, whatever
// num_splits is. dk and dv of the splits are summed afterwards, in order.

// Steps of one split. Consecutive splits are in different query blocks (or heads) at any moment.
FLASHBWD_HOST_DEVICE constexpr BlockRange split_walk(int32_t steps, int32_t split, int32_t num_splits) {
  return {static_cast<int32_t>(int64_t{steps} * split / num_splits),
          static_cast<int32_t>(int64_t{steps} * (split + 1) / num_splits)};
}

// Heads of a group that a walk takes abreast, tile by tile: all of them, or where CTAs share the walk, those of one
// CTA, so that each has the same tiles of its own heads. A divisor of `heads`.
FLASHBWD_HOST_DEVICE constexpr int32_t heads_of_walk(int32_t heads, int32_t num_splits) {
  int32_t abreast = static_cast<int32_t>(at_least(heads / num_splits, 1));
  while (heads % abreast != 0) --abreast;
  return abreast;
}

// A position in the walk over the `tiles` query tiles of the heads of a group, `abreast` heads at a time.
struct WalkPosition {
  int32_t head = 0;   // of the group
  int32_t tile = 0;   // in the order of the walk
  int32_t place = 0;  // of the head among those abreast

  WalkPosition() = default;
  FLASHBWD_HOST_DEVICE constexpr WalkPosition(int32_t step, int32_t tiles, int32_t abreast) {
    if (step == 0) return;
    const int32_t within = step % (tiles * abreast);
    place = within % abreast;
    tile = within / abreast;
    head = step / (tiles * abreast) * abreast + place;
  }
  FLASHBWD_HOST_DEVICE constexpr void advance(int32_t tiles, int32_t abreast) {
    ++head;
    if (++place < abreast) return;
    place = 0;
    if (++tile < tiles) {
      head -= abreast;
    } else {
      tile = 0;
    }
  }
};

// How many CTAs should share a key block, where `jobs` key blocks of `mean` steps, `longest` at most, run `at_once` at
// a time. `s` splits take the longer of one walk's part and ceil(jobs * s / at_once) rounds of the mean part; each
// CTA's start (keys loaded, no product yet) costs about a step, the sums two and what they read. More than one split
// where that saves a tenth. No more CTAs than three times what runs at a time, so that what they keep for the sums
// stays small.
FLASHBWD_HOST_DEVICE constexpr int32_t split_count(int64_t jobs, int64_t mean, int64_t longest, int64_t at_once) {
  int64_t best = 1, least = at_least(longest + 1, ceil_div(jobs, at_once) * (mean + 1)) * 9 / 10;
  for (int64_t s = 2; s <= longest && jobs * s <= 3 * at_once; ++s) {
    const int64_t rounds = ceil_div(jobs * s, at_once);
    const int64_t cost = at_least(ceil_div(longest, s) + 1, rounds * (ceil_div(mean, s) + 1)) + 2 + rounds;
    if (cost < least) {
      best = s;
      least = cost;
    }
  }
  return static_cast<int32_t>(best);
}

// ---------------------------------------------------------------------------------------------------------------------
// Ordered accumulation: the adds into dq tile m of one (batch, query head) happen in a fixed order of the key blocks
//
// One job is one key block n. It walks its query blocks in the order of ordered_query_block and, for each, waits until
// the tile's semaphore equals ordered_turn, adds, and sets it to turn + 1. The last of key_blocks(m).size() turns may
// finish the tile. Jobs are taken one by one from a counter (or launched) with n ascending within a (batch, head).
//
// Masked (any window, causal): turns ascend with n, and the walk descends from the last visible query block. With a
// diagonal the block of the most keys is everybody's first, and job n, which starts n turns late and has n tiles fewer,
// ends with the others; with a window each block's first tile is one that no earlier block sees.
// No deadlock, whatever the number of workers or who else holds the GPU: a job waits only for jobs with smaller n of
// its own (batch, head), which were taken earlier. Of the jobs taken and not finished the one taken first waits for
// nobody, so it goes on; by induction all end.
//
// Causal, where job n would start n turns late: the other way round. Jobs are taken from the last key block on, turns
// descend with n, and each job walks up from its diagonal: key blocks that begin together are in different tiles, and
// reach a tile one after the other (ordered_turn_from_last). Jobs come shortest first, so that the last heads had
// better go by the order above.
//
// Full: in that order job n would idle for n turns. Instead `group` key blocks run abreast, job n starting at query
// block n % group and going up cyclically, so that at each moment they are in different tiles: the add into tile m
// happens at step (m - n) mod M of job n. Groups follow one another; within a group turns ascend with that step.
// No deadlock as long as `group` times `heads_abreast` workers run at the same time at some time, where heads_abreast
// is the head_group of the job order below (1 if all key blocks of a head come in a row): let g be the oldest
// unfinished bundle, the jobs of one group in all heads abreast. They are consecutive jobs. While one of g is not
// taken, no job of a later bundle is, so some worker is free and takes it. Once all are taken they wait for nobody
// outside, and an add at step t waits for adds at steps below t only. A group of 1 waits for earlier jobs alone, as the
// masked order does: for launches that cannot count on any neighbour.

// Key blocks abreast for a full mask: no more than run at the same time, and no more than there are tiles to be in.
FLASHBWD_HOST_DEVICE constexpr int32_t ordered_group(int32_t workers, int32_t heads_abreast, int32_t num_query_blocks) {
  return static_cast<int32_t>(at_least(at_most(workers / heads_abreast, num_query_blocks), 1));
}

// Query block of step 0 <= step < query_blocks(n).size() of key block n.
FLASHBWD_HOST_DEVICE constexpr int32_t ordered_query_block(const Visibility& v, int32_t n, int32_t block_m,
                                                           int32_t block_n, int32_t group, int32_t step) {
  const BlockRange range = query_blocks(v, n, block_m, block_n);
  if (!v.full()) return range.end - 1 - step;
  const int64_t m = int64_t{n % group} + step;
  return static_cast<int32_t>(m < range.end ? m : m - range.end);
}

// Jobs of one (batch, head) that run abreast, and one of them.
struct Abreast {
  int32_t before = 0;  // jobs of the head that come before all of these
  int32_t place = 0;   // of the one among these
  int32_t size = 1;    // of these
};

// Where jobs that walk all tiles cyclically begin: the last one that begins at a tile up to m is number m * density /
// 2^16, rounded down.
struct Starts {
  uint32_t density = 1u << 16;  // a job a tile at most

  // Of `size` jobs, less than 2^16 and no more than there are tiles: all over the tiles, but `gap` tiles apart at most.
  static FLASHBWD_HOST_DEVICE constexpr Starts of(int32_t size, int32_t tiles, int32_t gap) {
    const uint32_t jobs = static_cast<uint32_t>(size) << 16;
    const uint32_t all_over = (jobs - 1) / tiles + 1, least = ((1u << 16) - 1) / gap + 1;
    return {all_over > least ? all_over : least};
  }
  // Grows by one with m at most, so that each job has a start of its own.
  FLASHBWD_HOST_DEVICE constexpr int32_t last_until(int32_t m) const {
    return static_cast<int32_t>(static_cast<uint64_t>(m) * density >> 16);
  }
  FLASHBWD_HOST_DEVICE constexpr int32_t tile(int32_t place) const {
    return static_cast<int32_t>(((static_cast<uint32_t>(place) << 16) + density - 1) / density);
  }
};

// How many jobs add into query tile m before this one does, where each walks all tiles cyclically: those before, then
// those abreast by the step at which they come to the tile.
FLASHBWD_HOST_DEVICE constexpr int32_t cyclic_turn(const Abreast& jobs, const Starts& starts, int32_t m) {
  // Those that begin there or before come first, the last one of them at the first step, then the others a round later:
  // last, last - 1, ..., 0, then size - 1, ..., last + 1.
  const int32_t last = starts.last_until(m);
  if (jobs.place <= last) return jobs.before + static_cast<int32_t>(at_most(last, jobs.size - 1)) - jobs.place;
  return jobs.before + last + jobs.size - jobs.place;
}

// How many key blocks add into dq tile m before key block n does. 1 <= group <= ordered_group(...).
FLASHBWD_HOST_DEVICE constexpr int32_t ordered_turn(const Visibility& v, int32_t m, int32_t n, int32_t block_m,
                                                    int32_t block_n, int32_t group) {
  if (!v.full()) return n - key_blocks(v, m, block_m, block_n).begin;
  const int32_t num_key_blocks = static_cast<int32_t>(ceil_div(v.seqlen_k, block_n));
  const int32_t place = n % group, before = n - place;
  return cyclic_turn({before, place, static_cast<int32_t>(at_most(group, num_key_blocks - before))}, Starts(), m);
}

// The same where key blocks are taken from the last one on and walk their query blocks in ascending order.
FLASHBWD_HOST_DEVICE constexpr int32_t ordered_turn_from_last(const Visibility& v, int32_t m, int32_t n,
                                                              int32_t block_m, int32_t block_n) {
  return key_blocks(v, m, block_m, block_n).end - 1 - n;
}

// ---------------------------------------------------------------------------------------------------------------------
// Waves: ordered accumulation of jobs of one length, dealt in advance
//
// Worker w has jobs w, w + workers, w + 2 * workers, ...: job i is of wave i / workers. All workers run at the same
// time from the start, so that nobody waits for a job that no worker will come to. The jobs of one (batch, head) that
// are in one wave run abreast. Adds into a dq tile happen by wave, then:
//
// Cyclic (full masks): by the step at which the jobs come to the tile (cyclic_turn). They begin at tiles of their own
// (Starts), so that nobody waits in the beginning. More jobs than tiles are rings of as many as there are tiles, one
// after the other.
//
// Pairs (causal): job p of P is key block num_key_blocks - P + p, from the last query block down, then key block
// P - 1 - p, from its diagonal up, which the middle one of an odd number is not. All are in the same query block, one
// behind the other: first the first parts, then the second parts (pair_turn). So those of the last jobs, which begin
// where no first part has been, are there before the others come. Where a group has heads enough and all pairs of a
// list are in one wave, each begins a query block kHeadsApart heads behind the one before: they come to a head one
// after the other by themselves, and nobody waits for that in the beginning.
//
// No deadlock: a job waits for jobs of earlier waves. In its own wave a cyclic one waits for adds at smaller steps; the
// first part of a pair for first parts of jobs before it, the second part for first parts, and for second parts of jobs
// before it (with heads apart: of jobs that come to the head at smaller steps). Each comes to these adds by itself, in
// this order; by induction all are done. Pairs may as well come from a counter, all of a head as one wave, where an add
// waits for the first one of its tile only and the last one for all: the first is of a job taken earlier, and the last
// job of a head has the last add of each tile.
//
// Jobs of a wave may as well be taken from a counter, where every worker takes one of each wave: all run at the same
// time, so each comes to take its own, and waits within a wave as above. Who is late takes a later job then, and had
// better be waited for by nobody: with places from the last job to the first each job of a ring waits for the one taken
// before it, but for the first ones near the end of their walk.

// Of job `index`. Those of its head are at index + i * stride for all i that stay in [first, end).
FLASHBWD_HOST_DEVICE constexpr Abreast abreast_in_wave(int32_t index, int32_t first, int32_t end, int32_t stride,
                                                       int32_t workers) {
  const int32_t wave = index / workers * workers;
  const int32_t place = (index - static_cast<int32_t>(at_least(first, wave))) / stride;
  const int32_t behind = (static_cast<int32_t>(at_most(end, int64_t{wave} + workers)) - 1 - index) / stride;
  return {(index - first) / stride - place, place, place + 1 + behind};
}

// Those in one ring over `tiles` query tiles.
FLASHBWD_HOST_DEVICE constexpr Abreast ring_of(const Abreast& jobs, int32_t tiles) {
  const int32_t first = jobs.place / tiles * tiles;
  return {jobs.before + first, jobs.place - first, static_cast<int32_t>(at_most(jobs.size - first, tiles))};
}

// In a group of `heads`: two, for a turn takes almost two steps. With one, pairs hold one another up.
constexpr int32_t kHeadsApart = 2;
FLASHBWD_HOST_DEVICE constexpr bool begins_heads_apart(int32_t heads, int32_t pairs) {
  return heads >= kHeadsApart * pairs;
}

// How many parts of pairs add into a dq tile before this one does. The tile sees the first `seen` key blocks. `head`:
// of the group; `apart`: pairs begin kHeadsApart heads apart, all of the list in this wave.
FLASHBWD_HOST_DEVICE constexpr int32_t pair_turn(const Abreast& wave, bool second, int32_t seen, int32_t num_key_blocks,
                                                 int32_t head, bool apart) {
  // First parts of pairs [0, end_first) and second parts of pairs from first_second on see the tile. That is past the
  // middle one of an odd number, pair 0, which has no second part.
  const int32_t pairs = (num_key_blocks + 1) / 2, pair = wave.before + wave.place;
  const int32_t first_second = pairs - (seen < num_key_blocks / 2 ? seen : num_key_blocks / 2);
  if (!apart && !second) return pair + (wave.before > first_second ? wave.before - first_second : 0);
  const int32_t end_first = pairs - num_key_blocks + seen, last = wave.before + wave.size;
  const int32_t firsts = end_first < last ? end_first : last, before = second && firsts > 0 ? firsts : 0;
  if (!apart) return pair - first_second + before;
  // The last pair that begins at this head or before it, then those before it, then the last one and those before that.
  const int32_t past = head / kHeadsApart + 1, begin = second ? first_second : 0, end = second ? pairs : firsts;
  const int32_t turn = pair < past ? (past < end ? past : end) : end + (past > begin ? past - begin : 0);
  return turn - 1 - pair + before;
}

// ---------------------------------------------------------------------------------------------------------------------
// Persistent slots: job = (batch * heads + head) * jobs_per_head + n, jobs dealt to workers in equal runs

// Each worker sums dq of the jobs it has in one (batch, head) in one slot. Workers of a head are consecutive, so the
// slot is the worker's place among them. That is ceil((job % jobs_per_head) / jobs_per_worker) taken at the first job
// that the worker has in the head, and holds for its other jobs there (taken at each job of its own, the same formula
// would put the jobs of one worker in several slots and reach num_splits).
struct PersistentSlots {
  int64_t jobs = 0;
  int64_t jobs_per_head = 0;    // ceil(seqlen_k / block_n)
  int64_t jobs_per_worker = 1;  // ceil(jobs / workers), at least 1

  // Slots a head: at least the number of workers that meet in any head. 0 when there are no keys.
  FLASHBWD_HOST_DEVICE constexpr int64_t num_splits() const {
    if (jobs_per_head == 0) return 0;
    if (jobs_per_head % jobs_per_worker == 0) return jobs_per_head / jobs_per_worker;
    if (jobs_per_worker % jobs_per_head == 0) return 1;
    return 1 + ceil_div(jobs_per_head - 1, jobs_per_worker);
  }
  // Jobs [first_job(w), first_job(w + 1)) are worker w's.
  FLASHBWD_HOST_DEVICE constexpr int64_t first_job(int64_t worker) const {
    return at_most(worker * jobs_per_worker, jobs);
  }
  FLASHBWD_HOST_DEVICE constexpr int64_t worker_of(int64_t job) const { return job / jobs_per_worker; }
  FLASHBWD_HOST_DEVICE constexpr int64_t slot_of(int64_t job) const {
    return worker_of(job) - worker_of(job - job % jobs_per_head);
  }
  // The one worker that writes `slot` of head `head` (batch * heads + head), or -1 where the slot stays unwritten.
  FLASHBWD_HOST_DEVICE constexpr int64_t owner_of(int64_t head, int64_t slot) const {
    if (jobs_per_head == 0) return -1;
    const int64_t owner = worker_of(head * jobs_per_head) + slot;
    return owner <= worker_of((head + 1) * jobs_per_head - 1) ? owner : -1;
  }
};

FLASHBWD_HOST_DEVICE constexpr PersistentSlots persistent_slots(int64_t batch, int64_t heads, int64_t seqlen_k,
                                                                int64_t block_n, int64_t workers) {
  const int64_t jobs_per_head = ceil_div(seqlen_k, block_n);
  const int64_t jobs = batch * heads * jobs_per_head;
  return {jobs, jobs_per_head, at_least(ceil_div(jobs, workers), 1)};
}

// ---------------------------------------------------------------------------------------------------------------------
// The order of work: linear job -> (batch, head, key block)
//
// Heads go in groups whose queries stay in L2 together; within a group all heads' key block 0 come first, then all
// heads' key block 1, and so on. Under a causal mask key block 0 has the most queries: longest first. Key blocks of one
// (batch, head) are in ascending order, as ordered accumulation wants, and far apart, so that neighbours rarely wait.

struct Job {
  int32_t batch = 0;
  int32_t head = 0;
  int32_t key_block = 0;
};

// Heads, from 1 on, whose q, dout and dq accumulator fit the L2 cache of l2_bytes. `heads_per_job` query heads belong
// to one head of the job list (heads / heads_kv where a job loops over its group).
FLASHBWD_HOST_DEVICE constexpr int64_t heads_in_l2(int64_t l2_bytes, int64_t seqlen_q, int64_t head_dim,
                                                   int64_t head_dim_v, int64_t element_bytes, int64_t heads_per_job) {
  const int64_t row = (head_dim + head_dim_v) * element_bytes + round_up(head_dim, 4) * 4;
  return at_least(l2_bytes / at_least(seqlen_q * row * heads_per_job, 1), 1);
}

// Heads whose jobs are one list, longest first: as many as have all their key blocks in work at the same time, so that
// these read q and dout, and add to dq, while those are in L2. More than `workers` jobs in a list would leave each head
// half done. A divisor of all_heads, for a short last list ends late.
FLASHBWD_HOST_DEVICE constexpr int64_t heads_abreast(int64_t workers, int64_t all_heads, int64_t num_key_blocks) {
  int64_t heads = at_least(at_most(workers / at_least(num_key_blocks, 1), all_heads), 1);
  while (all_heads % heads != 0) --heads;
  return heads;
}

// Dense: 0 <= index < batch * heads * num_key_blocks. Heads of all batches are one list of batch * heads. Index counts
// all jobs: 32 bits where they are enough save a GPU the divisions of 64.
template <typename Index>
FLASHBWD_HOST_DEVICE constexpr Job dense_job(Index index, int32_t batch, int32_t heads, int32_t num_key_blocks,
                                             int64_t head_group) {
  const Index all_heads = Index{batch} * heads;
  // Keeps the product below within the number of jobs.
  const Index width = static_cast<Index>(at_most(head_group, all_heads));
  const Index group = index / (width * num_key_blocks);
  const Index within = index - group * width * num_key_blocks;
  const Index size = static_cast<Index>(at_most(width, all_heads - group * width));  // the last group may be smaller
  const Index head = group * width + within % size;
  return {static_cast<int32_t>(head / heads), static_cast<int32_t>(head % heads), static_cast<int32_t>(within / size)};
}

// The same, but from job `before_last` on, which is the first of a head, all heads are one list.
template <typename Index>
FLASHBWD_HOST_DEVICE constexpr Job dense_job(Index index, int32_t batch, int32_t heads, int32_t num_key_blocks,
                                             int64_t head_group, Index before_last) {
  if (index < before_last) return dense_job(index, batch, heads, num_key_blocks, head_group);
  const Index heads_before = before_last / num_key_blocks, size = Index{batch} * heads - heads_before;
  const Index within = index - before_last, head = heads_before + within % size;
  return {static_cast<int32_t>(head / heads), static_cast<int32_t>(head % heads), static_cast<int32_t>(within / size)};
}

// Packed variable lengths need no table of block counts: sequence b gets the block numbers
// [first_block(b), first_block(b + 1)). As floor(x + y) >= floor(x) + floor(y), these are at least
// ceil(length / block_n), and at most one more, which has nothing to do.
FLASHBWD_HOST_DEVICE constexpr int64_t first_block(int64_t cu_seqlens_b, int64_t b, int64_t block_n) {
  return cu_seqlens_b / block_n + b;
}

// Number of jobs: exactly this with cu_seqlens_k[batch]; an upper bound, for a grid, with total_k rows in its place.
FLASHBWD_HOST_DEVICE constexpr int64_t varlen_jobs(int64_t total_k, int64_t batch, int64_t heads, int64_t block_n) {
  return heads * first_block(total_k, batch, block_n);
}

// Of one head of sequence b.
FLASHBWD_HOST_DEVICE constexpr int32_t jobs_of_sequence(const int32_t* cu_seqlens_k, int32_t b, int32_t block_n) {
  return static_cast<int32_t>(first_block(cu_seqlens_k[b + 1], b + 1, block_n) -
                              first_block(cu_seqlens_k[b], b, block_n));
}

// 0 <= index < varlen_jobs(cu_seqlens_k[batch], ...); batch = -1 beyond it. A key block at or past the end of its
// sequence is not a job. cu_seqlens_k: (batch + 1,), [0] = 0. Bisection: log2(batch) loads. A list has head_group(key
// blocks of a head) heads.
template <typename Index, typename HeadGroup>
FLASHBWD_HOST_DEVICE constexpr Job varlen_job(Index index, const int32_t* cu_seqlens_k, int32_t batch, int32_t heads,
                                              int32_t block_n, const HeadGroup& head_group) {
  const Index block = index / heads;
  if (batch == 0 || block >= first_block(cu_seqlens_k[batch], batch, block_n)) return {-1, 0, 0};
  int32_t low = 0, high = batch;  // first_block(low) <= block < first_block(high)
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    if (first_block(cu_seqlens_k[middle], middle, block_n) <= block) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const int64_t first = first_block(cu_seqlens_k[low], low, block_n);
  const int32_t blocks = jobs_of_sequence(cu_seqlens_k, low, block_n);
  const Job job = dense_job(static_cast<Index>(index - first * heads), 1, heads, blocks, head_group(blocks));
  return {low, job.head, job.key_block};
}

// ---------------------------------------------------------------------------------------------------------------------
// The dq accumulator: batches back to back, each (heads, num_splits, seqlen_q, row_stride) fp32, physical seqlen_q

// Floats from one row to the next: head_dim padded to a whole number of 16-byte vectors.
FLASHBWD_HOST_DEVICE constexpr int64_t dq_row_stride(int64_t head_dim) { return round_up(head_dim, 4); }

// Slots of a sequence in split-slot mode. A seqlen_k beyond max_seqlen_k breaks the caller's promise; cut here, it
// costs keys that no CTA was launched for, but no memory beyond the workspace, which was sized by the maximum.
FLASHBWD_HOST_DEVICE constexpr int64_t split_slots(int64_t seqlen_k, int64_t max_seqlen_k, int64_t block_n) {
  return ceil_div(at_most(seqlen_k, max_seqlen_k), block_n);
}

// Elements of a sequence in the accumulator.
FLASHBWD_HOST_DEVICE constexpr int64_t dq_elements(int64_t heads, int64_t num_splits, int64_t seqlen_q,
                                                   int64_t row_stride) {
  return heads * num_splits * seqlen_q * row_stride;
}

// Element of column 0 of query row i in slot `split` of `head`, from the start of its sequence.
FLASHBWD_HOST_DEVICE constexpr int64_t dq_row_offset(int64_t head, int64_t split, int64_t i, int64_t num_splits,
                                                     int64_t seqlen_q, int64_t row_stride) {
  return ((head * num_splits + split) * seqlen_q + i) * row_stride;
}

// Accumulators in blocks (WorkspaceLayout::dq_blocks): every eight rows of a slot, from its first on, lie in blocks of
// eight columns, the even columns of all rows before the odd ones. So two MMA accumulators of a warp (rows lane / 4,
// columns lane % 4 * 2 and one more) are 128 consecutive bytes each. Rows that make no eight lie as rows.
constexpr int32_t kDqBlock = 8;
constexpr int32_t kDqBlockElements = kDqBlock * kDqBlock;

// From the first row of the eight that hold it.
FLASHBWD_HOST_DEVICE constexpr int64_t dq_block_offset(int64_t row, int64_t column) {
  return column / kDqBlock * kDqBlockElements + column % 2 * (kDqBlockElements / 2) + row % kDqBlock * (kDqBlock / 2) +
         column % kDqBlock / 2;
}

// Accumulators of parted rows (WorkspaceLayout::dq_parted): in each whole block of 32 columns the even pieces of four
// columns lie before the odd ones. A store of a warp (rows lane / 4, columns lane % 4 * 2 and one more) to such rows in
// shared memory, swizzled by row, meets every bank as often as any other.
constexpr int32_t kPartedBlock = 32;

// Whether the block that holds this column is whole.
FLASHBWD_HOST_DEVICE constexpr bool is_parted(int32_t column, int32_t columns) {
  return column / kPartedBlock * kPartedBlock + kPartedBlock <= columns;
}

// Where the four columns from `column` on lie, a multiple of four, in a row of `columns`.
FLASHBWD_HOST_DEVICE constexpr int32_t parted_place(int32_t column, int32_t columns) {
  const int32_t piece = column % kPartedBlock / 4;
  return is_parted(column, columns) ? column / kPartedBlock * kPartedBlock + (piece % 2 * 4 + piece / 2) * 4 : column;
}

// Which four columns lie there.
FLASHBWD_HOST_DEVICE constexpr int32_t parted_column(int32_t place, int32_t columns) {
  const int32_t piece = place % kPartedBlock / 4;
  return is_parted(place, columns) ? place / kPartedBlock * kPartedBlock + (piece % 4 * 2 + piece / 4) * 4 : place;
}

}  // namespace flashbwd

#include "schedule.h"

#include <algorithm>

#include "../index/query_loop.h"
#include "../index/tile_order.h"
#include "../index/visibility.h"
#include "../problem.h"
#include "layout.h"

namespace flashbwd::sm90 {
namespace {

bool is_full(const AttentionProblem& p) { return p.window_left < 0 && p.window_right < 0; }
bool is_causal(const AttentionProblem& p) { return p.window_left < 0 && p.window_right >= 0; }
bool is_window(const AttentionProblem& p) { return p.window_left >= 0 && p.window_right >= 0; }
bool is_gqa(const AttentionProblem& p) { return p.heads != p.heads_kv; }
bool has_whole_sequences(const AttentionProblem& p) { return !p.varlen && !p.has_seqused; }

int64_t window_size(const AttentionProblem& p) { return p.window_left + p.window_right; }

// A window in which a key block sees less than half of the queries.
bool is_narrow(const AttentionProblem& p, const Tile& tile) {
  return is_window(p) && 2 * (window_size(p) + tile.block_n) <= p.seqlen_q;
}

// The kernel writes dq with TMA in whole tiles, of which every row must have sums.
bool can_write_dq(const AttentionProblem& p) {
  if (!has_whole_sequences(p) || p.seqlen_q == 0 || p.seqlen_k == 0) return false;
  if (p.has_block_mask && !p.block_mask_covers) return false;
  if (p.dq_dtype != p.dtype || p.head_dim % 4 != 0 || !p.dq_aligned_16) return false;
  const Visibility v = make_visibility(static_cast<int32_t>(p.seqlen_q), static_cast<int32_t>(p.seqlen_k),
                                       p.window_left, p.window_right, p.causal);
  return sees_a_key(v, 0) && sees_a_key(v, static_cast<int32_t>(p.seqlen_q) - 1);
}

// True for a sparse block mask, for example one of documents: its key blocks see, on average, less than 0.45 of the
// query blocks. Its lists visit one query head after another (flashbwd/flex/kernel_lists.py).
bool is_sparse(const AttentionProblem& p, const Tile& tile) {
  return p.has_block_mask && 20 * queries_seen(p) < 9 * round_up(p.seqlen_q, tile.block_m);
}

// For a call with a block mask in default mode: true if the last add to a dq tile loses little time while it waits for
// the others.
bool last_add_waits_little(const AttentionProblem& p, const Tile& tile, int64_t seen, int64_t workers) {
  const int64_t work_tiles = p.batch * p.heads_kv * ceil_div(p.seqlen_k, tile.block_n);
  // The adds of lists that are not reversed come at the same time: documents took up to 1.85 times as long. The last
  // group, up to three waves, is never reversed.
  if (!is_gqa(p)) return work_tiles >= 8 * workers;
  // Reversed lists of grouped heads need more of L2: documents of 1024 tokens took 1.1 times as long.
  if (is_sparse(p, tile)) return work_tiles >= 4 * workers && seen <= 512;
  // Not reversed, but measured with four query heads per KV head: 1.04 to 1.07 times as fast.
  return p.heads / p.heads_kv >= 4;
}

// Saves the dq postprocess, but an iteration takes 1 to 2 % longer. It pays in short query loops, and in narrow
// windows, whose fp32 dq would leave L2 before the postprocess.
bool last_add_writes_dq(const AttentionProblem& p, const Tile& tile, int64_t workers) {
  if (!last_writes_dq(tile) || !can_write_dq(p)) return false;
  // A block mask counts whole tiles: up to block_m + block_n more than a causal mask or a window with the same pairs.
  const int64_t rounded_up = p.has_block_mask ? tile.block_m + tile.block_n : 0;
  const int64_t seen = queries_seen(p) - rounded_up, group = p.heads / p.heads_kv;
  if (p.has_block_mask && !p.deterministic && !last_add_waits_little(p, tile, seen, workers)) return false;
  if (tile.head_dim == 128 && is_window(p) && (is_gqa(p) || is_narrow(p, tile))) return true;
  if (is_narrow(p, tile)) return seen <= (is_gqa(p) ? 768 : 2048);
  return is_gqa(p) ? seen * group <= 4096 : seen <= (p.deterministic ? 2048 : 1024);
}

// Batch entries, or groups of them that share work tiles.
int64_t batches_of(const AttentionProblem& p, const Tile& tile) { return ceil_div(p.batch, tile.batch_entries); }

// Chooses the pairs and splits with which the call takes the fewest iterations of an SM. An iteration takes about 2.2
// us on an H100, in which memory moves kBytesPerIteration.
void choose_gqa(const AttentionProblem& p, const Tile& tile, int64_t sm_count, Schedule* s) {
  constexpr int64_t kBytesPerIteration = 6'600'000;
  const int64_t group = p.heads / p.heads_kv;
  if (group == 1 || s->key_blocks == 0) return;
  int64_t longest_of_head = s->query_blocks;
  if (is_window(p)) {
    longest_of_head = std::min(longest_of_head, ceil_div(window_size(p) + tile.block_n, tile.block_m) + 1);
  }
  // In short query loops, key blocks without pairs are faster if they fill at least four waves.
  const bool short_loop = group * p.seqlen_q <= (s->last_add_writes_dq && group <= 4 ? 8192 : 4096);
  const int64_t unpaired_waves = p.varlen ? 0 : !short_loop ? INT32_MAX : tile.head_dim == 64 ? 0 : 4;
  int64_t least = INT64_MAX;
  const auto consider = [&](int64_t iterations, int32_t splits, bool pairs) {
    if (iterations >= least) return;
    least = iterations;
    s->gqa_splits = splits;
    s->mirrored_pairs = pairs;
  };
  for (int32_t splits = 1; splits <= (p.varlen ? 1 : 8) && group % splits == 0; splits *= 2) {
    const int64_t heads = p.batch * p.heads_kv * splits, tiles = heads * s->key_blocks;
    const int64_t longest = longest_of_head * (group / splits), shortest = longest / s->key_blocks;
    // Partial dk and dv are written once and read once.
    Schedule split;
    split.gqa_splits = splits;
    const int64_t sums = 2 * 4 * partial_elements(p, split) / kBytesPerIteration;
    if (!is_causal(p)) {
      consider(ceil_div(tiles, sm_count) * longest + sums, splits, false);
      continue;
    }
    // In LPT order the last wave is uneven: in simulations by 0.6 of the longest work tile.
    const int64_t mean = ceil_div(tiles * (longest + shortest) / 2, sm_count);
    consider(std::max(longest, mean + longest * 6 / 10) + sums, splits, false);
    if (tiles < unpaired_waves * sm_count) {
      const int64_t pairs = heads * ceil_div(s->key_blocks, 2);
      consider(ceil_div(pairs, sm_count) * (longest + shortest) + sums, splits, true);
    }
  }
}

// The first work tile of the last group, of `heads` heads in all. If heads are reversed, the last group is not, so that
// it ends with its short work tiles. A block mask may have a few long lists. The last group then has up to three times
// as many heads: it begins with all of their long lists. With 8 documents of 69 to 2457 tokens per sequence,
// simulations end 6 % earlier.
int32_t choose_last_group(const AttentionProblem& p, int64_t heads, const Schedule& s) {
  const int64_t groups = heads / s.heads_per_group;
  const int64_t last = p.has_block_mask ? std::clamp<int64_t>(groups / 2, 1, 3) : s.reversed ? 1 : 0;
  return static_cast<int32_t>(std::max<int64_t>(groups - last, 0)) * s.heads_per_group * s.tiles_per_head;
}

// KV heads (times GQA splits) per group. By default as many as have all their work tiles running at the same time, with
// q, dout and the dq accumulator in 32 of the 50 MB of L2. If adds to dq are ordered, key blocks of a head that run
// side by side wait for one another; more heads per group put other work between them.
int32_t choose_heads_per_group(const AttentionProblem& p, const Tile& tile, int64_t workers, const Schedule& s) {
  const auto heads_in = [&](int64_t megabytes) {
    return heads_in_l2(megabytes << 20, p.seqlen_q, p.head_dim, p.head_dim_v, 2,
                       p.heads / p.heads_kv * tile.batch_entries);
  };
  const int64_t heads = p.heads_kv * s.gqa_splits, all = p.varlen ? heads : heads * batches_of(p, tile);
  int64_t group = std::min(heads_in(32), heads_at_once(workers, all, s.tiles_per_head));
  if (s.reversed) {
    // Above head dimension 128 long work tiles of a group run beside short ones of the next; small groups stay in L2.
    if (tile.head_dim > 128) group = std::min(group, heads_in(2));
    // Grouped heads wait more: at head dimension 256 too, four are 1.08 times as fast as what stays in L2.
    if (is_gqa(p)) group = std::max<int64_t>(group, 4);
    while (all % group != 0) --group;
    return static_cast<int32_t>(group);
  }
  if (!s.counts_adds() || p.varlen || s.query_blocks_apart > 0) return static_cast<int32_t>(group);
  // Neighbouring pairs of a head share its query blocks.
  if (s.mirrored_pairs) return static_cast<int32_t>(std::min<int64_t>(2, all));
  if (is_full(p)) {
    if (2 * group <= heads_in(20)) group *= 2;
  } else if (is_gqa(p)) {
    group = std::max<int64_t>(group, 4);
  } else {
    // Shorter query loops need more heads. A quarter of the SMs leaves four key blocks per head to share L2.
    group = std::max(group, std::min(1000 / std::max<int64_t>(s.query_blocks / 2, 1), workers / 4));
  }
  return static_cast<int32_t>(std::min(group, all));
}

// True if batch entries add to the same gradient of a bias, and L2 does not hold that of all heads: then the entries of
// a head follow one another, so that memory reads and writes each sum once.
bool shares_large_bias(const AttentionProblem& p, const Tile& tile) {
  constexpr int64_t kBytes = 16 << 20;
  const bool adds = copies_bias(tile) && p.need_dbias && p.bias_broadcast_batch && !p.bias_broadcast_head;
  return adds && p.heads * p.seqlen_q * p.seqlen_k * 4 > kBytes;
}

// The distance of a staggered start; 0 for none. 4 is up to 8 % faster than 2 up to 8192 queries. In deterministic mode
// at most two of the key blocks that run at the same time may share a start, and none may if a head has more key blocks
// than run: then the last one of a wave fetches what the others read (prefetch_queries), so it must be ahead of them.
int32_t choose_query_blocks_apart(const AttentionProblem& p, const Tile& tile, int64_t workers, const Schedule& s) {
  const bool can = staggers_start(tile) && is_full(p) && !is_gqa(p) && has_whole_sequences(p);
  if (!can || s.key_blocks < 2 || s.query_blocks < 2) return 0;
  const bool fits = s.key_blocks <= workers;
  const int32_t apart = std::min(p.deterministic && !fits ? 2 : 4, s.query_blocks / 2);
  const int64_t at_once = std::min<int64_t>(s.key_blocks, workers);
  if (p.deterministic && staggered_starts(apart, s.query_blocks) * (fits ? 2 : 1) < at_once) return 0;
  return apart;
}

// SMs for an overlapped preprocess: it pays from 32 MB of out and dout on, which take the whole device about 15 us. In
// full masks of large head dimensions, CTAs that start late would make one more wave.
int32_t choose_preprocess_ctas(const AttentionProblem& p, const Tile& tile, int64_t sm_count, const Schedule& s) {
  constexpr int64_t kBytes = 32 << 20;
  // If the preprocess must also zero the accumulator or a large bias gradient, the few CTAs of an overlapped one would
  // be too slow.
  if (adds_into_zeros(p) || is_gqa(p) || s.work_tiles == 0 || p.head_dim_v % 8 != 0) return 0;
  if (bias_gradient_of(p, tile).elements * static_cast<int64_t>(sizeof(float)) > kBytes) return 0;
  if (p.batch * p.heads * p.seqlen_q * p.head_dim_v * 4 < kBytes) return 0;
  if (tile.batch_entries > 1 || s.batches_innermost || (is_large(tile) && (tile.features != 0 || is_full(p)))) return 0;
  return static_cast<int32_t>(sm_count * (is_large(tile) ? 1 : 2) / 11);
}

}  // namespace

int64_t queries_seen(const AttentionProblem& p) {
  if (p.has_block_mask) return p.block_mask_queries_seen;
  if (is_window(p)) return std::min(p.seqlen_q, window_size(p));
  return is_full(p) ? p.seqlen_q : p.seqlen_q / 2;
}

int64_t partial_elements(const AttentionProblem& p, const Schedule& s) {
  if (s.gqa_splits == 1) return 0;
  return s.gqa_splits * p.batch * p.heads_kv * p.seqlen_k * (round_up(p.head_dim, 4) + round_up(p.head_dim_v, 4));
}

Schedule choose_schedule(const AttentionProblem& p, const Tile& tile, int64_t sm_count) {
  const int64_t workers = sm_count / tile.ctas;
  Schedule s;
  s.key_blocks = static_cast<int32_t>(ceil_div(p.seqlen_k, tile.block_n));
  s.query_blocks = static_cast<int32_t>(ceil_div(p.seqlen_q, tile.block_m));
  s.heads_outermost = is_gqa(p) && is_window(p);
  s.last_add_writes_dq = last_add_writes_dq(p, tile, workers);
  // At head dimension 128 the kernel with heads outermost always counts adds, except for packed inputs.
  const bool counts = s.last_add_writes_dq || (s.heads_outermost && by_heads_counts_adds(tile) && !p.varlen);
  s.dq_order = p.deterministic ? DqOrder::kOrdered : counts ? DqOrder::kFirstAndLast : DqOrder::kUnordered;
  s.reversed = s.counts_adds() && (is_gqa(p) ? is_sparse(p, tile) : is_causal(p) || p.has_block_mask);
  if (!is_large(tile) && !p.has_block_mask) choose_gqa(p, tile, sm_count, &s);
  s.tiles_per_head = s.mirrored_pairs ? static_cast<int32_t>(ceil_div(s.key_blocks, 2)) : s.key_blocks;

  const int64_t heads = p.heads_kv * s.gqa_splits;
  s.work_tiles = static_cast<int32_t>(p.varlen ? varlen_work_tiles(p.total_k, p.batch, heads, tile.block_n)
                                               : batches_of(p, tile) * heads * s.tiles_per_head);
  s.batches_innermost = shares_large_bias(p, tile);
  s.query_blocks_apart = choose_query_blocks_apart(p, tile, workers, s);
  s.wave_size = static_cast<int32_t>(std::min<int64_t>(s.work_tiles, workers));
  if (p.deterministic && (s.mirrored_pairs || s.query_blocks_apart > 0)) {
    s.dispatch = Dispatch::kStatic;
    s.wave_size = static_cast<int32_t>(ceil_div(s.work_tiles, ceil_div(s.work_tiles, s.wave_size)));  // equal waves
  }
  s.heads_per_group = choose_heads_per_group(p, tile, workers, s);
  if (p.varlen && s.counts_adds() && !s.reversed) {
    s.key_blocks_per_group =
        static_cast<int32_t>(heads_in_l2(20 << 20, tile.block_n, p.head_dim, p.head_dim_v, 2, p.heads / p.heads_kv));
  }
  s.last_group = p.varlen ? s.work_tiles : choose_last_group(p, batches_of(p, tile) * heads, s);
  constexpr int64_t kShortLoop = 8;  // iterations
  s.fetches_early = early_iterations(tile) > 0 && !(s.counts_adds() && queries_seen(p) < kShortLoop * tile.block_m);
  s.preprocess_ctas = choose_preprocess_ctas(p, tile, sm_count, s);
  return s;
}

std::string in_words(const Schedule& s, const Tile& tile) {
  std::string words = s.mirrored_pairs ? "mirrored pairs of key blocks" : "key blocks";
  if (has(tile, feature::kBlockMask)) words += ", query loops of a block mask";
  if (s.reversed && has(tile, feature::kBlockMask)) words += ", the shortest lists first";
  words += s.dispatch == Dispatch::kStatic ? ", static scheduler in waves" : ", dynamic scheduler";
  if (tile.batch_entries > 1) words += " of two batch entries that share a bias";
  if (tile.by_queries) words += ", half of the queries per warpgroup";
  if (tile.ctas > 1) words += ", each by " + std::to_string(tile.ctas) + " CTAs";
  if (s.query_blocks_apart > 0) words += ", staggered start";
  if (s.gqa_splits > 1) words += ", query heads split over " + std::to_string(s.gqa_splits) + " CTAs";
  if (s.batches_innermost) words += ", all batch entries of a head before the next head";
  if (s.preprocess_ctas > 0) words += ", overlapped preprocess";
  words += s.dq_order == DqOrder::kOrdered ? ", dq added in a fixed order" : ", dq added in any order";
  return words + (s.last_add_writes_dq ? ", the last add writes dq" : "");
}

}  // namespace flashbwd::sm90

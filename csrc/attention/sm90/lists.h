// Which jobs are in work at the same time: how many heads make a list, and how the last jobs are cut where they would
// leave multiprocessors idle. Host arithmetic.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../params.h"
#include "../problem.h"
#include "../schedule.h"
#include "config.h"
#include "grouped.h"

namespace flashbwd::sm90 {

// Steps of a job, beside its own.
constexpr int64_t kStepsAround = 3;

// Bytes that memory moves while a multiprocessor takes a step.
constexpr int64_t bytes_a_step(const Tile& tile) { return 6'600'000 * tile.head_dim / 128 * tile.block_m / 64; }

// Whether there are sequences that do not have all rows.
inline bool is_packed_or_cut(const AttentionProblem& p) { return p.varlen || p.has_seqused; }
inline bool is_packed_or_cut(const AttentionBackwardParams& p) {
  return p.cu_seqlens_q != nullptr || p.cu_seqlens_k != nullptr || p.seqused_q != nullptr || p.seqused_k != nullptr;
}

// Deterministic: whether jobs of a list go through the key blocks from the last one (ordered_turn_from_last).
// Here and below: of an AttentionProblem or AttentionBackwardParams.
template <typename Problem>
bool from_last_key(const Problem& p) {
  const bool causal = p.window_left < 0 && p.window_right >= 0;
  return p.deterministic && causal && p.heads == p.heads_kv;
}

// A window in which a key block sees less than half of the queries: jobs that begin together need few rows of each
// head.
template <typename Problem>
bool is_narrow(const Problem& p, int64_t block_n) {
  return p.window_left >= 0 && p.window_right >= 0 &&
         2 * (int64_t{p.window_left} + p.window_right + block_n) <= p.seqlen_q;
}

// Queries that a key block sees, on average.
template <typename Problem>
int64_t queries_seen(const Problem& p) {
  if (p.window_left >= 0 && p.window_right >= 0) {
    return std::min<int64_t>(p.seqlen_q, int64_t{p.window_left} + p.window_right);
  }
  const bool half = p.window_left >= 0 || p.window_right >= 0;
  return half ? p.seqlen_q / 2 : p.seqlen_q;
}

// Whether adds to a dq tile take turns in the kernel where the last one writes dq (turns.cuh): nothing is left to
// convert, but steps are 1 to 2 % longer. So it is in narrow windows, whose sums have left L2 when they are converted,
// and in short walks.
//
// Measured at head dimension 128, S = 256 to 2048: 1.35, 1.14 to 1.18, 1.02 to 1.04, 1.00 times as fast, in order 1.36,
// 1.13 to 1.19, 1.04 to 1.08, 1.00 to 1.03, at 4096 1.02 (causal) and 1.00; beyond it loses. Grouped heads 1.29 to 1.44
// at S = 256, 1.31 to 1.45 (causal) and 1.10 to 1.14 at 512, 1.06 to 1.16 (causal) and 1.01 at 1024, of which key
// blocks instead of pairs are 1.2, 1.2 and 1.07 (groups of four); 0.96 to 0.98 (causal) at 2048. At 64, over chores, S
// = 256 1.24, 512 1.02 to 1.08, 1024 1.03 (causal) and 0.98; windows of 128 to 512 keys 1.20, 1024 keys 1.03 to 1.06,
// 2048 1.00. With groups of 4 heads 1.15 to 1.36 at S = 512, 1.04 to 1.14 at 1024, 1.04 (causal) and 1.01 at 2048, of
// 8 1.13 to 1.27 at 512, 1.03 and 0.91 (causal) at 1024 and 2048, of 16 1.12 and 0.95 (causal) at 512 and 2048; in
// windows of 128 to 1024 keys 1.16, 1.06, 1.03, 0.99.
template <typename Problem>
bool takes_turns(const Problem& p, const Tile& tile) {
  if (!last_writes_dq(tile) || is_packed_or_cut(p)) return false;
  const bool window = p.window_left >= 0 && p.window_right >= 0, grouped = p.heads != p.heads_kv;
  const int64_t seen = queries_seen(p);
  if (tile.head_dim == 64) {
    if (is_narrow(p, tile.block_n)) return seen <= (grouped ? 768 : 2048);
    return grouped ? seen * (p.heads / p.heads_kv) <= 4096 : seen <= 512;
  }
  if (window && (grouped || is_narrow(p, tile.block_n))) return true;
  return seen <= (p.deterministic ? 2048 : 1024) / (grouped ? 2 : 1);
}

// Of less than 8 steps, on average.
template <typename Problem>
bool is_short_walk(const Problem& p, const Tile& tile) {
  return queries_seen(p) < 8 * tile.block_m;
}

// Queries of each head that the jobs need which begin together, where `heads` have jobs at the same time.
template <typename Problem>
int64_t rows_at_once(const Problem& p, int64_t heads, int64_t block_n, int64_t sm_count) {
  if (!is_narrow(p, block_n)) return p.seqlen_q;
  const int64_t key_blocks = ceil_div(sm_count, heads) + 1;  // of a head, on their way
  return std::min<int64_t>(p.seqlen_q, int64_t{p.window_left} + p.window_right + key_blocks * block_n);
}

// Dense, deterministic, without a mask, where walks are short and there are more heads than multiprocessors: so many
// heads to a list that the key blocks of each begin two steps after one another, which is what a turn takes. In shorter
// lists they wait, longer ones leave L2: measured at S = 512 and 1024 with head dimension 64, 512 with 128. Where the
// last one writes dq at 64, three steps: 6 % at S = 256 and 512 (at 128 1 % slower), four as good. They need not divide
// `all`. Longer walks end in a round that is cut, whole lists at a time (last_round): there lists are divisors, of
// about as many heads. 0: no such walks.
template <typename Problem>
int64_t heads_of_short_walks(const Problem& p, const Tile& tile, int64_t all, int64_t query_blocks, int64_t sm_count) {
  constexpr int64_t kShortWalk = 8;
  const bool full = p.deterministic && p.window_left < 0 && p.window_right < 0;
  if (!full || p.heads != p.heads_kv || p.head_dim > 128 || query_blocks > kShortWalk || all < sm_count) return 0;
  const int64_t steps_apart = tile.head_dim == 64 && takes_turns(p, tile) ? 3 : 2;
  return ceil_div(steps_apart * sm_count, query_blocks + kStepsAround);
}

// Heads whose jobs are one list (dense_job). `lists`: KV heads times their splits. `key_blocks`: of a head, or pairs.
template <typename Problem>
int32_t heads_of_a_list(const Problem& p, const Tile& tile, bool packed_k, bool pairs, int64_t lists,
                        int64_t key_blocks, int64_t query_blocks, int64_t sm_count) {
  const auto heads_in = [&](int64_t bytes) {
    return heads_in_l2(bytes, p.seqlen_q, p.head_dim, p.head_dim_v, 2, p.heads / p.heads_kv);
  };
  // Of 50 MB: the rest is for k, v and what passes through.
  const int64_t all = packed_k ? lists : lists * p.batch;
  int64_t abreast = std::min(heads_in(32 << 20), heads_abreast(sm_count, all, key_blocks));
  const bool narrow = !packed_k && p.heads == p.heads_kv && is_narrow(p, tile.block_n);
  const bool last_writes = p.deterministic && takes_turns(p, tile);
  if (narrow && (!p.deterministic || last_writes)) {
    // Heads of the same rows are neighbours in memory. Measured with 16 of them: 2 % faster where their rows take 24 MB
    // (256 keys), 3 % slower with 35 MB (1024 keys). At head dimension 64 32 of 29 MB are 3 % faster (1024 keys) where
    // sums that are read are dropped.
    const int64_t bytes = (last_writes && tile.head_dim == 64 ? 30 : 24) << 20;
    const auto fits = [&](int64_t heads) {
      return heads_in_l2(bytes, rows_at_once(p, heads, tile.block_n, sm_count), p.head_dim, p.head_dim_v, 2, 1) >=
             heads;
    };
    for (int64_t heads = abreast + 1; heads <= std::min(all, sm_count); ++heads) {
      if (all % heads == 0 && fits(heads)) abreast = heads;
    }
    return static_cast<int32_t>(abreast);
  }
  const bool stays_in_l2 = last_writes && tile.head_dim == 64;  // 3 to 4 % at S = 512 and 1024; at 128 nothing
  if (from_last_key(p) && !packed_k && !stays_in_l2 && (query_blocks <= 32 || p.head_dim > 128)) {
    // Long jobs of a list are in work with short ones of the next, and a key block comes to a tile long after the first
    // one: shorter lists stay in L2. Measured at S = 512 to 2048 with head dimensions 64, 128 and 256, at 4096 with
    // 256; at 128 longer sequences lose by it, and at 2048 a single head.
    const int64_t least = p.head_dim <= 128 ? 2 : 1;
    abreast = std::min(abreast, std::max(heads_in(p.head_dim <= 96 ? 4 << 20 : 2 << 20), least));
    while (all % abreast != 0) --abreast;
  }
  if (!p.deterministic || packed_k || from_last_key(p)) return static_cast<int32_t>(abreast);
  if (const int64_t heads = heads_of_short_walks(p, tile, all, query_blocks, sm_count)) {
    return static_cast<int32_t>(heads);
  }
  // Pairs go through the tiles one behind the other, and need the fewer rows of each head at a time the more of one are
  // neighbours. Measured with groups of 2 to 32 heads at S = 1024 to 16384: eight are 1 to 3 % slower, one is as good.
  if (pairs) return static_cast<int32_t>(std::min<int64_t>(2, all));
  // In turn, key blocks of a head that begin together wait for one another; in longer lists fewer of them do.
  int64_t heads = abreast;
  if (p.window_left < 0 && p.window_right < 0) {
    if (2 * abreast <= heads_in(20 << 20)) heads = 2 * abreast;
  } else if (p.heads != p.heads_kv) {
    heads = 4;  // measured with groups of 8 to 32 heads at S = 1024 to 8192
  } else {
    // The shorter the jobs, the more heads that takes; measured at S = 1024 and 8192. A quarter of the multiprocessors
    // leaves four key blocks of a head to share what is in L2.
    const int64_t steps = std::max<int64_t>(query_blocks / 2, 1);
    heads = std::min(1000 / steps, sm_count / 4);
  }
  return static_cast<int32_t>(std::min(std::max(abreast, heads), all));
}

// Of `all`: where lists go from the last key block on, the last one goes from the first. Above head dimension 128 lists
// are a few jobs, and the last one has heads for all multiprocessors: longest job first, these end together. Measured
// at S = 1024 and 2048; at head dimension 128, with twice the jobs, it loses. Of short walks without a mask it has what
// is left of a whole list as well, or its key blocks would begin together.
template <typename Problem>
int64_t heads_before_last_list(const Problem& p, const Tile& tile, int64_t heads_of_list, int64_t all,
                               int64_t key_blocks, int64_t query_blocks, int64_t sm_count) {
  if (heads_of_short_walks(p, tile, all, query_blocks, sm_count) > 0) return (all / heads_of_list - 1) * heads_of_list;
  if (!from_last_key(p)) return all;
  int64_t last = heads_of_list;
  if (p.head_dim > 128) last = std::max(last, heads_abreast(sm_count, all, key_blocks));
  return std::max<int64_t>(all - last, 0) / heads_of_list * heads_of_list;
}

// Packed: a list has the heads that have no more than so many key blocks in all. In turn, key blocks of a head that
// begin together wait for one another; the more heads come between them the less, as long as all of them stay in L2.
template <typename Problem>
int32_t blocks_of_a_list(const Problem& p, int64_t block_n) {
  if (!p.deterministic || from_last_key(p)) return 0;
  return static_cast<int32_t>(heads_in_l2(20 << 20, block_n, p.head_dim, p.head_dim_v, 2, p.heads / p.heads_kv));
}

// Steps that a head takes, what stands around those of each job included.
inline int64_t steps_of_head(const Visibility& visibility, int64_t key_blocks, int64_t block_m, int64_t block_n) {
  constexpr int64_t kSamples = 64;
  const int64_t samples = std::min(key_blocks, kSamples);
  int64_t steps = kStepsAround * samples;
  for (int64_t i = 0; i < samples; ++i) {
    steps += flashbwd::query_blocks(visibility, static_cast<int32_t>(key_blocks * i / samples),
                                    static_cast<int32_t>(block_m), static_cast<int32_t>(block_n))
                 .size();
  }
  return samples > 0 ? steps * key_blocks / samples : 0;
}

// Multiprocessors that write row statistics beside the kernel, at most.
constexpr int64_t most_statistics_ahead(bool wide, int64_t sm_count) { return sm_count * (wide ? 1 : 2) / 11; }

// Multiprocessors that write row statistics while the others begin with the first jobs (RowsReady). 0: where these need
// most of the rows, or rows are few, all are written first.
template <typename Problem>
int32_t statistics_ahead(const Problem& p, const Visibility& visibility, bool wide, int64_t heads_abreast,
                         int64_t key_blocks, int64_t query_blocks, int64_t block_m, int64_t block_n, int64_t sm_count) {
  constexpr int64_t kFewBytes = 32 << 20;  // of out and dout: about 15 us on all multiprocessors
  const int64_t heads = int64_t{p.batch} * p.heads, row_bytes = 4 * p.head_dim_v;
  if (p.heads != p.heads_kv || p.head_dim_v % 8 != 0) return 0;  // whole vectors
  if (heads * p.seqlen_q * row_bytes < kFewBytes) return 0;
  // Without a mask jobs are equal: clusters that begin late make one more round of them. 9 % at D 256, S 1024.
  if (wide && p.window_left < 0 && p.window_right < 0) return 0;
  if (4 * heads_abreast * rows_at_once(p, heads_abreast, block_n, sm_count) > heads * p.seqlen_q) return 0;
  const int64_t most = most_statistics_ahead(wide, sm_count);
  if (wide || is_narrow(p, block_n)) return static_cast<int32_t>(most);
  // The rows of a query block take one of them about half as long as a step does. Four times what keeps up with the
  // jobs: more of them only keep multiprocessors from the first lists of long sequences.
  const int64_t steps = std::max<int64_t>(steps_of_head(visibility, key_blocks, block_m, block_n), 1);
  const int64_t ahead = 4 * sm_count * query_blocks / (2 * steps);
  return static_cast<int32_t>(std::min(std::max<int64_t>(ahead, 1), most));
}

// All sequences have all rows, and there is no mask: all jobs are of one length.
template <typename Problem>
bool has_equal_jobs(const Problem& p) {
  return !is_packed_or_cut(p) && p.window_left < 0 && p.window_right < 0;
}

// Of grouped heads, whose jobs walk together: multiprocessors that no round of equal jobs needs, if they keep up with
// the jobs. The rows of the first round are written first. In turn, CTAs that begin together would begin behind all of
// them. Measured at S = 2048 to 16384: 0.4 to 3 % faster.
template <typename Problem>
int32_t grouped_statistics_ahead(const Problem& p, const GroupedJobs& grouped, int64_t jobs, int64_t query_blocks,
                                 int64_t sm_count) {
  const bool equal = grouped.pairs || has_equal_jobs(p);
  const int64_t rounds = ceil_div(jobs, sm_count);
  if (p.head_dim_v % 8 != 0 || p.deterministic || !equal || rounds == 1) return 0;
  // In steps: the rows of a query block take half of one.
  const int64_t spare = sm_count - ceil_div(jobs, rounds);
  const int64_t rows_of_round = int64_t{p.batch} * p.heads * query_blocks / (2 * rounds);
  const int64_t job = p.heads / p.heads_kv / grouped.splits * query_blocks;
  return static_cast<int32_t>(rows_of_round <= spare * job ? spare : 0);
}

// SMs that run the overlapped preprocess: they write row statistics while the others begin with the first work tiles.
// 0: all row statistics are written first. `jobs`: work tiles of the call; `heads_abreast`: query heads of a list.
template <typename Problem>
int32_t overlapped_preprocess_ctas(const Problem& p, const Tile& tile, const GroupedJobs& grouped, bool features,
                                   int64_t jobs, int64_t heads_abreast, int64_t key_blocks, int64_t query_blocks,
                                   int64_t sm_count) {
  if (jobs == 0) return 0;
  // Kernels with features of large head dimensions wait for nothing but the launch before them.
  if (is_wide(tile) && features) return 0;
  if (p.heads != p.heads_kv && !is_wide(tile)) {
    return grouped_statistics_ahead(p, grouped, jobs, query_blocks, sm_count);
  }
  const auto length = [](int64_t rows) { return static_cast<int32_t>(rows); };
  const Visibility visibility =
      make_visibility(length(p.seqlen_q), length(p.seqlen_k), p.window_left, p.window_right, p.causal);
  return statistics_ahead(p, visibility, is_wide(tile), heads_abreast, key_blocks, query_blocks, tile.block_m,
                          tile.block_n, sm_count);
}

// Deterministic: whether jobs are dealt in waves (schedule.h), so that key blocks of a head that begin together do not
// wait for one another. They are of one length: all of them without a mask, pairs under a causal one. `ahead`: whether
// row statistics would be written beside the first jobs; CTAs that begin together begin behind all of them.
template <typename Problem>
bool deals_waves(const Problem& p, const Tile& tile, bool pairs, bool ahead, int64_t jobs, int64_t key_blocks,
                 int64_t workers) {
  if (!p.deterministic || p.seqlen_q == 0 || jobs == 0) return false;
  if (pairs) return true;
  if (!has_equal_jobs(p)) return false;
  // In steps. In turn, the last key block of a head waits for those that begin before it. A wave begins with as many
  // query tiles that are not in L2 as it has jobs, of each head of a group, which takes memory about a step.
  const int64_t row_bytes = 4 * p.head_dim_v;  // of out and dout
  const int64_t steps_ahead = int64_t{p.batch} * p.heads * p.seqlen_q * row_bytes / bytes_a_step(tile);
  const int64_t steps_of_waves = ceil_div(jobs, workers) * (p.heads / p.heads_kv);
  return std::min(key_blocks, workers) > steps_of_waves + (ahead ? steps_ahead : 0);
}

struct WideWaves {
  int32_t jobs = 0;  // of a wave, and clusters; 0: no waves
  int32_t heads_of_list = 1;
};

// The same in wide tiles, on up to `workers` clusters, no more than leave the last wave full. It takes tiles for all
// jobs of a ring to come to one `steps_apart` after one another; with more heads in a list they are fewer. Grouped
// heads leave L2. Measured with head dimensions 192 and 256 at S = 1024 to 16384.
//
// Ordinary runs, in lists of `heads_of_list` as they are: nobody waits for anybody, but jobs of a ring are in tiles of
// their own (spreads_jobs).
template <typename Problem>
WideWaves wide_waves(const Problem& p, const Tile& tile, int32_t heads_of_list, int64_t key_blocks,
                     int64_t query_blocks, int64_t workers) {
  constexpr int64_t kShortWalk = 32;
  const int64_t all = int64_t{p.batch} * p.heads, jobs = all * key_blocks;
  if (!has_equal_jobs(p) || p.heads != p.heads_kv || jobs == 0 || query_blocks == 0) return {};
  const int64_t wave = ceil_div(jobs, ceil_div(jobs, workers));
  if (!p.deterministic) return spreads_jobs(tile) ? WideWaves{static_cast<int32_t>(wave), heads_of_list} : WideWaves{};
  if (query_blocks < kShortWalk) return {};
  const int64_t abreast = heads_abreast(workers, all, key_blocks);
  int64_t most = abreast;
  if (query_blocks >= 2 * kShortWalk) {
    most = std::min(all, heads_in_l2(32 << 20, p.seqlen_q, p.head_dim, p.head_dim_v, 2, 1));
  }
  for (int64_t heads = abreast; heads <= most; ++heads) {
    const int64_t ring = std::min(key_blocks, ceil_div(wave, heads));
    if (all % heads == 0 && (ring - 1) * steps_apart(tile) < query_blocks) {
      return {static_cast<int32_t>(wave), static_cast<int32_t>(heads)};
    }
  }
  return {};
}

// Staggered start of default calls, tiles up to head dimension 128, no mask: each work tile begins at a query block of
// its own. Many key blocks of a head that begin together at its first query block all add to the same dq tiles.
// Measured with head dimensions 32 to 128: with 64 key blocks and more it gains up to 2 %, with 32 it loses up to 1 %;
// where all work tiles run at once it gains up to 12 %, where they are two rounds that are nearly full up to 6 %. GQA,
// whose query tiles leave L2, loses that. Not where adds take turns: the turns of a staggered start need every CTA to
// be resident, hence a cooperative launch, which a default call must not ask for (docs/determinism.md).
template <typename Problem>
bool begins_apart(const Problem& p, const Tile& tile, int64_t key_blocks, int64_t workers) {
  constexpr int64_t kManyKeyBlocks = 64;
  if (is_wide(tile) || p.deterministic || !has_equal_jobs(p) || takes_turns(p, tile)) return false;
  if (p.heads != p.heads_kv || p.seqlen_q == 0) return false;
  const int64_t jobs = int64_t{p.batch} * p.heads * key_blocks;
  const bool two_rounds = key_blocks > 2 && jobs <= 2 * workers && 4 * jobs > 7 * workers;
  return jobs <= workers || two_rounds || key_blocks >= kManyKeyBlocks;
}

// Without a mask all jobs are equal, and the last round of them may be for a few multiprocessors only. Then these jobs
// are cut by query blocks; their parts of dk and dv are fp32 sums in the workspace, added up by a launch of their own.
struct LastRound {
  int32_t jobs = 0;   // the last so many key blocks, as many of each head of the last list
  int32_t parts = 1;  // of each
};

template <typename Problem>
LastRound last_round(const Problem& p, const Tile& tile, int64_t heads_of_list, int64_t key_blocks,
                     int64_t query_blocks, int64_t sm_count) {
  const int64_t heads = int64_t{p.batch} * p.heads, jobs = heads * key_blocks;
  const bool full = p.window_left < 0 && p.window_right < 0 && p.heads == p.heads_kv;
  if (!full || jobs <= sm_count || heads_of_list > p.heads || heads % heads_of_list != 0) return {};
  const bool ahead =
      statistics_ahead(p, make_visibility(p.seqlen_q, p.seqlen_k, -1, -1, p.causal), false, heads_of_list, key_blocks,
                       query_blocks, tile.block_m, tile.block_n, sm_count) > 0 &&
      !deals_waves(p, tile, false, true, jobs, key_blocks, sm_count);
  // Multiprocessors that write row statistics meanwhile, half a step for those of a query block, take fewer jobs.
  const int64_t missed = ahead ? heads * query_blocks / (2 * (query_blocks + kStepsAround)) : 0;
  const int64_t cut = round_up((jobs + missed) % sm_count, heads_of_list);
  if (cut == 0 || cut > heads_of_list * key_blocks) return {};
  LastRound best;
  int64_t least = (query_blocks + kStepsAround) * 9 / 10;
  for (int64_t parts = 2; parts <= std::min<int64_t>(query_blocks, 32); ++parts) {
    const int64_t bytes = 2 * 4 * parts * cut * 128 * (p.head_dim + p.head_dim_v);
    const int64_t steps = ceil_div(cut * parts, sm_count) * (ceil_div(query_blocks, parts) + kStepsAround) +
                          kStepsAround + bytes / bytes_a_step(tile);
    if (steps >= least) continue;
    least = steps;
    best = {static_cast<int32_t>(cut), static_cast<int32_t>(parts)};
  }
  return best;
}

// Multiprocessors (or clusters) that the kernel leaves to the conversion of dq (Conversion), which keeps up with it on
// them. 64 rows take one of them about half as long as a step does, of narrow windows, row by row, two thirds. Measured
// with head dimensions 128 and 256.
template <typename Problem>
int64_t left_to_conversion(const Problem& p, const Visibility& visibility, int64_t jobs, int64_t key_blocks,
                           int64_t query_blocks, int64_t block_m, int64_t block_n, int64_t sm_count) {
  constexpr int64_t kFewRounds = 4;
  // Grouped heads are few and long jobs, cut for all multiprocessors. Steps of more queries are of small head
  // dimensions. In turn, fewer at work take longer than conversion does behind them.
  if (p.heads != p.heads_kv || block_m > 64 || p.deterministic || jobs < kFewRounds * sm_count) return 0;
  const int64_t steps = steps_of_head(visibility, key_blocks, block_m, block_n);
  const int64_t sixths = is_narrow(p, block_n) ? 4 : 3;
  const int64_t left = std::min(sm_count * query_blocks * sixths / (6 * steps), sm_count / 8);
  // Without a mask jobs are equal, and come to whole rounds.
  const bool equal = p.window_left < 0 && p.window_right < 0;
  return equal ? std::min(left, sm_count - ceil_div(jobs, ceil_div(jobs, sm_count))) : left;
}

}  // namespace flashbwd::sm90

// How the work of grouped heads is cut into jobs. One job a key block of a KV head, with all its query heads, leaves
// few and long ones: at 32 query heads on 1 KV head, 2 sequences of 8192 are 128 jobs for 132 multiprocessors, under a
// causal mask the longest 64 times the shortest. Host arithmetic.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../schedule.h"
#include "config.h"

namespace flashbwd::sm90 {

struct GroupedJobs {
  // Jobs that share the query heads of a KV head. More than one: dk and dv are fp32 partial sums in the workspace,
  // added up by a launch of their own.
  int32_t splits = 1;
  // Causal: a job is key block n from the end, then key block n from the start. All are of one length, and all of a
  // head meet in the same query blocks: the first part from the last query block down, the second from its diagonal up.
  bool pairs = false;
  bool heads_apart = false;  // of pairs in waves (schedule.h)
};

struct GroupedSizes {
  int64_t batch = 0, heads = 0, heads_kv = 0, head_dim = 0, head_dim_v = 0;
  int64_t seqlen_k = 0;
  int64_t block_n = 0;
  int64_t longest = 0;                  // query blocks that the key block of the most sees
  bool causal = false;                  // the others see fewer, in equal steps
  int64_t unpaired_rounds = INT32_MAX;  // key blocks that make so many rounds are no pairs
  bool may_split = false;
};

// Of an AttentionProblem or AttentionBackwardParams. `in_turn`: whether adds take turns where the last one writes dq.
template <typename Problem>
GroupedSizes grouped_sizes(const Problem& p, bool varlen, bool in_turn, const Tile& tile) {
  const int64_t block_m = tile.block_m, block_n = tile.block_n;
  GroupedSizes s;
  s.batch = p.batch;
  s.heads = p.heads;
  s.heads_kv = p.heads_kv;
  s.head_dim = p.head_dim;
  s.head_dim_v = p.head_dim_v;
  s.seqlen_k = p.seqlen_k;
  s.block_n = block_n;
  s.longest = ceil_div(p.seqlen_q, block_m);
  if (p.window_left >= 0 && p.window_right >= 0) {
    s.longest = std::min(s.longest, ceil_div(int64_t{p.window_left} + p.window_right + block_n, block_m) + 1);
  }
  s.causal = p.window_left < 0 && p.window_right >= 0;
  s.may_split = !varlen;
  // Of short walks many key blocks do better than pairs. Measured at S = 256 to 2048: 1.07 to 1.2 times as fast in
  // eight rounds, where adds take turns (four query heads) 1.02 to 1.3 times; in two rounds 0.84 to 0.93 times, at head
  // dimension 64 1.03.
  const int64_t group = p.heads / p.heads_kv;
  const bool short_walk = group * p.seqlen_q <= (in_turn && group <= 4 ? 8192 : 4096);
  if (short_walk) s.unpaired_rounds = tile.head_dim == 64 ? 0 : 4;
  if (varlen) s.unpaired_rounds = 0;
  return s;
}

// Elements of one split's sums, dk and dv together.
constexpr int64_t partial_elements(const GroupedSizes& s) {
  return s.batch * s.heads_kv * s.seqlen_k * (round_up(s.head_dim, 4) + round_up(s.head_dim_v, 4));
}

// What takes least, counted in steps of one multiprocessor, of which each takes about 2.2 us on an H100; memory gives
// about 6.6 MB in that time.
inline GroupedJobs grouped_jobs(const GroupedSizes& s, int64_t sm_count) {
  constexpr int64_t kBytesAStep = 6'600'000;
  const int64_t group = s.heads / s.heads_kv;
  if (group == 1 || s.seqlen_k == 0) return {};
  const int64_t key_blocks = ceil_div(s.seqlen_k, s.block_n);
  GroupedJobs best;
  int64_t least = INT64_MAX;
  for (int32_t splits = 1; splits <= (s.may_split ? 8 : 1) && group % splits == 0; splits *= 2) {
    const int64_t lists = s.batch * s.heads_kv * splits;
    const int64_t longest = s.longest * (group / splits);
    // Written once, read once.
    const int64_t sums = splits == 1 ? 0 : 2 * 4 * splits * partial_elements(s) / kBytesAStep;
    const auto consider = [&](int64_t steps, bool pairs) {
      if (steps + sums >= least) return;
      least = steps + sums;
      best = {splits, pairs};
    };
    if (!s.causal) {
      consider(ceil_div(lists * key_blocks, sm_count) * longest, false);
      continue;
    }
    // Longest first in lists that stay in L2: the end of the last list is ragged, in simulations by 0.6 of the longest.
    const int64_t mean = ceil_div(lists * key_blocks * (longest + longest / key_blocks) / 2, sm_count);
    consider(std::max(longest, mean + longest * 6 / 10), false);
    if (lists * key_blocks < s.unpaired_rounds * sm_count) {
      consider(ceil_div(lists * ceil_div(key_blocks, 2), sm_count) * (longest + longest / key_blocks), true);
    }
  }
  return best;
}

}  // namespace flashbwd::sm90

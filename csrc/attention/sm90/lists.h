// Which jobs are in work at the same time: how many heads make a list, and how the last jobs are cut where they would
// leave multiprocessors idle. Host arithmetic.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../schedule.h"

namespace flashbwd::sm90 {

// Deterministic: whether jobs of a list go through the key blocks from the last one (ordered_turn_from_last).
// Here and below: of an AttentionProblem or AttentionBackwardParams.
template <typename Problem>
bool from_last_key(const Problem& p) {
  const bool causal = p.window_left < 0 && p.window_right >= 0;
  return p.deterministic && causal && p.heads == p.heads_kv;
}

// A window's jobs need few rows of a head. Whether those of all heads of a sequence, with their sums of dq, stay in L2
// while `heads` have jobs at the same time.
template <typename Problem>
bool window_fits_in_l2(const Problem& p, int64_t heads, int64_t key_blocks, int64_t sm_count) {
  if (p.window_left < 0 || p.window_right < 0 || heads == 0 || key_blocks == 0) return false;
  const int64_t block_n = ceil_div(p.seqlen_k, key_blocks);
  const int64_t on_their_way = (ceil_div(sm_count, heads) + 1) * block_n;  // keys of a head
  const int64_t rows = std::min<int64_t>(p.seqlen_q, int64_t{p.window_left} + p.window_right + on_their_way);
  return heads_in_l2(24 << 20, rows, p.head_dim, p.head_dim_v, 2, 1) >= heads;
}

// Heads whose jobs are one list (dense_job). `lists`: KV heads times their splits.
template <typename Problem>
int32_t heads_of_a_list(const Problem& p, bool packed_k, int64_t lists, int64_t key_blocks, int64_t query_blocks,
                        int64_t sm_count) {
  const auto heads_in = [&](int64_t bytes) {
    return heads_in_l2(bytes, p.seqlen_q, p.head_dim, p.head_dim_v, 2, p.heads / p.heads_kv);
  };
  // Of 50 MB: the rest is for k, v and what passes through.
  const int64_t all = packed_k ? lists : lists * p.batch;
  int64_t abreast = std::min(heads_in(32 << 20), heads_abreast(sm_count, all, key_blocks));
  // All heads of a sequence abreast: their rows are neighbours in memory. 2 % faster at 256 keys and 16 heads, whose
  // rows take 24 MB; 3 % slower at 1024 keys, 35 MB.
  if (!p.deterministic && !packed_k && p.heads == p.heads_kv && p.heads <= sm_count &&
      window_fits_in_l2(p, p.heads, key_blocks, sm_count)) {
    abreast = std::max<int64_t>(abreast, p.heads);
  }
  if (!p.deterministic || packed_k || from_last_key(p)) return static_cast<int32_t>(abreast);
  // In turn, key blocks of a head that begin together wait for one another; in longer lists fewer of them do.
  int64_t heads = abreast;
  if (p.window_left < 0 && p.window_right < 0) {
    heads = std::min(2 * abreast, heads_in(20 << 20));
  } else if (p.heads != p.heads_kv) {
    heads = (query_blocks >= 64 ? 4 : 2) * abreast;  // measured at S = 1024 and 8192
  } else {
    // The shorter the jobs, the more heads that takes; measured at S = 1024 and 8192. A quarter of the multiprocessors
    // leaves four key blocks of a head to share what is in L2.
    const int64_t steps = std::max<int64_t>(query_blocks / 2, 1);
    heads = std::min(1000 / steps, sm_count / 4);
  }
  return static_cast<int32_t>(std::min(std::max(abreast, heads), all));
}

// Without a mask all jobs are equal, and the last round of them may be for a few multiprocessors only. Then these jobs
// are cut by query blocks; their parts of dk and dv are fp32 sums in the workspace, added up by a launch of their own.
struct LastRound {
  int32_t jobs = 0;   // the last so many key blocks, as many of each head of the last list
  int32_t parts = 1;  // of each
};

template <typename Problem>
LastRound last_round(const Problem& p, int64_t heads_of_list, int64_t key_blocks, int64_t query_blocks,
                     int64_t sm_count) {
  constexpr int64_t kStepsAround = 3;         // of a job, beside its own
  constexpr int64_t kBytesAStep = 6'600'000;  // memory moves while a multiprocessor takes a step
  const int64_t heads = p.batch * p.heads, jobs = heads * key_blocks;
  const bool full = p.window_left < 0 && p.window_right < 0 && p.heads == p.heads_kv;
  if (!full || jobs <= sm_count || heads_of_list > p.heads || heads % heads_of_list != 0) return {};
  const int64_t cut = round_up(jobs % sm_count, heads_of_list);
  if (cut == 0 || cut > heads_of_list * key_blocks) return {};
  LastRound best;
  int64_t least = (query_blocks + kStepsAround) * 9 / 10;
  for (int64_t parts = 2; parts <= std::min<int64_t>(query_blocks, 32); ++parts) {
    const int64_t bytes = 2 * 4 * parts * cut * 128 * (p.head_dim + p.head_dim_v);
    const int64_t steps = ceil_div(cut * parts, sm_count) * (ceil_div(query_blocks, parts) + kStepsAround) +
                          kStepsAround + bytes / kBytesAStep;
    if (steps >= least) continue;
    least = steps;
    best = {static_cast<int32_t>(cut), static_cast<int32_t>(parts)};
  }
  return best;
}

}  // namespace flashbwd::sm90

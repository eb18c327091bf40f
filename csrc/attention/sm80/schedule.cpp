#include "schedule.h"

#include <algorithm>

#include "../index/query_loop.h"
#include "../index/tile_order.h"
#include "../index/visibility.h"
#include "../problem.h"
#include "layout.h"

namespace flashbwd::sm80 {
namespace {

Visibility visibility_of(const AttentionProblem& p) {
  return make_visibility(static_cast<int32_t>(p.seqlen_q), static_cast<int32_t>(p.seqlen_k), p.window_left,
                         p.window_right, p.causal);
}

bool is_dense(const AttentionProblem& p) { return !p.varlen && !p.has_seqused; }

bool has_features(const AttentionProblem& p) { return p.has_bias || p.has_block_mask || !has_only_bias(p); }

// Whether work tiles follow cu_seqlens_k. A bias gradient is as wide as the longest sequence, so with one, every
// sequence gets work tiles for the longest length.
bool packed_work_tiles(const AttentionProblem& p) { return p.varlen && !p.need_dbias; }

// Chooses the work tiles to split. Without a mask all take equally long, and only the last wave is split. With a mask
// they run longest first (LPT), and all are split if there are few. Packed sequences are not split (the host does not
// know their lengths), nor are bias gradients (their layout allows one CTA per key block), nor the lists of a block
// mask.
SplitTiles choose_split_tiles(const AttentionProblem& p, const Tile& tile, int64_t sm_count) {
  if (p.varlen || p.need_dbias || p.has_block_mask || p.seqlen_k == 0) return {};
  const Visibility visibility = visibility_of(p);
  const auto iterations = [&](int64_t key_block) {
    return query_blocks(visibility, static_cast<int32_t>(key_block), tile.block_m, tile.block_n).size() *
           (p.heads / p.heads_kv);
  };
  const int64_t num_work_tiles = count_work_tiles(p, tile), wave = at_least(sm_count, 1);
  const int64_t count = visibility.full() ? num_work_tiles % wave : num_work_tiles;
  if (count == 0) return {};
  // Over the key blocks, the number of iterations first rises, then stays constant, then falls. Any of the three phases
  // may be missing.
  const int64_t last = ceil_div(p.seqlen_k, tile.block_n) - 1, middle = iterations(last / 2);
  const int64_t longest = at_least(at_least(iterations(0), iterations(last)), middle);
  const int32_t splits = split_count(count, middle, longest, wave);
  if (splits == 1) return {};
  return {count, splits};
}

// Whether the first key block of a query tile stores dq, so that dq need not be zeroed. The other key blocks check for
// it, which costs up to 5 % of each iteration, so it pays only for few key blocks. With a mask, all the first key
// blocks of a head would reach a tile at the same time.
bool first_stores(const AttentionProblem& p, const Tile& tile) {
  if (!has_first_stores(tile) || !is_dense(p) || has_features(p)) return false;
  return visibility_of(p).full() && !p.deterministic && ceil_div(p.seqlen_k, tile.block_n) <= 10;
}

// Whether each CTA processes all key blocks of a KV head in order. It then accumulates dq itself: no zeros, no atomics,
// no postprocess. This pays if dq, q and dout of the active heads nearly fit in L2 and few key blocks read them, and if
// the heads fill whole waves. Every query tile must see a key, because its last key block writes dq.
bool whole_heads(const AttentionProblem& p, const Tile& tile, int64_t sm_count, int64_t l2_bytes) {
  if (!has_whole_heads(tile) || !is_dense(p) || has_features(p)) return false;
  const int64_t heads = p.batch * p.heads_kv, wave = at_least(sm_count, 1);
  if (ceil_div(heads, wave) * wave * 10 > heads * 11) return false;
  const int64_t rows = p.heads / p.heads_kv * p.seqlen_q;
  const int64_t bytes = dq_tiles_floats(p, tile) * 4 + rows * (p.head_dim + p.head_dim_v) * 2;
  if (wave * bytes * 2 > l2_bytes * 3) return false;
  const Visibility visibility = visibility_of(p);
  const int64_t tiles = ceil_div(p.seqlen_q, tile.block_m);
  int64_t visits = 0;
  for (int32_t m = 0; m < tiles; ++m) {
    const int64_t seen = key_blocks(visibility, m, tile.block_m, tile.block_n).size();
    if (seen == 0) return false;
    visits += seen;
  }
  return tiles > 0 && visits <= 5 * tiles;
}

// Whether heads that share a bias add to its gradient in a fixed order: no zeros and no second kernel are needed. Each
// head starts a fraction of an iteration after the previous one, so sequences must be long. False for deterministic
// calls: if the launch finds rows without 16-byte alignment, it adds in any order instead.
bool ordered_bias_gradient(const AttentionProblem& p, const Tile& tile) {
  if (!p.need_dbias || !has_shared_bias_kernel(tile)) return false;
  if (!(p.bias_broadcast_batch || p.bias_broadcast_head) || p.bias_broadcast_row || p.bias_broadcast_col) return false;
  if (!is_dense(p) || p.deterministic || !has_only_bias(p)) return false;
  return 2 * bias_sharers(p) <= ceil_div(p.seqlen_q, tile.block_m);
}

// KV heads per head swizzle group. Within a group, key blocks run in LPT order. A group has as many heads as fit in L2,
// but at least enough for two waves: in shorter groups the long work tiles would run alone at the end of each group.
int64_t heads_per_swizzle(const AttentionProblem& p, const Schedule& schedule) {
  constexpr int64_t kL2Bytes = 24 << 20;  // of an A100's 40 MB; a small L2 holds few heads in any order
  if (schedule.whole_heads) return 1;
  const int64_t key_blocks = std::max(schedule.key_blocks, 1);
  // With first_stores all work tiles take equally long, so a group needs only as many heads as run at the same time.
  if (schedule.first_stores) return at_least(schedule.num_ctas / key_blocks, 1);
  const int64_t all = p.batch * p.heads_kv;
  const int64_t in_l2 =
      heads_in_l2(kL2Bytes, p.seqlen_q, p.head_dim, p.head_dim_v, size_of(p.dtype), p.heads / p.heads_kv);
  const int64_t two_waves = 2 * schedule.num_ctas / key_blocks;
  if (two_waves <= in_l2 || two_waves >= all) return std::min(std::max(in_l2, two_waves), all);
  // Prefer slightly smaller groups of equal size to a short last group.
  for (int64_t heads = two_waves; heads > two_waves * 3 / 4 && heads > in_l2; --heads) {
    if (all % heads == 0) return heads;
  }
  return two_waves;
}

}  // namespace

int64_t count_work_tiles(const AttentionProblem& p, const Tile& tile) {
  if (packed_work_tiles(p)) return varlen_work_tiles(p.total_k, p.batch, p.heads_kv, tile.block_n);
  return p.batch * p.heads_kv * ceil_div(p.seqlen_k, tile.block_n);
}

Schedule choose_schedule(const AttentionProblem& p, const Tile& tile, const DeviceInfo& device) {
  Schedule s;
  s.whole_heads = whole_heads(p, tile, device.sm_count, device.l2_bytes);
  s.first_stores = first_stores(p, tile);
  s.ordered_dq = p.deterministic && !s.whole_heads;
  s.ordered_bias_gradient = ordered_bias_gradient(p, tile);
  s.loads_ahead =
      has_loads_ahead(tile) && tile.shared_bytes() + kAlignmentBytes + keys_bytes(tile) <= device.smem_per_block;
  s.packed_work_tiles = packed_work_tiles(p);
  s.key_blocks = static_cast<int32_t>(ceil_div(p.seqlen_k, tile.block_n));
  s.query_blocks = static_cast<int32_t>(ceil_div(p.seqlen_q, tile.block_m));
  if (!s.whole_heads) s.split_tiles = choose_split_tiles(p, tile, device.sm_count);
  s.unsplit_work_tiles = count_work_tiles(p, tile) - s.split_tiles.count;
  // One CTA per SM, because of its shared memory and registers.
  const int64_t most_ctas = s.whole_heads ? p.batch * p.heads_kv : s.num_work_tiles();
  s.num_ctas = static_cast<int32_t>(at_most(most_ctas, at_least(device.sm_count, 1)));
  s.swizzle_heads = static_cast<int32_t>(heads_per_swizzle(p, s));
  return s;
}

}  // namespace flashbwd::sm80

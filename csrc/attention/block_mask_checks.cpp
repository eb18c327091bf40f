#include "block_mask_checks.h"

#include <cstdint>
#include <limits>
#include <utility>

#include "../common/check.h"
#include "index/arithmetic.h"
#include "tensor_checks.h"

namespace flashbwd {
namespace {

using Named = std::pair<const char*, const TensorDesc*>;

constexpr int64_t kMostEntries = std::numeric_limits<int32_t>::max();

// Checks the shapes of the lists for their tile.
void check_block_lists(const AttentionArguments& a, const AttentionProblem& p) {
  if (a.plan_only && a.block_m == 0 && a.block_n == 0) return;
  if (a.block_m <= 0 || a.block_n <= 0 || a.block_m % 32 != 0 || a.block_n % 16 != 0) {
    refuse("block_tile is ", a.block_m, " queries and ", a.block_n, " keys, expected multiples of 32 and 16");
  }
  const TensorDesc& lists = a.block_lists;
  const int64_t key_blocks = ceil_div(p.seqlen_k, a.block_n), words = a.block_m * a.block_n / 32;
  if (lists.dim != 4 || (lists.sizes[0] != 1 && lists.sizes[0] != p.batch) ||
      (lists.sizes[1] != 1 && lists.sizes[1] != p.heads_kv) || lists.sizes[2] != key_blocks || lists.sizes[3] != 4) {
    refuse("block_lists has shape ", shape_of(lists), ", expected (", p.batch, " or 1, ", p.heads_kv, " or 1, ",
           key_blocks, ", 4) for tiles of ", a.block_n, " keys");
  }
  if (a.block_entries.dim != 2 || a.block_entries.sizes[1] != 4 || a.block_entries.sizes[0] > kMostEntries) {
    refuse("block_entries has shape ", shape_of(a.block_entries), ", expected (entries, 4) with at most ", kMostEntries,
           " entries");
  }
  if (a.block_bits.dim != 2 || a.block_bits.sizes[1] != words) {
    refuse("block_bits has shape ", shape_of(a.block_bits), ", expected (tiles, ", words, ") for tiles of ", a.block_m,
           " queries and ", a.block_n, " keys");
  }
}

}  // namespace

void check_block_mask(const AttentionArguments& a, AttentionProblem* p) {
  if (!a.block_lists) return;
  for (const auto& [name, tensor] :
       {Named{"block_lists", &a.block_lists}, {"block_entries", &a.block_entries}, {"block_bits", &a.block_bits}}) {
    check_dtype(name, *tensor, DType::kInt32, "");
    check_device(name, *tensor, p->device);
    check(is_contiguous(*tensor), name, " has gaps between its elements, expected a contiguous tensor");
    check(reinterpret_cast<uintptr_t>(tensor->data) % 16 == 0, name,
          " starts at an address that is no multiple of 16 bytes, expected an aligned one");
  }
  check_block_lists(a, *p);
  check(!p->varlen && !p->has_seqused, "block_lists came with cu_seqlens or seqused, expected dense sequences");
  check(p->window_left < 0 && p->window_right < 0,
        "block_lists came with a causal mask or a window, expected a block mask that holds them");
  check(!a.sink, "block_lists came with a sink, expected none");
  check(!a.key_mask, "block_lists came with key_mask, expected a block mask that holds it");
  p->has_block_mask = true;
  p->has_score_mod = a.has_score_mod;
  p->block_mask_covers = a.block_mask_covers;
  p->block_m = a.block_m;
  p->block_n = a.block_n;
  const auto& sizes = a.block_lists.sizes;
  const int64_t lists = sizes[0] * sizes[1] * sizes[2] * (p->heads / at_least(p->heads_kv, 1));  // one per query head
  p->block_mask_queries_seen = lists > 0 ? ceil_div(a.block_entries.sizes[0] * a.block_m, lists) : 0;
}

std::string refuse_block_tile(const AttentionProblem& p, int64_t block_m, int64_t block_n) {
  const auto is = [](int64_t given, int64_t expected) { return given == 0 || given == expected; };
  if (!p.has_block_mask || (is(p.block_m, block_m) && is(p.block_n, block_n))) return "";
  const auto words = [](int64_t m, int64_t n) {
    return std::to_string(m) + " queries and " + std::to_string(n) + " keys";
  };
  return "the block mask has tiles of " + words(p.block_m, p.block_n) + ", expected " + words(block_m, block_n);
}

}  // namespace flashbwd

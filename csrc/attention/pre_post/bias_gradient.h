// The gradient of attn_bias: what the main kernel writes, and how a second kernel reduces it to the bias's shape.
#pragma once

#include <cstdint>

#include "../index/bias_blocks.h"
#include "../index/visibility.h"
#include "../params.h"

namespace flashbwd {

enum class BiasGradientMode : int32_t {
  kNone,
  kStore,    // one CTA stores each element of (batch, heads, seqlen_q, seqlen_k)
  kAdd,      // CTAs add to elements that start at zero: the bias is broadcast over batch or heads
  kKeySums,  // adds to sums over queries, (batch, heads, slots, seqlen_k), zero at the start; one slot per warp that
             // shares keys
  kRowSums,  // stores sums over keys, (batch, heads, slots, seqlen_q), zero at the start; one slot per group of keys of
             // a warp
  kAddBlocks,  // as kAdd, 16-byte vectors to the blocks of ../index/bias_blocks.h
};

struct BiasGradient {
  BiasGradientMode mode = BiasGradientMode::kNone;
  DType dtype = DType::kFloat32;
  void* data = nullptr;
  // kAddBlocks: row_stride and col_stride are those of blocks of queries and keys.
  int64_t batch_stride = 0, head_stride = 0, slot_stride = 0, row_stride = 0, col_stride = 0;
};

// What the plan chooses: the mode, and the number of scratch elements (0 if the main kernel writes dbias itself).
struct BiasGradientScratch {
  BiasGradientMode mode = BiasGradientMode::kNone;
  int64_t slots = 1;
  int64_t elements = 0;
  bool zeroed = false;

  int64_t bytes() const { return elements * static_cast<int64_t>(sizeof(float)); }
};

// Which dimensions of the bias are broadcast. Below, warps_s and key_groups are the slots of kKeySums and kRowSums.
struct BiasBroadcast {
  bool batch = false, head = false, row = false, col = false;
};

inline BiasGradientScratch bias_gradient_scratch(const BiasBroadcast& broadcast, bool deterministic, int64_t batch,
                                                 int64_t heads, int64_t seqlen_q, int64_t seqlen_k, int64_t warps_s,
                                                 int64_t key_groups) {
  BiasGradientScratch scratch;
  if (broadcast.row) {
    scratch.mode = BiasGradientMode::kKeySums;
    scratch.slots = warps_s;
    scratch.elements = batch * heads * warps_s * seqlen_k;
    scratch.zeroed = true;
    return scratch;
  }
  if (broadcast.col) {
    scratch.mode = BiasGradientMode::kRowSums;
    scratch.slots = key_groups;
    scratch.elements = batch * heads * key_groups * seqlen_q;
    scratch.zeroed = true;
    return scratch;
  }
  if (!broadcast.batch && !broadcast.head) {
    scratch.mode = BiasGradientMode::kStore;
    return scratch;
  }
  // Deterministic: one plane per (batch, head), summed later. Otherwise heads that share an element add to the same
  // plane.
  scratch.mode = deterministic ? BiasGradientMode::kStore : BiasGradientMode::kAdd;
  const int64_t planes = deterministic ? batch * heads : (broadcast.batch ? 1 : batch) * (broadcast.head ? 1 : heads);
  scratch.elements = planes * seqlen_q * seqlen_k;
  scratch.zeroed = !deterministic;
  return scratch;
}

// TMA requires that rows start at multiples of 16 bytes: 8 elements of 16 bits.
constexpr int64_t kTiledColumns = 8;

// The same for a kernel that stores tiles of a 16-bit dbias with TMA. If heads or batch entries share the bias, or if
// its rows are not aligned, the kernel adds to blocks of fp32 sums instead.
inline BiasGradientScratch tiled_bias_gradient_scratch(const BiasBroadcast& broadcast, int64_t batch, int64_t heads,
                                                       int64_t seqlen_q, int64_t seqlen_k) {
  BiasGradientScratch scratch;
  scratch.mode = BiasGradientMode::kStore;
  if (!broadcast.batch && !broadcast.head && seqlen_k % kTiledColumns == 0) return scratch;
  scratch.mode = BiasGradientMode::kAddBlocks;
  scratch.zeroed = true;
  scratch.elements =
      (broadcast.batch ? 1 : batch) * (broadcast.head ? 1 : heads) * bias_plane_elements(seqlen_q, seqlen_k);
  return scratch;
}

// A dimension of size 1 has stride 0 in the view, but is not broadcast.
inline BiasBroadcast broadcast_of(const AttentionBackwardParams& p) {
  return {p.dbias.batch_stride == 0 && p.batch != 1, p.dbias.head_stride == 0 && p.heads != 1,
          p.dbias.row_stride == 0 && p.seqlen_q != 1, p.dbias.col_stride == 0 && p.seqlen_k != 1};
}

// True if every row of a BiasView or BiasGradient consists of whole aligned vectors of `elements` elements. A broadcast
// dimension has stride 0.
template <typename View>
bool has_vector_rows(const View& view, int64_t elements) {
  return view.col_stride == 1 && reinterpret_cast<uintptr_t>(view.data) % (elements * size_of(view.dtype)) == 0 &&
         view.batch_stride % elements == 0 && view.head_stride % elements == 0 && view.row_stride % elements == 0;
}

// Where the main kernel writes the gradient of the bias: dbias itself, or scratch at `storage`.
BiasGradient bias_gradient(const AttentionBackwardParams& params, const BiasGradientScratch& scratch, void* storage);

// Runs before a main kernel that stores only the (block_m, block_n) tiles with a visible element: zeroes the other
// tiles. Returns null or a message.
const char* launch_zero_bias_gradient(const AttentionBackwardParams& params, const BiasGradient& gradient,
                                      int32_t block_m, int32_t block_n, void* stream);

// The same for BiasGradientMode::kAddBlocks: converts the sums to dbias. Called by launch_reduce_bias_gradient.
const char* launch_convert_bias_blocks(const AttentionBackwardParams& params, const BiasGradient& sums, void* stream);

// Runs after the main kernel: reduces `source` to dbias, unless `source` is dbias. Returns null or a message.
const char* launch_reduce_bias_gradient(const AttentionBackwardParams& params, const BiasGradient& source,
                                        const BiasGradientScratch& scratch, void* stream);

}  // namespace flashbwd

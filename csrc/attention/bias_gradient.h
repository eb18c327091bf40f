// The gradient of attn_bias: what the main kernel writes, and how that becomes a tensor of the bias's own shape.
#pragma once

#include <cstdint>

#include "params.h"
#include "schedule.h"

namespace flashbwd {

enum class BiasGradientMode : int32_t {
  kNone,
  kStore,    // every element of (batch, heads, seqlen_q, seqlen_k) is stored by the one CTA that has it
  kAdd,      // likewise added, into zeros: the bias is broadcast over batch or heads
  kKeySums,  // summed over queries: a slot for each warp that shares a key, (batch, heads, slots, seqlen_k), into zeros
  kRowSums,  // summed over keys: a slot for each group of keys of a warp, (batch, heads, slots, seqlen_q), into zeros
};

struct BiasGradient {
  BiasGradientMode mode = BiasGradientMode::kNone;
  DType dtype = DType::kFloat32;
  void* data = nullptr;
  int64_t batch_stride = 0, head_stride = 0, slot_stride = 0, row_stride = 0, col_stride = 0;
};

// What a plan needs to know: the mode, and the fp32 numbers in scratch that come to it (0 where dbias itself is
// written).
struct BiasGradientScratch {
  BiasGradientMode mode = BiasGradientMode::kNone;
  int64_t slots = 1;
  int64_t elements = 0;
  bool zeroed = false;
  // Above 0: in 16 bit, as the copy engine stores it, in tiles of these sizes: those that have a visible element.
  // 0: fp32, all of it.
  int32_t block_m = 0, block_n = 0;

  bool in_tiles() const { return block_m > 0; }
  int64_t bytes(DType dtype) const { return elements * (in_tiles() ? size_of(dtype) : sizeof(float)); }
};

// `bias` says which dimensions are broadcast; warps_s and key_groups: slots of the two sums.
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
  // In order: a slot for each (batch, head). In any order: one for all that share an element.
  scratch.mode = deterministic ? BiasGradientMode::kStore : BiasGradientMode::kAdd;
  const int64_t planes = deterministic ? batch * heads : (broadcast.batch ? 1 : batch) * (broadcast.head ? 1 : heads);
  scratch.elements = planes * seqlen_q * seqlen_k;
  scratch.zeroed = !deterministic;
  return scratch;
}

// Rows of a plane that the copy engine stores begin on 16 bytes.
constexpr int64_t kTiledColumns = 8;

// The same for a kernel whose copy engine stores tiles of a dense 16-bit gradient: into dbias where it can, else a
// plane for each (batch, head).
inline BiasGradientScratch tiled_bias_gradient_scratch(const BiasBroadcast& broadcast, int64_t batch, int64_t heads,
                                                       int64_t seqlen_q, int64_t seqlen_k, int32_t block_m,
                                                       int32_t block_n) {
  BiasGradientScratch scratch;
  scratch.mode = BiasGradientMode::kStore;
  scratch.block_m = block_m;
  scratch.block_n = block_n;
  if (broadcast.batch || broadcast.head || seqlen_k % kTiledColumns != 0) {
    scratch.elements = batch * heads * seqlen_q * round_up(seqlen_k, kTiledColumns);
  }
  return scratch;
}

// A dimension of size 1 has stride 0 in a view.
inline BiasBroadcast broadcast_of(const AttentionBackwardParams& p) {
  return {p.dbias.batch_stride == 0 && p.batch != 1, p.dbias.head_stride == 0 && p.heads != 1,
          p.dbias.row_stride == 0 && p.seqlen_q != 1, p.dbias.col_stride == 0 && p.seqlen_k != 1};
}

// Where the main kernel puts the gradient of the bias: dbias itself, or fp32 numbers at `storage`.
BiasGradient bias_gradient(const AttentionBackwardParams& params, const BiasGradientScratch& scratch, void* storage);

// Before a main kernel that stores those tiles of (block_m, block_n) that have a visible element: zeros in the others.
// Returns null or a message.
const char* launch_zero_bias_gradient(const AttentionBackwardParams& params, const BiasGradient& gradient,
                                      const BiasGradientScratch& scratch, int32_t block_m, int32_t block_n,
                                      void* stream);

// After the main kernel: dbias from what lies at `source`, unless that is dbias. Returns null or a message.
const char* launch_reduce_bias_gradient(const AttentionBackwardParams& params, const BiasGradient& source,
                                        const BiasGradientScratch& scratch, void* stream);

}  // namespace flashbwd

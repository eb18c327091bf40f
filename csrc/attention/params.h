// The arguments of an attention backward kernel: pointers, strides and scalars. No torch types.
#pragma once

#include <cstdint>

#include "../common/macros.h"
#include "../common/types.h"

namespace flashbwd {

// A (batch, seq, head, dim) view whose last dimension is contiguous. Strides are 64-bit and count elements. With packed
// variable lengths the batch stride is 0 and cu_seqlens gives the first row of each sequence.
struct HeadsView {
  void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t seq_stride = 0;
  int64_t head_stride = 0;
};

// A (batch, head, seq) view of fp32 values, one per query row. With packed variable lengths it is (heads, total_q) with
// batch stride 0 and rows indexed by cu_seqlens (packed_rows), or one padded block per sequence.
struct RowsView {
  void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t seq_stride = 0;
  bool packed_rows = false;
};

// A (batch, head, row, column) view. A broadcast dimension has stride 0.
struct BiasView {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t row_stride = 0;
  int64_t col_stride = 0;
};

// A (batch, key) view of bools: the keys that the queries of a sequence see. Strides count elements.
struct KeyMaskView {
  const uint8_t* data = nullptr;
  int64_t batch_stride = 0;
  int64_t key_stride = 0;
};

// The query loops of all key blocks, as a block mask lists them. Lists are in the order in which work tiles are handed
// out: list i of a (batch, KV head) is the i-th work tile.
struct KeyBlockList {
  int32_t key_block;
  int32_t first_entry;  // index of its first entry
  int32_t entries;      // how many; the query loop visits them in order
  int32_t unused;
};

// One iteration of a query loop.
struct alignas(16) QueryBlockEntry {
  int32_t query_block;
  int32_t head;    // query head within those of the KV head
  int32_t bits;    // index of its tile of bits, or -1 if every pair of the tile is visible
  uint32_t turns;  // entries of earlier lists with the same head and query block; the high half: of later lists

  FLASHBWD_HOST_DEVICE int32_t adds_before() const { return static_cast<int32_t>(turns & 0xffffu); }
  FLASHBWD_HOST_DEVICE int32_t adds_after() const { return static_cast<int32_t>(turns >> 16); }
};

// A block mask. docs/kernels/attention_sm90_features.md describes the tiles of bits.
struct BlockMaskView {
  const KeyBlockList* lists = nullptr;  // (batch or 1, heads_kv or 1, key blocks); null: no block mask
  const QueryBlockEntry* entries = nullptr;
  const int32_t* bits = nullptr;
  int64_t batch_stride = 0;  // in lists; 0: all batches share them
  int64_t head_stride = 0;
};

enum class CausalAlignment : int32_t { kNone, kBottomRight, kTopLeft };

// The forward pass that drew the dropout mask. docs/numerics.md describes how each of them numbers the elements.
enum class DropoutLayout : int32_t { kNone, kFlash, kEfficient32, kEfficient64 };

struct PhiloxArguments {
  // With pointers, the values are read on the GPU when the kernel runs, so that a CUDA graph can replay with other
  // values.
  const uint64_t* seed_ptr = nullptr;
  const uint64_t* offset_ptr = nullptr;
  uint64_t seed = 0;
  uint64_t offset = 0;

  // Device code only.
  FLASHBWD_HOST_DEVICE uint64_t current_seed() const { return seed_ptr != nullptr ? *seed_ptr : seed; }
  FLASHBWD_HOST_DEVICE uint64_t current_offset() const { return offset_ptr != nullptr ? *offset_ptr : offset; }
};

struct AttentionBackwardParams {
  // seqlen_* are the longest lengths (the lengths themselves when dense); total_* are the rows of packed inputs.
  int32_t batch = 0;
  int32_t heads = 0;
  int32_t heads_kv = 0;
  int32_t head_dim = 0;
  int32_t head_dim_v = 0;
  int32_t seqlen_q = 0;
  int32_t seqlen_k = 0;
  int64_t total_q = 0;
  int64_t total_k = 0;

  DType dtype = DType::kBFloat16;     // of q, k, v, out, dout
  DType dq_dtype = DType::kBFloat16;  // of the gradients: `dtype`, or fp32 if the caller passed fp32 outputs
  DType dk_dtype = DType::kBFloat16;
  DType dv_dtype = DType::kBFloat16;

  HeadsView q, k, v, out, dout;
  HeadsView dq, dk, dv;
  RowsView lse, dlse;  // dlse.data is null if the caller passed none

  // cu_seqlens: (batch + 1,), seqused: (batch,), int32 on the GPU; null if dense or not given.
  const int32_t* cu_seqlens_q = nullptr;
  const int32_t* cu_seqlens_k = nullptr;
  const int32_t* seqused_q = nullptr;
  const int32_t* seqused_k = nullptr;

  float softmax_scale = 1.f;
  float softcap = 0.f;                              // 0: none
  CausalAlignment causal = CausalAlignment::kNone;  // the diagonal from which `window_*` count
  int32_t window_left = -1;                         // -1: unbounded. A causal mask has window_right 0.
  int32_t window_right = -1;

  BiasView bias;         // data is null if there is no bias
  BiasView dbias;        // data is null if not requested; same shape and dtype as bias
  KeyMaskView key_mask;  // data is null if all keys are visible
  const float* alibi_slopes = nullptr;
  int64_t alibi_batch_stride = 0;  // 0: all batches use the same slope per head
  BlockMaskView block_mask;
  const float* sink = nullptr;  // (heads,)
  float* dsink = nullptr;       // (heads,) fp32; overwritten, not accumulated

  float dropout_p = 0.f;
  DropoutLayout dropout_layout = DropoutLayout::kNone;
  PhiloxArguments philox;

  bool deterministic = false;
  bool tf32 = false;          // fp32 matrix products may round their operands to TF32
  void* workspace = nullptr;  // at least workspace_bytes of the plan, aligned to 256 bytes
};

}  // namespace flashbwd

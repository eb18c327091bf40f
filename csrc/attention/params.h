// What an attention-backward kernel is given: pointers, strides and numbers, nothing of torch.
#pragma once

#include <cstdint>

#include "../common/macros.h"
#include "../common/types.h"

namespace flashbwd {

// A (batch, seq, head, dim) view with dim contiguous. Strides count elements and are 64-bit. For packed variable
// lengths the batch stride is 0 and cu_seqlens gives the first row of a sequence.
struct HeadsView {
  void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t seq_stride = 0;
  int64_t head_stride = 0;
};

// A (batch, head, seq) view of fp32 row statistics. Packed variable lengths: batch stride 0, rows from cu_seqlens
// ("packed_rows"), or one padded row block a sequence (the "(B, H, roundup(max_seqlen_q, 32))" form).
struct RowsView {
  void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t seq_stride = 0;
  bool packed_rows = false;
};

// A (batch, head, row, column) view; a broadcast dimension has stride 0.
struct BiasView {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t row_stride = 0;
  int64_t col_stride = 0;
};

enum class CausalAlignment : int32_t { kNone, kBottomRight, kTopLeft };

// Which forward drew the dropout mask; see docs/numerics.md for the numberings.
enum class DropoutLayout : int32_t { kNone, kFlash, kEfficient32, kEfficient64 };

struct PhiloxArguments {
  // On the GPU when the pointers are set (CUDA graphs replay with other values), else by value.
  const uint64_t* seed_ptr = nullptr;
  const uint64_t* offset_ptr = nullptr;
  uint64_t seed = 0;
  uint64_t offset = 0;

  // On the GPU.
  FLASHBWD_HOST_DEVICE uint64_t current_seed() const { return seed_ptr != nullptr ? *seed_ptr : seed; }
  FLASHBWD_HOST_DEVICE uint64_t current_offset() const { return offset_ptr != nullptr ? *offset_ptr : offset; }
};

struct AttentionBackwardParams {
  // Sizes. seqlen_* are the maxima (the sizes themselves when dense); total_* are the rows of packed inputs.
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
  DType dq_dtype = DType::kBFloat16;  // of the gradients: `dtype`, or fp32 where the caller gave fp32
  DType dk_dtype = DType::kBFloat16;
  DType dv_dtype = DType::kBFloat16;

  HeadsView q, k, v, out, dout;
  HeadsView dq, dk, dv;
  RowsView lse, dlse;  // dlse.data is null when there is none

  // (batch + 1,) and (batch,) int32 on the GPU; null when dense / unused.
  const int32_t* cu_seqlens_q = nullptr;
  const int32_t* cu_seqlens_k = nullptr;
  const int32_t* seqused_q = nullptr;
  const int32_t* seqused_k = nullptr;

  float softmax_scale = 1.f;
  float softcap = 0.f;                              // 0: none
  CausalAlignment causal = CausalAlignment::kNone;  // which diagonal `window_*` are measured from
  int32_t window_left = -1;                         // -1: unbounded. Causal has already made window_right 0.
  int32_t window_right = -1;

  BiasView bias;   // data null: none
  BiasView dbias;  // data null: not asked for; same shape and dtype as bias
  const float* alibi_slopes = nullptr;
  int64_t alibi_batch_stride = 0;  // 0: one slope a head for all batches
  const float* sink = nullptr;     // (heads,)
  float* dsink = nullptr;          // (heads,) fp32, written, not added to

  float dropout_p = 0.f;
  DropoutLayout dropout_layout = DropoutLayout::kNone;
  PhiloxArguments philox;

  bool deterministic = false;
  bool tf32 = false;          // products of fp32 may be rounded to TF32
  void* workspace = nullptr;  // at least the plan's workspace_bytes, 256-byte aligned
};

}  // namespace flashbwd

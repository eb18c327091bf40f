// Plans a flex decoding call on the host: chooses the tile and the number of KV splits (Flash-Decoding).
#pragma once

#include <cstdint>

#include "../common/types.h"

namespace flashbwd {

// The properties of a call that the planner uses.
struct DecodingShape {
  int64_t batch = 0, heads_kv = 0;
  int64_t rows = 0;  // query rows per KV head: query heads per KV head * seqlen_q
  int64_t seqlen_k = 0;
  int64_t head_dim = 0, head_dim_v = 0;
  int64_t element_bytes = 2;
};

struct DecodingTile {
  int32_t head_dim = 0;  // both head dimensions, padded to 64, 128 or 256; 0: no kernel supports them
  int32_t rows = 0;      // query rows per CTA: 16 or 32
  int32_t warps = 0;     // warps per CTA: 4; 8 if one wave of CTAs fills the GPU; 2 if 4 need too much shared memory

  bool operator==(const DecodingTile& other) const {
    return head_dim == other.head_dim && rows == other.rows && warps == other.warps;
  }
};

// The larger head dimension, rounded up to 64, 128 or 256; 0 if it is above 256.
int32_t padded_head_dim(int64_t head_dim, int64_t head_dim_v);

DecodingTile decoding_tile(const DecodingShape& shape, const DeviceInfo& info);

struct DecodingSplits {
  int32_t splits = 1;
  int32_t cluster = 1;  // divides splits
};

// `requested`: the number of splits that the caller wants; 0: the planner chooses.
DecodingSplits decoding_splits(const DecodingShape& shape, DecodingTile tile, const DeviceInfo& info,
                               int64_t requested);

// The number of KV splits of the backward kernel; each split has its own slot of dq. `batch_kv` is 1 if all batches
// share K and V, else the batch size.
int32_t decoding_backward_splits(const DecodingShape& shape, int64_t batch_kv, int32_t head_dim,
                                 const DeviceInfo& info);

}  // namespace flashbwd

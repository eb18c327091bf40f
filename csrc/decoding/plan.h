// Host decisions of flex decoding: the tile, and how many parts the keys are split into.
#pragma once

#include <cstdint>

#include "../common/types.h"

namespace flashbwd {

// What a call is to the planner.
struct DecodingShape {
  int64_t batch = 0, heads_kv = 0;
  int64_t rows = 0;  // that share a key head: heads of a group times queries
  int64_t seqlen_k = 0;
  int64_t head_dim = 0, head_dim_v = 0;
  int64_t element_bytes = 2;
};

struct DecodingTile {
  int32_t head_dim = 0;  // both head dimensions padded: 64, 128 or 256; 0 when no kernel takes them
  int32_t rows = 0;      // of one thread block: 16 or 32
  int32_t warps = 0;     // 4; 8 where one wave of blocks fills the chip; 2 where shared memory is short

  bool operator==(const DecodingTile& other) const {
    return head_dim == other.head_dim && rows == other.rows && warps == other.warps;
  }
};

// 64, 128 or 256; 0 above.
int32_t padded_head_dim(int64_t head_dim, int64_t head_dim_v);

DecodingTile decoding_tile(const DecodingShape& shape, const DeviceInfo& info);

struct DecodingSplits {
  int32_t splits = 1;
  int32_t cluster = 1;  // divides splits
};

// `asked`: splits that the caller wants, 0 for as many as serve best.
DecodingSplits decoding_splits(const DecodingShape& shape, DecodingTile tile, const DeviceInfo& info, int64_t asked);

// Thread blocks that share the keys of a head in the backward kernel; each has a slot of dq. `batch_kv` is 1 where all
// batches share the keys.
int32_t decoding_backward_splits(const DecodingShape& shape, int64_t batch_kv, int32_t head_dim,
                                 const DeviceInfo& info);

}  // namespace flashbwd

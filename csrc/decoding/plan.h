// Host decisions of flex decoding: the tile, and how many parts the keys are split into.
#pragma once

#include <cstdint>

namespace flashbwd {

struct DecodingTile {
  int32_t head_dim = 0;  // both head dimensions padded: 64, 128 or 256; 0 when no kernel takes them
  int32_t rows = 0;      // of one thread block: 16 or 32
};

// For `rows` = group * seqlen_q rows that share a key head.
DecodingTile decoding_tile(int64_t head_dim, int64_t head_dim_v, int64_t rows);

// `units` are the (batch, key head, row tile) of a call.
int32_t decoding_splits(int64_t units, int64_t seqlen_k, DecodingTile tile, int32_t sm_count, int64_t smem_per_block);

}  // namespace flashbwd

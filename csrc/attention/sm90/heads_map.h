// TMA descriptors of q, k, v, dout and their gradients.
#pragma once

#include <cstdint>

#include "../../common/tensor_map.h"
#include "../params.h"

namespace flashbwd::sm90 {

// Rows, heads and batches of a 16-bit tensor.
struct MapShape {
  int64_t rows, heads, batch;
};

// A (columns, rows, heads, batch) map of a 16-bit tensor. An empty tensor has no address, so its map gets `fallback`.
inline bool encode_heads(CUtensorMap* map, DType dtype, const HeadsView& view, void* fallback, int64_t columns,
                         const MapShape& shape, int32_t box_rows, int32_t row_bytes = 128) {
  const auto type = dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return encode_map(
      map, type, view.data != nullptr ? view.data : fallback, columns,
      {{shape.rows, view.seq_stride * 2}, {shape.heads, view.head_stride * 2}, {shape.batch, view.batch_stride * 2}},
      row_bytes / 2, box_rows, row_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B);
}

}  // namespace flashbwd::sm90

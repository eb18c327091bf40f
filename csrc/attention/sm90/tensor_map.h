// TMA descriptors.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <vector>

#include "../params.h"

namespace flashbwd::sm90 {

struct MapDimension {
  int64_t size;
  int64_t stride_bytes;
};

// Encodes a map of contiguous columns; `outer` lists the dimensions from rows outwards, four at most. Boxes have
// `box_columns` columns (as many bytes as `swizzle` says) and `box_rows` rows. Returns false if the driver refuses.
bool encode_map(CUtensorMap* map, CUtensorMapDataType type, void* data, int64_t columns,
                const std::vector<MapDimension>& outer, int32_t box_columns, int32_t box_rows,
                CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B);

// Rows, heads and batches of a 16-bit tensor.
struct MapShape {
  int64_t rows, heads, batch;
};

// A (columns, rows, heads, batch) map of a 16-bit tensor. An empty tensor has no address, so its map gets `fallback`.
bool encode_heads(CUtensorMap* map, DType dtype, const HeadsView& view, void* fallback, int64_t columns,
                  const MapShape& shape, int32_t box_rows, int32_t row_bytes = 128);

}  // namespace flashbwd::sm90

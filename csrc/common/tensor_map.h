// TMA descriptors.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <vector>

namespace flashbwd {

// Gives the calling thread a context. The driver encodes nothing in a thread without one, which an autograd thread is
// until its first launch. Returns false if there is no device.
bool begin_context();

struct MapDimension {
  int64_t size;
  int64_t stride_bytes;
};

// Encodes a map of contiguous columns; `outer` lists the dimensions from rows outwards, four at most. Boxes have
// `box_columns` columns (as many bytes as `swizzle` says) and `box_rows` rows. Returns false if the driver refuses.
bool encode_map(CUtensorMap* map, CUtensorMapDataType type, void* data, int64_t columns,
                const std::vector<MapDimension>& outer, int32_t box_columns, int32_t box_rows,
                CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B);

}  // namespace flashbwd

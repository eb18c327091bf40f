// Stores adjacent columns of one row of a gradient from fp32 registers.
#pragma once

#include <cstdint>

#include "../../common/numeric.cuh"

namespace flashbwd {

// Stores columns `column` to column + kColumns - 1, except those from `columns` on, `stride` elements apart. `vectors`:
// the stride is 1 and the address is a multiple of kColumns elements, so one store (fp32: one per four columns) writes
// all columns.
template <int kColumns, typename T>
__device__ __forceinline__ void store_columns(T* destination, const float (&values)[kColumns], int32_t column,
                                              int32_t columns, bool vectors, int64_t stride = 1) {
  static_assert(kColumns == 4 || kColumns == 8, "a vector has 8 or 16 bytes of a 16-bit type");
  if (vectors && column + kColumns <= columns) {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < kColumns; i += 4) {
        reinterpret_cast<float4*>(destination)[i / 4] =
            make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
      }
    } else if constexpr (kColumns == 4) {
      *reinterpret_cast<uint2*>(destination) =
          make_uint2(pack2<T>(values[0], values[1]), pack2<T>(values[2], values[3]));
    } else {
      *reinterpret_cast<uint4*>(destination) =
          make_uint4(pack2<T>(values[0], values[1]), pack2<T>(values[2], values[3]), pack2<T>(values[4], values[5]),
                     pack2<T>(values[6], values[7]));
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (column + i < columns) destination[i * stride] = from_float<T>(values[i]);
  }
}

}  // namespace flashbwd

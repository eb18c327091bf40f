// Alignment of rows relative to 16-byte boundaries.
#pragma once

#include <cstdint>

#include "../common/types.h"

namespace flashbwd::layer_norm {

// Row r starts (base + r * step) % elements elements after a vector boundary.
struct Phase {
  int base = 0;
  int step = 0;
  bool operator==(const Phase& other) const { return base == other.base && step == other.step; }
  bool none() const { return base == 0 && step == 0; }
};

inline Phase phase_of(const void* data, int64_t row_stride, DType dtype, int elements) {
  const auto first = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data) / size_of(dtype));
  return {static_cast<int>(first % elements), static_cast<int>(row_stride % elements)};
}

}  // namespace flashbwd::layer_norm

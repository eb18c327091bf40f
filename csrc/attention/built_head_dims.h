// Development builds may contain only some head dimensions (FLASHBWD_HEAD_DIMS, see docs/building.md).
#pragma once

#include <cstdint>

namespace flashbwd {

constexpr bool is_built(int32_t head_dim) {
#ifdef FLASHBWD_BUILT_HEAD_DIMS
  constexpr int32_t kBuilt[] = {FLASHBWD_BUILT_HEAD_DIMS};
  for (const int32_t built : kBuilt) {
    if (built == head_dim) return true;
  }
  return false;
#else
  return head_dim > 0;
#endif
}

}  // namespace flashbwd

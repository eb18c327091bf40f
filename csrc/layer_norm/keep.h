// The arithmetic of a dropout mask that the host does once for all elements.
#pragma once

#include <cmath>
#include <cstdint>

namespace flashbwd::layer_norm {

// The least drawn word x that is kept: fl(fl(x) * 2^-32 + 2^-33) > fl(p) in float32, which grows with x.
inline uint32_t keep_from(double p) {
  const auto kept = [&](uint32_t x) {
    return std::fmaf(static_cast<float>(x), 0x1p-32f, 0x1p-33f) > static_cast<float>(p);
  };
  uint32_t least = 0;
  for (uint32_t bit = uint32_t{1} << 31; bit != 0; bit >>= 1) {
    if (!kept(least + bit - 1)) least += bit;
  }
  return least;
}

}  // namespace flashbwd::layer_norm

// Converts a dropout probability to a threshold on Philox words, once per call on the host.
#pragma once

#include <cmath>
#include <cstdint>

namespace flashbwd::layer_norm {

// The smallest word x whose element is kept. curand_uniform's float32 value fl(fl(x) * 2^-32 + 2^-33) must exceed
// fl(p); it is monotonic in x, so a binary search finds the threshold.
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

// Sizes of the kernels for head dimensions 257 to 512. Host code includes this too: no CUDA here.
#pragma once

#include <cstdint>

#include "../../../common/warpgroup.h"
#include "../../built_head_dims.h"
#include "../../index/tile_order.h"

namespace flashbwd::sm90::head_dim_512 {

constexpr int kRows = 64;                        // of a block of queries or keys
constexpr int kThreads = 3 * kWarpgroupThreads;  // a producer warpgroup and two consumer warpgroups
constexpr int kSharedMemoryBytes = 227 * 1024;   // most that a CTA can have

// 65536 registers for 3 warpgroups are 512 per lane, allocated in steps of 8.
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;

// Head dimensions in shared memory, of q and k as of v and dout; TMA pads smaller ones with zeros. In a plan, these
// rows follow those of kTiles.
constexpr int32_t kHeadDims[] = {320, 384, 512};

constexpr int kNumHeadDims = sizeof(kHeadDims) / sizeof(kHeadDims[0]);

// The index of the smallest of them that holds `head_dim` columns, or -1.
constexpr int32_t find_head_dim(int64_t head_dim) {
  for (int32_t i = 0; i < kNumHeadDims; ++i) {
    if (is_built(kHeadDims[i]) && head_dim <= kHeadDims[i]) return i;
  }
  return -1;
}

// Work tiles of kRows rows of k or q. `rows`: of the longest sequence, `total`: of all sequences. If packed, an upper
// bound.
constexpr int64_t work_tiles(bool packed, int64_t batch, int64_t heads, int64_t rows, int64_t total) {
  return packed ? varlen_work_tiles(total, batch, heads, kRows) : batch * heads * ceil_div(rows, kRows);
}

}  // namespace flashbwd::sm90::head_dim_512

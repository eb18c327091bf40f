// Reduction of the row sums over the threads that share a row.
#pragma once

#include "config.h"
#include "device.cuh"

namespace flashbwd::layer_norm {

// Sums a row over the lanes, warps and CTAs that share it. Shared memory: two mbarriers per group, then two buffers of
// partial sums per group (double-buffered by call).
struct RowExchange {
  static constexpr int kPartBytes = sizeof(float2);
  static constexpr int kFewParts = 4;
  uint32_t barriers;  // of this group
  uint32_t slots;     // (2, parts) float2 of this group, in each CTA of the row
  uint32_t own_slot;  // this warp's slot in the first buffer
  int group;
  bool leads;  // this is the first thread of the group

  __device__ RowExchange(const BackwardTile& tile, uint32_t smem, int group, int rank)
      : barriers(smem + group * kBarrierBytes), group(group) {
    const int warps = (tile.lanes + kWarp - 1) / kWarp;
    slots = smem + (tile.groups * kBarrierBytes + group * 2 * tile.parts * kPartBytes);
    own_slot = slots + (rank * warps + static_cast<int>(threadIdx.x) / kWarp % warps) * kPartBytes;
    leads = threadIdx.x == group * tile.lanes;
  }

  // Called by thread 0 of each CTA of a cluster, before a cluster barrier. Initializes the mbarriers of all groups.
  __device__ void init(int groups) const {
    for (int i = 0; i < 2 * groups; ++i) init_barrier(barriers + 8 * i, 1);
  }

  // Returns the sum to all threads of the row. `call_index`: the number of previous calls.
  __device__ float2 sum(const BackwardTile& tile, float2 sums, uint32_t call_index) const {
    sums = warp_sum(sums, tile.lanes);
    if (tile.parts == 1) return sums;
    const int lane = threadIdx.x % kWarp;
    const uint32_t offset = call_index % 2 * tile.parts * kPartBytes;
    if (kHasClusters && tile.cluster) {
      // Each warp sends its part to every CTA of the row with st.async, which completes bytes on that CTA's mbarrier.
      // The first thread of the group in each CTA is the only one to arrive; it sets the expected number of bytes.
      const uint32_t barrier = barriers + call_index % 2 * kBarrierBytes / 2;
      if (leads) arrive_expecting(barrier, tile.parts * kPartBytes);
      if (lane < tile.chunks) store_to_peer(own_slot + offset, barrier, lane, sums);
      wait(barrier, call_index / 2 % 2);
    } else {
      if (lane == 0) store_shared(own_slot + offset, sums);
      group_barrier(1 + group, tile.lanes);  // the warps of this group arrive and wait
    }
    // Every warp adds the parts in the same order and gets the same bits. The buffer is overwritten two calls later,
    // when all warps have sent their part of the next call, hence have read this one.
    sums = make_float2(0.f, 0.f);
    if (tile.parts <= kFewParts) {  // every lane reads all parts, which is faster than shuffles
#pragma unroll
      for (int i = 0; i < kFewParts; ++i) {
        const float2 part =
            i < tile.parts ? load_shared<float2>(slots + offset + i * kPartBytes) : make_float2(0.f, 0.f);
        sums.x += part.x;
        sums.y += part.y;
      }
      return sums;
    }
#pragma unroll 1
    for (int i = lane; i < tile.parts; i += kWarp) {
      const float2 part = load_shared<float2>(slots + offset + i * kPartBytes);
      sums.x += part.x;
      sums.y += part.y;
    }
    return warp_sum(sums, kWarp);
  }
};

}  // namespace flashbwd::layer_norm

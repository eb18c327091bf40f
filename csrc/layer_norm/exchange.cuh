// How the threads that share a row add up.
#pragma once

#include "config.h"
#include "device.cuh"

namespace flashbwd::layer_norm {

// The sums of a row over the lanes, warps and CTAs that share it. Shared memory, by address: for each group two
// mbarriers, then for each group the parts of two rows, which take turns.
struct RowExchange {
  static constexpr int kPartBytes = sizeof(float2);
  static constexpr int kFewParts = 4;
  uint32_t barriers;  // of this group
  uint32_t slots;     // (2, parts) float2 of this group, in each CTA of the row
  uint32_t own_slot;  // this warp's part of the first
  int group;
  bool leads;  // the group

  __device__ RowExchange(const BackwardTile& tile, uint32_t smem, int group, int rank)
      : barriers(smem + group * kBarrierBytes), group(group) {
    const int warps = (tile.lanes + kWarp - 1) / kWarp;
    slots = smem + (tile.groups * kBarrierBytes + group * 2 * tile.parts * kPartBytes);
    own_slot = slots + (rank * warps + static_cast<int>(threadIdx.x) / kWarp % warps) * kPartBytes;
    leads = threadIdx.x == group * tile.lanes;
  }

  // Thread 0 of a cluster's CTA, for all groups; all others find the barriers after the next barrier.
  __device__ void init(int groups) const {
    for (int i = 0; i < 2 * groups; ++i) init_barrier(barriers + 8 * i, 1);
  }

  // `turn`: how often it was called before.
  __device__ float2 sum(const BackwardTile& tile, float2 sums, uint32_t turn) const {
    sums = warp_sum(sums, tile.lanes);
    if (tile.parts == 1) return sums;
    const int lane = threadIdx.x % kWarp;
    const uint32_t offset = turn % 2 * tile.parts * kPartBytes;
    if (kHasClusters && tile.cluster) {
      // Each part brings its bytes to the barrier of the CTA it goes to; one thread there says how many to expect.
      const uint32_t barrier = barriers + turn % 2 * kBarrierBytes / 2;
      if (leads) arrive_expecting(barrier, tile.parts * kPartBytes);
      if (lane < tile.chunks) store_to_peer(own_slot + offset, barrier, lane, sums);
      wait(barrier, turn / 2 % 2);
    } else {
      if (lane == 0) store_shared(own_slot + offset, sums);
      group_barrier(1 + group, tile.lanes);  // the warps of this group arrive and wait
    }
    // Every warp adds the parts in the same order and gets the same bits. These slots are written again two turns
    // later, which nobody reaches before all have sent the next row, after reading here.
    sums = make_float2(0.f, 0.f);
    if (tile.parts <= kFewParts) {  // every lane reads them all: fewer steps than shuffles take
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

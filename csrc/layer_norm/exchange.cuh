// Reduction of the row sums over the threads that share a row.
#pragma once

#include "config.h"
#include "device.cuh"

namespace flashbwd::layer_norm {

// Sums a row over the lanes, warps and CTAs that share it. Shared memory: two mbarriers per group, then two buffers of
// partial sums per group (double-buffered by call).
struct RowExchange {
  static constexpr int kPartialBytes = sizeof(float2);
  static constexpr int kFewPartials = 4;
  uint32_t barriers;  // of this group
  uint32_t slots;     // (2, partials): float2 of this group, in each CTA of the row
  uint32_t own_slot;  // this warp's slot in the first buffer
  int group;
  bool leads;  // this is the first thread of the group

  __device__ RowExchange(const BackwardTile& tile, uint32_t smem, int group, int rank)
      : barriers(smem + group * kBarrierBytes), group(group) {
    const int warps = (tile.lanes + kWarp - 1) / kWarp;
    slots = smem + (tile.groups * kBarrierBytes + group * 2 * tile.partials * kPartialBytes);
    own_slot = slots + (rank * warps + static_cast<int>(threadIdx.x) / kWarp % warps) * kPartialBytes;
    leads = threadIdx.x == group * tile.lanes;
  }

  // Called by thread 0 of each CTA of a cluster, before a cluster barrier. Initializes the mbarriers of all groups.
  __device__ void init(int groups) const {
    for (int i = 0; i < 2 * groups; ++i) init_barrier(barriers + 8 * i, 1);
  }

  // Returns the sum to all threads of the row. `call_index`: the number of previous calls.
  __device__ float2 sum(const BackwardTile& tile, float2 sums, uint32_t call_index) const {
    sums = warp_sum(sums, tile.lanes);
    if (tile.partials == 1) return sums;
    const int lane = threadIdx.x % kWarp;
    const uint32_t offset = call_index % 2 * tile.partials * kPartialBytes;
    if (kHasClusters && tile.cluster) {
      // Each warp sends its partial sum to every CTA of the row with st.async, which completes bytes on that CTA's
      // mbarrier. In each CTA, only the first thread of the group arrives, and sets the expected number of bytes. All
      // threads of the group wait.
      const uint32_t barrier = barriers + call_index % 2 * kBarrierBytes / 2;
      if (leads) arrive_expecting(barrier, tile.partials * kPartialBytes);
      if (lane < tile.ctas_per_row) store_to_peer(own_slot + offset, barrier, lane, sums);
      wait(barrier, call_index / 2 % 2);
    } else {
      if (lane == 0) store_shared(own_slot + offset, sums);
      group_barrier(1 + group, tile.lanes);  // the warps of this group arrive and wait
    }
    // Every warp adds the partial sums in the same order and gets the same bits. The buffer is overwritten two calls
    // later. By then all warps have sent their partial sums of the next call, and hence have read those of this call.
    sums = make_float2(0.f, 0.f);
    if (tile.partials <= kFewPartials) {  // every lane reads all of them, which is faster than shuffles
#pragma unroll
      for (int i = 0; i < kFewPartials; ++i) {
        const float2 partial =
            i < tile.partials ? load_shared<float2>(slots + offset + i * kPartialBytes) : make_float2(0.f, 0.f);
        sums.x += partial.x;
        sums.y += partial.y;
      }
      return sums;
    }
#pragma unroll 1
    for (int i = lane; i < tile.partials; i += kWarp) {
      const float2 partial = load_shared<float2>(slots + offset + i * kPartialBytes);
      sums.x += partial.x;
      sums.y += partial.y;
    }
    return warp_sum(sums, kWarp);
  }
};

}  // namespace flashbwd::layer_norm

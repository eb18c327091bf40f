// Loads of tiles with TMA, by whole warps of the producer warpgroup.
#pragma once

#include "traits.cuh"

namespace flashbwd::sm90::head_dim_512 {

// The rows of a tensor that a tile holds. `valid`: how many of them belong to the sequence, perhaps 0 or fewer.
struct TileRows {
  const CUtensorMap* map;
  int32_t row, head, batch, valid;
};

struct Loader {
  const KernelParams& params;
  uint64_t& landed;
  int32_t lane = threadIdx.x % 32;
  uint32_t landed_phase = 0;

  // Called by the warp. Loads `atoms` atoms of a tile; `full` completes when these and `extra_bytes` of other copies
  // have arrived. Consumers never see rows of another sequence, or NaN past the end of one: such rows land first, and
  // the warp zeroes them before it arrives at `full`. Every lane arrives, because racecheck follows threads.
  __device__ __forceinline__ void load(const TileRows& rows, uint8_t* destination, int32_t first_atom, int32_t atoms,
                                       uint64_t* full, uint32_t extra_bytes = 0) {
    const bool poisoned = params.rows_may_be_poisoned && rows.valid < kRows;
    uint64_t* const barrier = poisoned ? &landed : full;
    const bool leads = elect_one();
    if (leads) {
      mbarrier_arrive_expect(barrier, atoms * kAtomBytes + (poisoned ? 0 : extra_bytes));
#pragma unroll 1
      for (int32_t atom = 0; atom < atoms; ++atom) {
        tensor_load_4d(rows.map, barrier, destination + atom * kAtomBytes, (first_atom + atom) * kAtomColumns, rows.row,
                       rows.head, rows.batch);
      }
    }
    if (poisoned) {
      mbarrier_wait(&landed, landed_phase);
      landed_phase ^= 1;
      zero_rows(destination, atoms, max(rows.valid, 0));
      fence_async_shared();
      if (leads) mbarrier_arrive_expect(full, extra_bytes);
    }
    if (!leads) mbarrier_arrive(full);
    __syncwarp();
  }

 private:
  // Zeroes the rows of each atom from `first` on.
  __device__ __forceinline__ void zero_rows(uint8_t* tile, int32_t atoms, int32_t first) const {
#pragma unroll 1
    for (int32_t atom = 0; atom < atoms; ++atom) {
#pragma unroll 1
      for (int32_t byte = first * kAtomRowBytes + lane * 16; byte < kAtomBytes; byte += 32 * 16) {
        *reinterpret_cast<uint4*>(tile + atom * kAtomBytes + byte) = make_uint4(0, 0, 0, 0);
      }
    }
  }
};

}  // namespace flashbwd::sm90::head_dim_512

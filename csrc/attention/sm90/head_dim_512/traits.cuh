// Constants of a head dimension and a dtype, and the shared memory of both kernels. A tile is 64 rows of q, k, v or
// dout, in atoms of 64 columns. The consumer warpgroups each have a half of its columns: the left atoms or the right.
#pragma once

#include "../../../common/pipeline.cuh"
#include "../../../common/wgmma.cuh"
#include "work_tile.cuh"

namespace flashbwd::sm90::head_dim_512 {

constexpr uint32_t kWarpgroupBarrier = 1;  // named barriers of the consumer warpgroups, one each

constexpr int kStages = 2;  // of streamed tiles; consumer warpgroup w starts with the tiles of stage w
constexpr int kWarps = kWarpgroupThreads / 32;
constexpr int kLoaders = 32;  // threads that arrive at the barrier of a loaded tile: the lanes of a producer warp
constexpr int kAtomBytes = kRows * kAtomRowBytes;
constexpr int kScores = kRows * kRows / kWarpgroupThreads;  // of a tile of S or dP, per thread
constexpr uint32_t kRowValueBytes = kRows * sizeof(float);

using RowsOperand = KMajorOperand<kAtomBytes>;      // a product over columns
using ColumnsOperand = MnMajorOperand<kAtomBytes>;  // a product over rows

template <typename T_, int kHeadDim>
struct Traits {
  using T = T_;
  static_assert(kHeadDim % kAtomColumns == 0, "tiles are whole atoms");
  static constexpr int kAtoms = kHeadDim / kAtomColumns;
  static constexpr int kTileBytes = kAtoms * kAtomBytes;
  static constexpr int atoms_of(int half) { return (kAtoms + 1 - half) / 2; }
  static constexpr int first_atom(int half) { return half == 0 ? 0 : atoms_of(0); }
  static constexpr int accumulators(int half) { return atoms_of(half) * kAtomColumns / 2; }  // per thread

  // Scores of a tile pass from thread to thread in the order of their registers, as fp32 numbers or packed in 16 bits.
  using Exchange = float4[kScores / 4][kWarpgroupThreads];
  static constexpr uint32_t kExchangeBytes = sizeof(Exchange);
  static constexpr uint32_t kPackedBytes = kExchangeBytes / 2;

  // Of each CTA of a cluster: rank 0 keeps k, streams q and computes dk; rank 1 keeps v, streams dout and computes dv.
  struct alignas(1024) KeyGradientsStorage {
    uint8_t kept[kTileBytes];
    uint8_t streamed[kStages][kTileBytes];
    Exchange exchange[kStages];  // rank 0: dP, then dS in its place; rank 1: P
    alignas(128) float lse_log2[kStages][kRows];
    alignas(128) float delta[kStages][kRows];
    WorkTile work;
    uint64_t kept_full;
    uint64_t landed;               // Loader::load
    uint64_t full[kStages][2];     // of each half of a streamed tile
    uint64_t empty[kStages][2];    // each warp that reads the half arrives
    uint64_t received[kStages];    // a consumer thread arrives, the other CTA sends bytes
    uint64_t sent_empty[kStages];  // every consumer warp of the other CTA arrives, after it has read what this one sent
    uint64_t ds_full[kStages];     // rank 0: every thread of the warpgroup that computes dS arrives
  };

  // v passes through slots of one atom each: as many as shared memory has room for, with 2 KB for the rest. If not all
  // of v fits, a warpgroup keeps some atoms of dout in registers, and their place becomes slots too.
  static constexpr int kFreeAtoms =
      (kSharedMemoryBytes - 2048 - 3 * kTileBytes - static_cast<int>(kExchangeBytes)) / kAtomBytes;
  static constexpr int kFreeSlots = kFreeAtoms < kAtoms ? kFreeAtoms : kAtoms;
  static constexpr int kRegisterAtoms = kFreeSlots < kAtoms ? 2 : 0;  // the first ones of dout, 16 registers each
  static constexpr int kSlots = kFreeSlots + kRegisterAtoms;

  struct alignas(1024) QueryGradientsStorage {
    uint8_t q[kTileBytes];
    uint8_t k[kTileBytes];
    Exchange exchange;                       // dP, then dS in its place
    uint8_t values[kFreeSlots][kAtomBytes];  // slots of v; those in dout follow
    uint8_t dout[kAtoms][kAtomBytes];
    WorkTile work;
    uint64_t q_full, dout_full;
    uint64_t landed[2];              // Loader::load, of the warps that load k and v
    uint64_t k_full[2], k_empty[2];  // of each half of k
    // Every thread of the warpgroup of dP arrives, because racecheck does not follow warps, and threads load dout.
    uint64_t v_full[kSlots], v_empty[kSlots];
    uint64_t dp_full, ds_full;  // every thread of the warpgroup that has written arrives

    __device__ __forceinline__ uint8_t* value_slot(int32_t slot) {
      return slot < kFreeSlots ? values[slot] : dout[slot - kFreeSlots];
    }
  };

  static __device__ void init_barriers(KeyGradientsStorage& smem) {
    mbarrier_init(&smem.kept_full, kLoaders);
    mbarrier_init(&smem.landed, 1);
    for (int stage = 0; stage < kStages; ++stage) {
      for (int half = 0; half < 2; ++half) {
        mbarrier_init(&smem.full[stage][half], kLoaders);
        // The owner of the half, and the warpgroup that has computed S or dP from this stage
        mbarrier_init(&smem.empty[stage][half], half == stage ? kWarps : 2 * kWarps);
      }
      mbarrier_init(&smem.received[stage], 1);
      mbarrier_init(&smem.sent_empty[stage], 2 * kWarps);
      mbarrier_init(&smem.ds_full[stage], kWarpgroupThreads);
    }
    fence_mbarrier_init();
  }

  static __device__ void init_barriers(QueryGradientsStorage& smem) {
    mbarrier_init(&smem.q_full, kLoaders);
    mbarrier_init(&smem.dout_full, kLoaders);
    for (int half = 0; half < 2; ++half) {
      mbarrier_init(&smem.landed[half], 1);
      mbarrier_init(&smem.k_full[half], kLoaders);
      mbarrier_init(&smem.k_empty[half], half == 0 ? kWarps : 2 * kWarps);  // the warpgroup of S reads both halves
    }
    init_ring(smem.v_full, kLoaders, smem.v_empty, kWarpgroupThreads);
    mbarrier_init(&smem.dp_full, kWarpgroupThreads);
    mbarrier_init(&smem.ds_full, kWarpgroupThreads);
    fence_mbarrier_init();
  }
};

}  // namespace flashbwd::sm90::head_dim_512

// Constants of a tile for large head dimensions and a dtype: sizes, the layout of shared memory, barriers.
#pragma once

#include "../../../common/hopper.cuh"
#include "../../../common/wgmma.cuh"
#include "../config.h"
#include "../tile_scheduler.cuh"

namespace flashbwd::sm90::large_head_dim {

enum NamedBarrier : uint32_t {
  kProbabilityBarrier = 1,  // the 128 threads of P and dv
  kScoreGradientBarrier,    // the 128 threads of dS and dk
  kScrubBarrier,            // both
  kDqBarrier,               // the 128 threads of dq
};

// The score_mod that is compiled into a kernel at run time; this one stands for none.
struct NoMod {
  static constexpr bool kCapturedGradients = false;
};

template <typename T_, int kTileIndex, bool kByHeads, typename Mod_ = NoMod>
struct Traits {
  static constexpr Tile kTile = kTiles[kTileIndex];
  using T = T_;
  using Mod = Mod_;
  static constexpr bool kBlockMask = has(kTile, feature::kBlockMask);
  static constexpr bool kGenerated = has(kTile, feature::kGenerated);
  static constexpr bool kScoreMod = kBlockMask && !has_plain_scores(kTile);   // score_mod.cuh
  static constexpr bool kFeatures = !kBlockMask && !has_plain_scores(kTile);  // features.cuh
  // The warpgroup of dS gets S instead of P times the derivative, and computes both again: gradients of captured
  // tensors need the score and dS at the same time.
  static constexpr bool kSendsScores = Mod::kCapturedGradients;
  static constexpr bool kBiasGradient = kFeatures && has_bias_gradient(kTile);
  static constexpr int kHeadDim = kTile.head_dim;
  static constexpr int kHeadDimV = kTile.head_dim_v;
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kCtas = kTile.ctas;
  static constexpr bool kPairs = kCtas == 2;             // else there is no other CTA, and its buffers are unused
  static constexpr int kBlockN = kTile.block_n / kCtas;  // keys of this CTA
  static constexpr int kStages = kTile.stages;           // of q
  static constexpr int kDoutStages = kTile.dout_stages;
  // As many buffers as shared memory leaves room for.
  static constexpr int kDsBuffers = kHeadDim <= 192 ? 2 : 1;
  static constexpr int kDqBuffers = kHeadDim + kHeadDimV <= 320 ? 2 : 1;
  static constexpr int kSemaphores = semaphores_of_tile(kTile);
  static constexpr int kEarlyIterations = early_iterations(kTile);
  static constexpr bool kLastWritesDq = false;  // each CTA of a cluster adds its own columns of a tile
  static constexpr RoleRegisters kRegisters = role_registers(kTile);
  static_assert(!kGenerated || kRegisters.probabilities == kRegisters.score_gradients, "see role_registers");
  static_assert(kBlockM == 64 && kBlockN == 64, "S is one product of a warpgroup, dS one atom");
  static_assert(kCtas <= 2, "a CTA exchanges dS with at most one other");
  static_assert(kHeadDim % kAtomColumns == 0 && kHeadDimV % kAtomColumns == 0, "tiles are whole atoms");

  static constexpr int kAtoms = kHeadDim / kAtomColumns;  // of q, k, dq
  static constexpr int kAtomsV = kHeadDimV / kAtomColumns;
  static constexpr int kKeyAtomBytes = kBlockN * kAtomRowBytes;    // 64 columns of k or v
  static constexpr int kQueryAtomBytes = kBlockM * kAtomRowBytes;  // 64 columns of q or dout
  static constexpr int kRowValueBytes = kBlockM * 4;
  static constexpr int kBatchEntries = 1;  // of a work tile, as in sm90::Traits
  static constexpr bool kBias = false;     // for producer.cuh: no bias through TMA
  static constexpr int kWarps = kWarpgroupThreads / 32;

  // Groups of 16 columns of k and v, first operands of S and dP, that fit in the registers that a warpgroup has left.
  // `outputs`: columns of dv or dk; s or dp and its 16-bit copy take 3 / 4 of a register per query. With 30 registers
  // for the rest instead of 34, two registers spill; with 24, products are serialised (C7512).
  static constexpr int steps_in_registers(int registers, int columns, int outputs) {
    const int left = registers - outputs / 2 - 3 * kBlockM / 4 - 34;
    return !has_plain_scores(kTile) || left < 16 ? 0 : left / 4 < columns / 16 ? left / 4 : columns / 16;
  }
  static constexpr int kKeySteps = steps_in_registers(kRegisters.probabilities, kHeadDim, kHeadDimV);
  static constexpr int kValueSteps = steps_in_registers(kRegisters.score_gradients, kHeadDimV, kHeadDim);

  static constexpr int kWorkReaders = 3 * kWarpgroupThreads + 1 + kDqAdders;  // warpgroups, loader, adders

  static constexpr int kDsBytes = kBlockN * kAtomRowBytes;

  // Each CTA of a cluster adds some atoms of columns of dq, summed over the keys of both CTAs. Of an odd number, it
  // adds the smaller and the larger share alternately. It keeps these columns of the other CTA's keys.
  static constexpr int kOtherAtoms = (kAtoms + 1) / 2;
  static __device__ BlockRange atoms_of(int32_t rank, int32_t query_block) {
    if constexpr (!kPairs) return {0, kAtoms};
    const int32_t middle = (kAtoms + (query_block & 1)) / 2;
    return rank == 0 ? BlockRange{0, middle} : BlockRange{middle, kAtoms};
  }
  static __device__ int32_t first_other_atom(int32_t rank) { return rank == 0 ? 0 : kAtoms / 2; }

  using WorkTile = sm90::WorkTile<kBlockM, kTile.block_n, kByHeads, staggers_start(kTile) && !kByHeads, kBlockMask>;
  static_assert(!WorkTile::kStaggers || kDqBuffers == 1,
                "with two buffers, key blocks must visit query tiles in one order");

  struct alignas(1024) SharedStorage {
    uint8_t k[kAtoms * kKeyAtomBytes];                     // (kBlockN, kHeadDim)
    uint8_t v[kAtomsV * kKeyAtomBytes];                    // (kBlockN, kHeadDimV)
    uint8_t q[kStages][kAtoms * kQueryAtomBytes];          // (kBlockM, kHeadDim)
    uint8_t dout[kDoutStages][kAtomsV * kQueryAtomBytes];  // (kBlockM, kHeadDimV)
    uint8_t k_other[kOtherAtoms * kKeyAtomBytes];          // (kBlockN, columns of dq) of the other CTA's keys
    uint8_t ds[kDsBuffers][kDsBytes];                      // transposed, (kBlockN, kBlockM)
    uint8_t ds_other[kDsBuffers][kDsBytes];                // the other CTA's
    float dq[kDqBuffers][2][64 * 32];                      // (kBlockM, 64 columns), two boxes of 32 columns
    float4 p[kBlockM / 8][kWarpgroupThreads];              // as registers hold it, for the thread of the same number
    alignas(128) float lse_log2[kStages][kBlockM];
    alignas(128) float delta[kDoutStages][kBlockM];
    WorkTile work[2];  // this work tile and the next
    SchedulerState scheduler;
    int32_t tile;                                      // in the CTA of rank 1: index of the work tile, from rank 0
    uint64_t tile_full;                                // of rank 1: its scheduler arrives, rank 0 sends bytes
    uint64_t tile_empty;                               // of rank 0: the scheduler of rank 1 arrives
    uint64_t work_full[2];                             // the scheduler arrives
    uint64_t work_empty[2];                            // every thread that reads it arrives
    uint64_t work_wanted;                              // the loader arrives: the next work tile may be taken
    uint64_t k_empty;                                  // every warp of P and of dq arrives
    uint64_t v_empty;                                  // every thread of dS, after dk has left its staging buffer
    uint64_t k_other_empty;                            // every warp of dq
    uint64_t k_full, v_full, k_other_full;             // producer arrives with bytes
    uint64_t q_full[kStages], dout_full[kDoutStages];  // producer arrives with bytes
    // Roles that read or write with ordinary instructions arrive by thread, because racecheck does not follow warps.
    // Others arrive by warp.
    uint64_t q_empty[kStages];                 // every thread of P, every warp of dS (thread with kSendsScores)
    uint64_t dout_empty[kDoutStages];          // every thread of dS, every warp of P
    uint64_t p_full[kWarps], p_empty[kWarps];  // the threads of one warp of P arrive, or of dS; the other waits
    uint64_t ds_full[kDsBuffers], ds_empty[kDsBuffers];  // every warp of dS arrives, every warp of dq of both CTAs
    uint64_t ds_other_full[kDsBuffers];                  // a thread of dq arrives, the other CTA sends bytes
    uint64_t dq_full[kDqAdders][kDqBuffers];             // per adder: every warp of dq arrives
    uint64_t dq_empty[kDqBuffers];                       // the thread that has added arrives
    QueryBlockEntry listed[kBlockMask ? kStages : 1];    // block masks: what the stages of q hold
  };

  static __device__ void init_barriers(SharedStorage& smem) {
    mbarrier_init(&smem.tile_full, 1);
    mbarrier_init(&smem.tile_empty, 1);
    init_ring(smem.work_full, 1, smem.work_empty, kWorkReaders);
    mbarrier_init(&smem.work_wanted, 1);
    mbarrier_init(&smem.k_empty, 2 * kWarps);
    mbarrier_init(&smem.v_empty, kWarpgroupThreads);
    mbarrier_init(&smem.k_other_empty, kWarps);
    mbarrier_init(&smem.k_full, 1);
    mbarrier_init(&smem.v_full, 1);
    mbarrier_init(&smem.k_other_full, 1);
    init_ring(smem.q_full, 1, smem.q_empty, kWarpgroupThreads + (kSendsScores ? kWarpgroupThreads : kWarps));
    init_ring(smem.dout_full, 1, smem.dout_empty, kWarpgroupThreads + kWarps);
    init_ring(smem.p_full, 32, smem.p_empty, 32);
    for (int buffer = 0; buffer < kDsBuffers; ++buffer) {
      mbarrier_init(&smem.ds_full[buffer], kWarps);
      mbarrier_init(&smem.ds_empty[buffer], kCtas * kWarps);
      mbarrier_init(&smem.ds_other_full[buffer], 1);
    }
    for (int buffer = 0; buffer < kDqBuffers; ++buffer) {
      for (auto& full : smem.dq_full) mbarrier_init(&full[buffer], kWarps);
      mbarrier_init(&smem.dq_empty[buffer], 1);
    }
    fence_mbarrier_init();
  }
};

}  // namespace flashbwd::sm90::large_head_dim

// Constants of a tile and a dtype: sizes, the layout of shared memory, barriers.
#pragma once

#include "../../common/hopper.cuh"
#include "../../common/philox_fragments.cuh"
#include "../../common/wgmma.cuh"
#include "config.h"
#include "dq_semaphores.cuh"
#include "tile_mask.cuh"
#include "tile_scheduler.cuh"

namespace flashbwd::sm90 {

enum NamedBarrier : uint32_t {
  kConsumersBarrier = 1,  // all consumers: a tile is scrubbed, or halves of the queries exchange their sums
  kWarpgroupBarrier = 2,  // + warpgroup: its 128 threads
  kDqFullBarrier = 4,     // + buffer: all consumers arrive, its store warp waits
  kDsBarrier = 6,         // + 2 * buffer + warpgroup: the other warpgroup arrives, this one waits for its dS
  kScoresBarrier = 10,    // + warpgroup: the other warpgroup arrives, this one waits until that has issued its S
};

constexpr int kDqFullThreads = kConsumerThreads + 32;

// kByHeads: see QueryIterator. kLastWritesDq_: adds are counted, and if the schedule says so, the last one writes dq.
template <typename T_, int kTileIndex, bool kByHeads, bool kLastWritesDq_>
struct Traits {
  using T = T_;
  static constexpr Tile kTile = kTiles[kTileIndex];
  static_assert(!is_large(kTile) && kTile.head_dim == kTile.head_dim_v, "128 keys a CTA, one head dimension");
  static constexpr int kHeadDim = kTile.head_dim;
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kBatchEntries = kTile.batch_entries;  // that share a work tile, each with its own q, k, v, dout
  static constexpr int kColumns = kBatchEntries * kBlockM;   // queries of an iteration
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kStages = kTile.stages;  // of q
  static constexpr int kDoutStages = kTile.dout_stages;
  // dV is issued as soon as P is ready. If P and dS take half of the registers, it is issued after dS.
  static constexpr bool kEarlyDv = kColumns <= 64;
  // Warpgroup 1 issues S of an iteration first, and warpgroup 0 after it; with 64 queries also after dQ of warpgroup 1.
  // Faster at head dimensions 64 and 128, slower at 80 and 96.
  static constexpr bool kOrdersScores = kHeadDim == 64 || kHeadDim == 128;
  // The warps of a warpgroup meet before they write dq: with by_queries because the dQ of all must have read the only
  // dS buffer before a warp overwrites it, at head dimension 128 because the loop is 1 to 2 % faster.
  static constexpr bool kMeetsAtDq = kTile.by_queries || kHeadDim == 128;
  static constexpr bool kEfficientDropout = has(kTile, feature::kEfficientDropout);
  static constexpr bool kDrops = has(kTile, feature::kFlashDropout | feature::kEfficientDropout);
  static constexpr bool kBias = copies_bias(kTile);
  static constexpr bool kBlockMask = has(kTile, feature::kBlockMask);
  static constexpr bool kGenerated = has(kTile, feature::kGenerated);
  static constexpr bool kPlainScores = has_plain_scores(kTile);
  // Pairs of lse that a thread reads before it waits for S, and pairs of delta before dP: 1 % faster. More are slower.
  static constexpr int kEarlyLse = kGenerated || kColumns > 64                        ? 2
                                   : kHeadDim == 128 && !(kBlockMask && kPlainScores) ? 6
                                                                                      : 4;
  static constexpr int kEarlyDelta = 2;
  // Groups of 16 columns of k and v, first operands of S and dP, that a warpgroup keeps in registers: as many as fit
  // without a spill. They are worth 3 % at head dimensions 80 to 128, and less than 1 % at 64. Beside a bias or a
  // generated score_mod none fits.
  static constexpr bool kKeepsStep = kHeadDim == 128 && !kBias && !kGenerated;
  static constexpr int kKeySteps = kHeadDim == 80 || kHeadDim == 96 ? kHeadDim / 16 : kKeepsStep ? 1 : 0;
  static constexpr int kValueSteps = kHeadDim == 80 ? 5 : kHeadDim == 96 ? 3 : 0;
  // The parameter that says whether rows may need zeros is tested before seqlen_q is read from shared memory. Beside
  // dropout or a bias ptxas would spill. Long loops at head dimension 128 are 2 % faster with the delay of the read,
  // even with a block mask, where no row needs zeros. The reason is not known.
  static constexpr bool kDelayHelps = kHeadDim == 128 && kPlainScores && !kLastWritesDq_;
  static constexpr bool kTestsPoisonFirst = !kDelayHelps && !kDrops && !kBias;
  static_assert(kBlockN == 64 * kConsumerWarpgroups, "a consumer warpgroup ends with dk and dv of 64 keys");
  static_assert(kHeadDim % 16 == 0 && kBlockM % 64 == 0, "products take whole steps, tiles of queries whole atoms");
  // A warpgroup has 64 keys and all queries of an iteration, or all keys and 64 queries. Its MMA tiles are 64 keys
  // each, or one tile per batch entry.
  static constexpr bool kByQueries = kTile.by_queries;
  static constexpr int kMmaTiles = kByQueries ? kBlockN / 64 : kBatchEntries;
  static constexpr int kOwnQueries = kByQueries ? 64 : kBlockM;
  // Shared memory holds whole swizzle atoms; products stop at kHeadDim.
  static constexpr int kRowBytes = row_bytes(kTile);
  static constexpr int kAtoms = ceil_div(kHeadDim, kRowBytes / 2);         // of q, k, v, dout
  static constexpr int kGradientAtoms = ceil_div(kHeadDim, kAtomColumns);  // of dq, dk, dv: 64 columns
  static constexpr int kSemaphores = semaphores_of_tile(kTile);
  static constexpr int kDsBuffers = kByQueries ? 1 : 2;  // with kByQueries a warpgroup knows when its own dS is read
  // Each warpgroup computes 64 rows and 64 columns of a dq tile. They are side by side or on top of each other.
  static constexpr int kDqColumnTiles = kGradientAtoms;
  static constexpr int kDqColumns = kHeadDim <= 32 ? 32 : 64;
  // Columns of the last warpgroup: what is left of the head dimension, in boxes of 32.
  static constexpr int kLastDqColumns = kHeadDim <= 64 ? kDqColumns : (kHeadDim - kDqColumns + 31) / 32 * 32;
  static_assert(kColumns / 64 * kDqColumnTiles == kConsumerWarpgroups,
                "each warpgroup computes 64 x 64 elements of dq");
  static_assert(kBatchEntries == 1 || (kBatchEntries == 2 && kBlockM == 64 && kBias && !kDrops),
                "each warpgroup computes dq of one batch entry, and sums of dS");

  static constexpr int kAtomsV = kAtoms;                       // named as in large_head_dim::Traits, for producer.cuh
  static constexpr int kKeyAtomBytes = kBlockN * kRowBytes;    // of k or v
  static constexpr int kQueryAtomBytes = kBlockM * kRowBytes;  // of q or dout
  // An atom of dS is transposed, (kBlockN keys, 64 queries); beside a bias it lies as the bias does, (kColumns,
  // 64 keys).
  static constexpr int kDsAtomBytes = (kBias ? kColumns : kBlockN) * kAtomRowBytes;
  static constexpr int kDsAtoms = (kBias ? kBlockN : kBlockM) / 64;
  static constexpr int kKeyBytes = kAtoms * kKeyAtomBytes;  // per batch entry, as the next two
  static constexpr int kQueryBytes = kAtoms * kQueryAtomBytes;
  static constexpr int kRowValueBytes = kBlockM * 4;
  // From the operands of an MMA tile to those of the next one, and from its keys to those of the next.
  static constexpr int kTileKeyBytes = kBatchEntries > 1 ? kKeyBytes : 64 * kRowBytes;
  static constexpr int kTileQueryBytes = kBatchEntries > 1 ? kQueryBytes : 0;
  static constexpr int kTileKeys = kBatchEntries > 1 ? 0 : 64;

  static_assert(kGradientAtoms <= kDsBuffers * kBlockM / 64, "the dS buffers are too small to stage dk");
  static_assert(!(kBias || kBlockMask) || kStages == kDsBuffers,
                "the stage of q is also the dS buffer of its bias or of the bits of its mask");
  static_assert(!(kBlockMask && kByQueries), "the dS of a warp are 16 keys");

  // dv and dk of a warpgroup leave side by side in the buffer of dq that the last iteration did not use. Larger ones
  // fill a buffer each, and dk waits until TMA has read the last dq.
  static constexpr bool kGradientsShareBuffer = kGradientAtoms == 1;
  static_assert((kGradientsShareBuffer ? 2 : 1) * kGradientAtoms <= 2, "what leaves in a dq buffer fits in its boxes");

  static constexpr int kEarlyIterations = early_iterations(kTile);

  static constexpr bool kLastWritesDq = kLastWritesDq_;
  static_assert(!kLastWritesDq || (last_writes_dq(kTile) && kDqColumns == 64), "a tile of dq is four boxes of sums");

  using WorkTile = sm90::WorkTile<kBlockM, kBlockN, kByHeads, false, kBlockMask, kBatchEntries, kBias>;

  struct alignas(1024) SharedStorage {
    uint8_t k[kBatchEntries * kKeyBytes];                    // (kBlockN, kHeadDim) of each batch entry
    uint8_t v[kBatchEntries * kKeyBytes];                    // (kBlockN, kHeadDim)
    uint8_t q[kStages][kBatchEntries * kQueryBytes];         // (kBlockM, kHeadDim)
    uint8_t dout[kDoutStages][kBatchEntries * kQueryBytes];  // (kBlockM, kHeadDim)
    uint8_t ds[kDsBuffers][kDsAtoms][kDsAtomBytes];          // before dS, the bias or bits of the same iteration
    float dq[kDqAdders][kConsumerWarpgroups][2][64 * 32];    // 64 x 64 per warpgroup, two boxes of 32 columns
    alignas(128) float lse_log2[kStages][kColumns];
    alignas(128) float delta[kDoutStages][kColumns];
    WorkTile work[2];  // this work tile and the next
    SchedulerState scheduler;
    uint64_t work_full[2];          // the scheduler arrives
    uint64_t work_empty[2];         // every thread of the consumers and of the store warps arrives, and the loader
    uint32_t last_adds[kDqAdders];  // of each store warp so far: those that write dq
    uint64_t sums_full[kDqAdders];  // store warps arrive with bytes: sums for the last add
    uint64_t dq_empty[kDqAdders];   // one lane of the store warp arrives
    uint64_t work_wanted;           // the loader arrives: the next work tile may be taken
    uint64_t k_full, v_full;        // producer arrives with bytes
    uint64_t k_empty, v_empty;      // every consumer warp arrives
    uint64_t q_full[kStages], dout_full[kDoutStages];    // producer arrives with bytes
    uint64_t q_empty[kStages], dout_empty[kDoutStages];  // every consumer thread arrives
    DqAdd adds[kDqAdders];                               // of the store warps, if the last add writes dq
    QueryBlockEntry listed[kBlockMask ? kStages : 1];    // block masks: what the stages of q hold
    PhiloxState philox;                                  // kernels with dropout
    uint8_t hidden_keys[kBias ? kConsumerThreads : 1];   // by the key mask: bits of each thread's keys (KeyMask)
  };

  static __device__ void init_barriers(SharedStorage& smem) {
    mbarrier_init(&smem.k_full, 1);
    mbarrier_init(&smem.v_full, 1);
    mbarrier_init(&smem.k_empty, kConsumerThreads / 32);
    mbarrier_init(&smem.v_empty, kConsumerThreads / 32);
    mbarrier_init(&smem.work_wanted, 1);
    for (uint64_t& barrier : smem.sums_full) mbarrier_init(&barrier, 1);
    for (uint64_t& barrier : smem.dq_empty) mbarrier_init(&barrier, 1);
    for (uint32_t& count : smem.last_adds) count = 0;
    init_ring(smem.work_full, 1, smem.work_empty, kConsumerThreads + kDqAdders * 32 + 1);
    init_ring(smem.q_full, 1, smem.q_empty, kConsumerThreads);
    init_ring(smem.dout_full, 1, smem.dout_empty, kConsumerThreads);
    fence_mbarrier_init();
  }
};

}  // namespace flashbwd::sm90

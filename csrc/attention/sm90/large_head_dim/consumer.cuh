// The base class of the warpgroups P and dS.
#pragma once

#include <type_traits>

#include "../kernel_params.h"
#include "../tile_mask.cuh"
#include "traits.cuh"

namespace flashbwd::sm90::large_head_dim {

// The first key of the other CTA of the cluster, relative to this CTA's.
template <typename Traits>
__device__ __forceinline__ int32_t other_keys(int32_t rank) {
  return rank == 0 ? Traits::kBlockN : -Traits::kBlockN;
}

template <typename Traits>
struct Consumer {
  using T = typename Traits::T;
  using SharedStorage = typename Traits::SharedStorage;
  using WorkTile = typename Traits::WorkTile;
  using QueryRing = Ring<Traits::kStages>;
  using DoutRing = Ring<Traits::kDoutStages>;
  using DsRing = Ring<Traits::kDsBuffers>;
  static constexpr int kBlockM = Traits::kBlockM;
  using KeyColumns = KMajorOperand<Traits::kKeyAtomBytes>;
  using QueryColumns = KMajorOperand<Traits::kQueryAtomBytes>;
  using QueryRows = MnMajorOperand<Traits::kQueryAtomBytes>;
  static constexpr bool kFewRegisters = Traits::kHeadDim > 192;
  using Iterator = std::conditional_t<Traits::kBlockMask, ListedIterator<Traits::kStages>,
                                      std::conditional_t<kFewRegisters, SmallQueryIterator<WorkTile>, QueryIterator>>;

  const KernelParams& params;
  SharedStorage& smem;
  const WorkTile& work;
  Iterator it = first_iteration();
  int32_t thread = threadIdx.x % kWarpgroupThreads;
  int32_t warp = thread / 32;
  int32_t lane = thread % 32;
  int32_t pair = lane % 4 * 2;  // first of this thread's two adjacent columns in each 8 of an accumulator

  __device__ __forceinline__ Iterator first_iteration() const {
    if constexpr (Traits::kBlockMask) {
      return TileMask<Traits>::first_iteration(smem, work);
    } else {
      return Iterator(work);
    }
  }

  // Read from shared memory each time, because registers are few.
  __device__ __forceinline__ bool is_last() const { return it.index + 1 == work.first_index + work.iterations; }

  // True if rows of this tile belong to no sequence, and must be zeroed before a product reads them. seqlen_k and
  // seqlen_q come from shared memory, so the parameter is tested first.
  __device__ bool has_poisoned_keys() const { return may_be_poisoned() && valid_keys() < Traits::kBlockN; }
  __device__ bool has_poisoned_queries() const { return may_be_poisoned() && valid_queries() < kBlockM; }
  // The first key of this thread within the tile of this CTA.
  __device__ __forceinline__ int32_t first_own_key() const { return warp * 16 + lane / 4; }
  __device__ int32_t valid_keys() const { return max(work.visibility.seqlen_k - work.first_key, 0); }
  __device__ int32_t valid_queries() const { return work.visibility.seqlen_q - it.query_block() * kBlockM; }
  // With a block mask, tensors are dense, and TMA loads zeros past their end.
  __device__ bool may_be_poisoned() const { return !Traits::kBlockMask && params.rows_may_be_poisoned; }

  // Block masks: a bit for each score of this thread (BitMask). The loader writes the entry of a stage before it loads
  // q. A tile of bits has the words of both CTAs, as tile_mask.cuh orders them.
  __device__ __forceinline__ uint32_t load_visible() const {
    const int32_t tile = it.entry().bits;
    const int64_t word = int64_t{tile} * kConsumerThreads + rank_in_cluster() * kWarpgroupThreads + thread;
    return tile >= 0 ? __ldg(params.attention.block_mask.bits + word) : ~0u;
  }

  // Both warpgroups come here before either reads dout of an iteration.
  __device__ __forceinline__ void wait_dout() {
    const int32_t stage = DoutRing::stage(it.index);
    mbarrier_wait(&smem.dout_full[stage], DoutRing::phase(it.index));
    if (has_poisoned_queries()) {
      zero_invalid_rows<Traits::kAtomsV, Traits::kQueryAtomBytes, 2 * kWarpgroupThreads>(
          smem.dout[stage], valid_queries(), kScrubBarrier);
    }
  }
};

}  // namespace flashbwd::sm90::large_head_dim

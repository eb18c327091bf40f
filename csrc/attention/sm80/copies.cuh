// Takes work tiles and copies their operands to shared memory. The threads that compute also copy: one thread finds the
// source of the next tiles, and all threads start the copies.
#pragma once

#include <cstdint>

#include "key_mask.cuh"
#include "loads.cuh"
#include "traits.cuh"

namespace flashbwd::sm80 {

template <typename Traits>
struct Copies {
  using T = typename Traits::T;
  using SharedStorage = typename Traits::SharedStorage;
  using WorkTile = typename Traits::WorkTile;
  using QueryIteration = typename Traits::QueryIteration;

  // Called by one thread: writes the next nonempty work tile, or none, to next_work, and the source of its first tiles.
  static __device__ __forceinline__ void fetch_work_tile(const KernelParams& params, SharedStorage& smem) {
    WorkTile& work = smem.next_work;
    smem.source.exists = false;
    if (Traits::kWholeHeads && smem.work.exists && smem.work.key_block + 1 < params.schedule.key_blocks) {
      work = smem.work;
      work.set_key_block(work.key_block + 1, Traits::kBlockM, Traits::kBlockN, 0, 1);
      if (work.num_iterations() > 0) set_source(params, smem, work, QueryIteration(work));
      return;
    }
    do {
      // CTAs take work tiles in increasing order, so no CTA waits for a work tile that no CTA has taken yet.
      auto index = static_cast<uint32_t>(atomicAdd(params.work_tile_counter, 1));
      if constexpr (Traits::kWholeHeads) index *= params.schedule.key_blocks;
      if (index >= params.schedule.num_work_tiles()) {
        work.exists = false;
        return;
      }
      work = WorkTile(params, index, Traits::kBlockM, Traits::kBlockN);
    } while (!work.exists);
    if (work.num_iterations() > 0) set_source(params, smem, work, QueryIteration(work));
  }

  // Whether the first tiles of the next work tile are loaded during the last iteration of this one.
  static __device__ __forceinline__ bool loads_ahead(const KernelParams& params, const SharedStorage& smem) {
    return (Traits::kRefills || (Traits::kLoadsAhead && params.schedule.loads_ahead)) &&
           smem.work.num_iterations() > 0 && smem.source.exists;
  }
  // Called by one thread: switches to the next work tile's stage and, if `loaded`, to its k and v buffers.
  static __device__ __forceinline__ void switch_buffers(SharedStorage& smem, bool loaded) {
    smem.first_stage = next_stage(smem);
    if (loaded) smem.keys_offset = static_cast<int32_t>(sizeof(SharedStorage)) - smem.keys_offset;
  }

  // Starts the copies of the first tiles of the next work tile, except those that the last iteration has already
  // started. Requires that all threads are done with the tiles of the current one.
  static __device__ __forceinline__ void start_next(const KernelParams& params, SharedStorage& smem, bool refilled) {
    const WorkTile& work = smem.next_work;
    if (work.num_iterations() == 0) return;
    const int32_t stage = Traits::kStages > 1 ? next_stage(smem) : 0;
    load_keys(params, smem, work, keys_offset(smem));
    if (!refilled) {
      load_queries(params, smem, stage);
      load_values(params, smem, work, keys_offset(smem));
      load_douts(params, smem, stage);
    }
    copy_async_commit();
    if (threadIdx.x == 0) smem.iterations[stage] = QueryIteration(work);
  }

  static __device__ __forceinline__ int32_t first_stage(const SharedStorage& smem) {
    return Traits::kStages > 1 ? smem.first_stage : 0;
  }
  // The stage of the first iteration of the next work tile.
  static __device__ __forceinline__ int32_t next_stage(const SharedStorage& smem) {
    return (smem.first_stage + smem.work.num_iterations()) % 2;
  }
  static __device__ __forceinline__ int32_t keys_offset(const SharedStorage& smem) {
    return Traits::kLoadsAhead ? smem.keys_offset : 0;
  }

  // Two stages: starts the copies of the tiles of iteration `ring_index` + 1, or with kLoadsAhead those of the next
  // work tile. Requires that all threads are done with the previous tiles of that stage.
  static __device__ __forceinline__ void start_copies(const KernelParams& params, SharedStorage& smem,
                                                      int32_t ring_index, bool more) {
    const int32_t stage = (ring_index + 1) % 2;
    const bool ahead = Traits::kLoadsAhead && !more && loads_ahead(params, smem);
    if (more || ahead) {
      load_queries(params, smem, stage);
      load_douts(params, smem, stage);
    }
    if (ahead) {
      const int32_t offset = static_cast<int32_t>(sizeof(SharedStorage)) - smem.keys_offset;
      load_keys(params, smem, smem.next_work, offset);
      load_values(params, smem, smem.next_work, offset);
      if (threadIdx.x == 0) smem.iterations[stage] = QueryIteration(smem.next_work);
    }
    copy_async_commit();
    if (threadIdx.x == 0 && more) smem.iterations[stage] = QueryIteration(smem.iterations[ring_index % 2], smem.work);
  }

  // Copies the keys of `work` to `offset` bytes after smem.k.
  static __device__ __forceinline__ void load_keys(const KernelParams& params, SharedStorage& smem,
                                                   const WorkTile& work, int32_t offset) {
    const HeadsView& k = params.attention.k;
    if constexpr (Traits::kVariant == Variant::kAllFeatures) {
      const ShownKeys shown(params.attention.key_mask, work.batch, work.key_block * Traits::kBlockN);
      load_key_rows(k, params.attention.head_dim, params.k_aligned, work, smem.k + offset, shown);
    } else {
      load_key_rows(k, params.attention.head_dim, params.k_aligned, work, smem.k + offset, AllRows());
    }
  }
  // Copies the values of `work` to `offset` bytes after smem.v.
  static __device__ __forceinline__ void load_values(const KernelParams& params, SharedStorage& smem,
                                                     const WorkTile& work, int32_t offset) {
    load_key_rows(params.attention.v, params.attention.head_dim_v, params.v_aligned, work, smem.v + offset, AllRows());
  }
  template <typename Wanted>
  static __device__ __forceinline__ void load_key_rows(const HeadsView& view, int32_t columns, bool aligned,
                                                       const WorkTile& work, uint8_t* tile, const Wanted& wanted) {
    const int32_t first = work.key_block * Traits::kBlockN;
    load_tile<Traits, Traits::kBlockN>(
        tile, head_rows<const T>(view, work.batch, work.head_kv, work.sequence.begin_k + first), view.seq_stride,
        work.sequence.seqlen_k - first, columns, aligned, wanted);
  }

  // Called by one thread: sets the source of the tiles of `iteration`.
  static __device__ __forceinline__ void set_source(const KernelParams& params, SharedStorage& smem,
                                                    const WorkTile& work, const QueryIteration& iteration) {
    const AttentionBackwardParams& p = params.attention;
    const int32_t first = iteration.query_block(work) * Traits::kBlockM;
    const int64_t row = params.lse_delta.index(work.batch, iteration.head, work.sequence.begin_q) + first;
    smem.source.q = head_rows<const T>(p.q, work.batch, iteration.head, work.sequence.begin_q + first);
    smem.source.dout = head_rows<const T>(p.dout, work.batch, iteration.head, work.sequence.begin_q + first);
    smem.source.lse = params.lse_delta.lse_log2 + row;
    smem.source.delta = params.lse_delta.delta + row;
    smem.source.rows = work.sequence.seqlen_q - first;
    smem.source.exists = true;
  }

  // Called by one thread: moves the source from iteration `index` to the next iteration, or to the next work tile's
  // first iteration.
  static __device__ __forceinline__ void advance(const KernelParams& params, SharedStorage& smem, int32_t index) {
    if (index + 1 < smem.work.num_iterations()) {
      advance_source(params, smem, smem.work, smem.iterations[(index + first_stage(smem)) % 2]);
    } else {
      fetch_work_tile(params, smem);
    }
  }

  // Moves the source by the heads and rows between two iterations. Both strides are constant, so additions suffice.
  static __device__ __forceinline__ void advance_source(const KernelParams& params, SharedStorage& smem,
                                                        const WorkTile& work, const QueryIteration& iteration) {
    const QueryIteration next(iteration, work);
    const int32_t heads = next.head - iteration.head;
    const int32_t rows = (next.query_block(work) - iteration.query_block(work)) * Traits::kBlockM;
    const AttentionBackwardParams& p = params.attention;
    smem.source.q += heads * p.q.head_stride + rows * p.q.seq_stride;
    smem.source.dout += heads * p.dout.head_stride + rows * p.dout.seq_stride;
    const int64_t offset = heads * params.lse_delta.head_stride + rows;
    smem.source.lse += offset;
    smem.source.delta += offset;
    smem.source.rows -= rows;
  }

  static __device__ __forceinline__ void load_queries(const KernelParams& params, SharedStorage& smem, int32_t stage) {
    load_tile<Traits, Traits::kBlockM>(smem.q[stage], smem.source.q, params.attention.q.seq_stride, smem.source.rows,
                                       params.attention.head_dim, params.q_aligned);
  }

  // Also copies lse and delta of the same rows.
  static __device__ __forceinline__ void load_douts(const KernelParams& params, SharedStorage& smem, int32_t stage) {
    load_tile<Traits, Traits::kBlockM>(smem.dout[stage], smem.source.dout, params.attention.dout.seq_stride,
                                       smem.source.rows, params.attention.head_dim_v, params.dout_aligned);
    constexpr int kVectors = Traits::kBlockM / 4;
    static_assert(2 * kVectors <= Traits::kThreads, "each thread copies at most one vector");
    if (threadIdx.x < 2 * kVectors) {
      const bool is_delta = threadIdx.x >= kVectors;
      const int32_t vector = threadIdx.x % kVectors * 4;
      copy_async_16(smem_address((is_delta ? smem.delta : smem.lse)[stage] + vector),
                    (is_delta ? smem.source.delta : smem.source.lse) + vector, 16);
    }
  }
};

}  // namespace flashbwd::sm80

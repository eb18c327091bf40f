// The query loop of one CTA for its key block.
//
// s^T = k q^T and dp^T = v dout^T are computed transposed, so that a warp's p^T and ds^T are already operand A of `dv
// += p^T dout` and `dk += ds^T q`. dv and dk stay in registers. ds^T goes through shared memory for `dq = ds k`, which
// is added to an fp32 accumulator in global memory. docs/kernels/attention_sm80.md draws one step.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../../common/mma.cuh"
#include "config.h"
#include "dq.cuh"
#include "features.cuh"
#include "loads.cuh"
#include "split_barrier.cuh"

namespace flashbwd::sm80 {

template <typename T_, int kTileIndex, Extras kExtras_, typename M_ = Mma<T_>>
struct Traits {
  using T = T_;
  using M = M_;
  static constexpr Tile kTile = kTiles[kTileIndex];
  static constexpr Extras kExtras = kExtras_;
  static constexpr bool kWholeHeads = kExtras == Extras::kWholeHeads;
  static constexpr bool kBiasAlone = kExtras == Extras::kBias || kExtras == Extras::kSharedBias;
  static constexpr bool kFeatures = kBiasAlone || kExtras == Extras::kAll;
  static constexpr int kHeadDim = kTile.head_dim;
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kWarpsN = kTile.warps_n;
  static constexpr int kWarpsS = kTile.warps_s;
  static constexpr int kWarpsQ = kTile.warps_q;
  static constexpr int kWarpsD = kTile.warps() / kWarpsQ;
  static constexpr int kThreads = kTile.threads();
  static constexpr int kStages = kTile.stages;
  static constexpr int kRowBytes = kTile.row_bytes();
  static constexpr int kScoreRowBytes = kBlockM * static_cast<int>(sizeof(T));
  static constexpr bool kLoadsAhead = loads_ahead(kTile, kExtras);
  static constexpr bool kRefills = refills(kTile, kExtras);
  static constexpr bool kFirstStores = kExtras == Extras::kFirstStores;
  static constexpr bool kExchange = kWarpsS > 1;  // several warps share keys and exchange p and ds

  static constexpr int kKeyTiles = kBlockN / kWarpsN / 16;       // of s, dk, dv: 16 keys each
  static constexpr int kScoreTiles = kBlockM / kWarpsS / 8;      // of s: 8 queries each
  static constexpr int kGradientTiles = kHeadDim / kWarpsS / 8;  // of dk, dv: 8 columns each
  static constexpr int kQueryTiles = kBlockM / kWarpsQ / 16;     // of dq: 16 queries each
  // dq is computed in passes over its columns if dk, dv and dq of all columns would need too many registers.
  static constexpr int kDqPasses = (2 * kBlockN + kBlockM) * kHeadDim / kThreads >= 192 ? 2 : 1;
  static constexpr int kColumnTiles = kHeadDim / kWarpsD / 8 / kDqPasses;  // of dq: 8 columns each
  static_assert(kTile.element_bytes == sizeof(T), "the tile is for elements of another size");
  static_assert(kKeyTiles * kWarpsN * 16 == kBlockN && kQueryTiles * kWarpsQ * 16 == kBlockM, "whole rows of tiles");
  static_assert(kScoreTiles % 2 == 0 && kScoreTiles * kWarpsS * 8 == kBlockM, "queries in pairs of 8");
  static_assert(kGradientTiles % 2 == 0 && kGradientTiles * kWarpsS * 8 == kHeadDim, "columns in pairs of 8");
  static_assert(kColumnTiles % 2 == 0 && kColumnTiles * kWarpsD * 8 * kDqPasses == kHeadDim, "columns in pairs of 8");
  static_assert(kRowPadding % kBlockM == 0, "the statistics of a tile are one aligned run");

  static __device__ __forceinline__ int32_t lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int32_t warp() { return threadIdx.x / 32; }
  static __device__ __forceinline__ int32_t warp_n() { return warp() / kWarpsS; }
  static __device__ __forceinline__ int32_t warp_s() { return warp() % kWarpsS; }
  static __device__ __forceinline__ int32_t warp_q() { return warp() / kWarpsD; }
  static __device__ __forceinline__ int32_t warp_d() { return warp() % kWarpsD; }

  struct SharedStorage {
    alignas(1024) uint8_t k[kBlockN * kRowBytes];
    alignas(1024) uint8_t v[kBlockN * kRowBytes];
    alignas(1024) uint8_t q[kStages][kBlockM * kRowBytes];
    alignas(1024) uint8_t dout[kStages][kBlockM * kRowBytes];
    alignas(1024) uint8_t ds[kBlockN * kScoreRowBytes];                  // (kBlockN, kBlockM)
    alignas(1024) uint8_t p[kExchange ? kBlockN * kScoreRowBytes : 16];  // (kBlockN, kBlockM)
    alignas(16) float lse[kStages][kBlockM];
    alignas(16) float delta[kStages][kBlockM];
    // State that threads read from shared memory when they need it, to keep registers free for accumulators.
    WorkTile work, next_work;
    Step steps[2];  // the current step and the next one, alternating
    Source<T> source;
    FirstAdd first_add;  // of the current step
    // Two stages: the stage of the work tile's first step, that is the number of earlier steps modulo 2.
    int32_t first_stage;
    // kLoadsAhead: the byte offset of this work tile's keys and values from `k` and `v`, 0 or sizeof(SharedStorage).
    int32_t keys_offset;
    // Two stages, each completes once per step when all threads have arrived: the step's tiles are loaded; ds (and p)
    // of all warps are stored; all threads are done with the step's tiles and ds.
    SplitBarrier tiles_loaded, scores_stored, done;
  };
};

template <typename Traits>
struct Mainloop {
  using T = typename Traits::T;
  using M = typename Traits::M;
  using SharedStorage = typename Traits::SharedStorage;
  using Gradient = float[Traits::kKeyTiles][Traits::kGradientTiles][4];
  using DqSums = typename DqRows<Traits>::Tile;
  using ScoreTile = typename ScorePlace<Traits>::Accumulator;
  using ScoreWork = std::conditional_t<Traits::kFeatures, Features<Traits>, Scores<Traits>>;
  static constexpr int kHeadSteps = Traits::kHeadDim / M::kStep;    // of s and dp
  static constexpr int kQuerySteps = Traits::kBlockM / M::kStep;    // of dk and dv
  static constexpr int kWarpSteps = kQuerySteps / Traits::kWarpsS;  // of a warp's own queries
  using Held = typename M::Held[Traits::kKeyTiles][kWarpSteps];
  // Unrolling of the products for s and dp, and of the others. Fragments of fp32 are twice as large, and their products
  // take twelve times as long.
  static constexpr int kUnrollKeys = sizeof(T) == 2 ? 16 : 2;
  static constexpr int kUnroll = Traits::kTile.head_dim <= 128 || sizeof(T) == 2 ? kUnrollKeys : 1;
  // Operands of dq loaded at a time. The three products of an fp32 tile depend on each other, so more tiles interleave.
  static constexpr int kDqPairs = sizeof(T) == 4 && Traits::kColumnTiles % 4 == 0 ? 2 : 1;

  // Whether a warp keeps its own part of p and ds in registers as an operand. For fp32 this takes too many registers.
  static constexpr bool kHoldsOwn = sizeof(T) == 2;

  // Called by one thread: writes the next nonempty work tile, or none, to next_work, and the source of its first tiles.
  static __device__ __forceinline__ void fetch_work_tile(const KernelParams& params, SharedStorage& smem) {
    WorkTile& work = smem.next_work;
    smem.source.exists = false;
    if (Traits::kWholeHeads && smem.work.exists && smem.work.key_block + 1 < params.key_blocks) {
      work = smem.work;
      work.set_key_block(work.key_block + 1, Traits::kBlockM, Traits::kBlockN, 0, 1);
      if (work.steps() > 0) set_source(params, smem, work, Step(work));
      return;
    }
    do {
      // Taken in increasing order, so no CTA waits for a work tile that has not been taken yet.
      auto index = static_cast<uint32_t>(atomicAdd(params.work_tile_counter, 1));
      if constexpr (Traits::kWholeHeads) index *= params.key_blocks;
      if (index >= params.num_work_tiles) {
        work.exists = false;
        return;
      }
      work = WorkTile(params, index, Traits::kBlockM, Traits::kBlockN);
    } while (!work.exists);
    if (work.steps() > 0) set_source(params, smem, work, Step(work));
  }

  // Whether the first tiles of the next work tile are loaded during the last step of this one.
  static __device__ __forceinline__ bool loads_ahead(const KernelParams& params, const SharedStorage& smem) {
    return (Traits::kRefills || (Traits::kLoadsAhead && params.loads_ahead)) && smem.work.steps() > 0 &&
           smem.source.exists;
  }
  // Called by one thread: switches to the next work tile's stage and, if `loaded`, to its k and v buffers.
  static __device__ __forceinline__ void switch_buffers(SharedStorage& smem, bool loaded) {
    smem.first_stage = next_stage(smem);
    if (loaded) smem.keys_offset = static_cast<int32_t>(sizeof(SharedStorage)) - smem.keys_offset;
  }

  // Starts the copies of the first tiles of the next work tile, except those that the last step has already started.
  // Requires that all threads are done with the tiles of the current one.
  static __device__ __forceinline__ void start_next(const KernelParams& params, SharedStorage& smem, bool refilled) {
    const WorkTile& work = smem.next_work;
    if (work.steps() == 0) return;
    const int32_t stage = Traits::kStages > 1 ? next_stage(smem) : 0;
    load_keys(params, smem, work, keys_offset(smem));
    if (!refilled) {
      load_queries(params, smem, stage);
      load_values(params, smem, work, keys_offset(smem));
      load_douts(params, smem, stage);
    }
    copy_async_commit();
    if (threadIdx.x == 0) smem.steps[stage] = Step(work);
  }

  // Runs the query loop of smem.work, whose first copies have been started: sums dk and dv, starting at zero, and adds
  // dq. Also fetches the next work tile.
  static __device__ __forceinline__ void run(const KernelParams& params, SharedStorage& smem, Gradient& dk,
                                             Gradient& dv) {
    const WorkTile& work = smem.work;
#pragma unroll
    for (int mt = 0; mt < Traits::kKeyTiles; ++mt) {
#pragma unroll
      for (int nt = 0; nt < Traits::kGradientTiles; ++nt) {
#pragma unroll
        for (int e = 0; e < 4; ++e) dk[mt][nt][e] = dv[mt][nt][e] = 0.f;
      }
    }
    if (work.steps() == 0) {
      if (threadIdx.x == 0) fetch_work_tile(params, smem);
      return;
    }

    const AttentionBackwardParams& p = params.attention;
    ScoreWork scores(params, work);
    if constexpr (Traits::kStages > 1) {
      if (threadIdx.x == 0) advance(params, smem, 0);
      copy_async_wait<0>();
      smem.tiles_loaded.arrive();
    }

    // Plain attention rereads this from shared memory, which saves a register.
    const int32_t all_steps = work.steps();
    const auto steps = [&] { return Traits::kFeatures ? all_steps : work.steps(); };
#pragma unroll 1
    for (int32_t index = 0; index < steps(); ++index) {
      const int32_t place = index + first_stage(smem);
      const int32_t stage = place % Traits::kStages;
      const uint32_t phase = place % 2;
      const Step& step = smem.steps[place % 2];
      const bool more = index + 1 < steps();
      if constexpr (Traits::kStages > 1) {
        smem.tiles_loaded.wait(phase);  // and all warps are done with p of the previous step
        if constexpr (!Traits::kExchange) smem.done.wait(phase ^ 1);
      } else {
        copy_async_wait<0>();
        // this step's tiles and the next source are ready; all threads are done with the previous step
        __syncthreads();
      }
      const int32_t query_block = step.query_block(work);
      uint8_t* const bias = Traits::kExchange ? smem.p : smem.ds;
      if constexpr (Traits::kFeatures) scores.load_bias(step.head, query_block, bias);
      if constexpr (Traits::kStages == 1) {
        if (threadIdx.x == 0) {
          if constexpr (Traits::kFirstStores) {
            if (index > 0) smem.first_add.release();
            smem.first_add.find(params, work, step.head, query_block, Traits::kBlockM, Traits::kBlockN);
          }
          if (more) smem.steps[(place + 1) % 2] = Step(step, work);
          advance(params, smem, index);
        }
      }

      if constexpr (Traits::kFeatures) scores.draw_mask(step.head, query_block);
      ScoreTile s = {}, dp = {};
      multiply_keys<typename M::Scores>(smem.k + keys_offset(smem), smem.q[stage], s);
      if constexpr (Traits::kStages > 1) {
        if constexpr (Traits::kExchange) smem.done.wait(phase ^ 1);  // all threads are done with the previous step
        start_copies(params, smem, place, more);
      }
      multiply_keys<M>(smem.v + keys_offset(smem), smem.dout[stage], dp);
      if constexpr (Traits::kFeatures) {
        scores.template apply<(Traits::kStages > 1 ? 1 : 0)>(step.head, query_block, smem.lse[stage], smem.delta[stage],
                                                             bias, smem.ds, s, dp);
      } else {
        scores.apply(query_block, smem.lse[stage], smem.delta[stage], s, dp);
      }
      Held p_held, ds_held;
      hold(s, p_held);
      if constexpr (Traits::kExtras == Extras::kSharedBias) {
        // First the work that uses p: the sums of the bias gradient need its registers.
        store_scores(smem.p, p_held);
        typename ScoreWork::Sums sums = {};
        scores.load_sums(step.head, query_block, sums);
        add_own(p_held, smem.dout[stage], dv);
        scores.add_gradient(step.head, query_block, smem.ds, dp, sums);
      }
      hold(dp, ds_held);
      store_scores(smem.ds, ds_held);
      if constexpr (Traits::kExtras == Extras::kAll) scores.finish_tile(step.head, query_block, smem.ds);
      if constexpr (Traits::kExchange && Traits::kExtras != Extras::kSharedBias) store_scores(smem.p, p_held);
      if constexpr (Traits::kStages > 1) smem.scores_stored.arrive();
      if constexpr (Traits::kExtras == Extras::kBias) scores.finish_tile(step.head, query_block, smem.ds);
      if constexpr (Traits::kExtras != Extras::kSharedBias) add_own(p_held, smem.dout[stage], dv);
      DqSums dq = {};
      if constexpr (Traits::kStages > 1) {
        // dv and dk need p and ds only from the warps that share this warp's keys.
        if constexpr (Traits::kExchange) named_barrier(1 + Traits::warp_n(), Traits::kWarpsS * 32);
        add_others(smem.p, smem.dout[stage], dv);
        add_own(ds_held, smem.q[stage], dk);
        add_others(smem.ds, smem.q[stage], dk);
        if (more) {
          copy_async_wait<0>();
          smem.tiles_loaded.arrive();
        }
        // Recomputing the phase saves a register, except with the sums of a shared bias.
        smem.scores_stored.wait(Traits::kExtras == Extras::kSharedBias ? phase : (index + first_stage(smem)) % 2);
        if constexpr (Traits::kExtras == Extras::kSharedBias) scores.release(step.head, query_block);
        if constexpr (Traits::kWholeHeads) DqTile<Traits>(params, work, step.head, query_block).load(dq);  // for add_dq
        if (threadIdx.x == 0 && more) advance(params, smem, index + 1);
        // Its reductions complete during the products of the next step.
        add_dq(params, smem, work, step.head, query_block, dq);
        smem.done.arrive();
      } else {
        __syncthreads();  // ds (and p) of all warps are stored; all threads are done with v
        add_others(smem.p, smem.dout[stage], dv);
        if constexpr (Traits::kExchange) __syncthreads();  // all threads are done with dout
        if (Traits::kRefills && !more && smem.source.exists) load_values(params, smem, smem.next_work, 0);
        if (Traits::kRefills ? smem.source.exists : more) load_douts(params, smem, 0);
        add_own(ds_held, smem.q[stage], dk);
        add_others(smem.ds, smem.q[stage], dk);
        if (Traits::kFirstStores && threadIdx.x == 0) smem.first_add.wait();
        __syncthreads();  // all threads are done with q, and may store or add dq
        if (Traits::kRefills ? smem.source.exists : more) load_queries(params, smem, 0);
        copy_async_commit();
        add_dq(params, smem, work, step.head, query_block, dq);  // while the copies run
      }
    }
#pragma unroll
    for (int mt = 0; mt < Traits::kKeyTiles; ++mt) {
#pragma unroll
      for (int nt = 0; nt < Traits::kGradientTiles; ++nt) {
#pragma unroll
        for (int e = 0; e < 4; ++e) dk[mt][nt][e] *= p.softmax_scale;
      }
    }
  }

 protected:
  static __device__ __forceinline__ int32_t first_stage(const SharedStorage& smem) {
    return Traits::kStages > 1 ? smem.first_stage : 0;
  }
  // The stage of the first step of the next work tile.
  static __device__ __forceinline__ int32_t next_stage(const SharedStorage& smem) {
    return (smem.first_stage + smem.work.steps()) % 2;
  }
  static __device__ __forceinline__ int32_t keys_offset(const SharedStorage& smem) {
    return Traits::kLoadsAhead ? smem.keys_offset : 0;
  }

  // Two stages: starts the copies of the tiles of the step after `place`, or with kLoadsAhead those of the next work
  // tile. Requires that all threads are done with the previous tiles of that stage.
  static __device__ __forceinline__ void start_copies(const KernelParams& params, SharedStorage& smem, int32_t place,
                                                      bool more) {
    const int32_t stage = (place + 1) % 2;
    const bool ahead = Traits::kLoadsAhead && !more && loads_ahead(params, smem);
    if (more || ahead) {
      load_queries(params, smem, stage);
      load_douts(params, smem, stage);
    }
    if (ahead) {
      const int32_t offset = static_cast<int32_t>(sizeof(SharedStorage)) - smem.keys_offset;
      load_keys(params, smem, smem.next_work, offset);
      load_values(params, smem, smem.next_work, offset);
      if (threadIdx.x == 0) smem.steps[stage] = Step(smem.next_work);
    }
    copy_async_commit();
    if (threadIdx.x == 0 && more) smem.steps[stage] = Step(smem.steps[place % 2], smem.work);
  }

  // Copies the keys of `work` to `offset` bytes after smem.k.
  static __device__ __forceinline__ void load_keys(const KernelParams& params, SharedStorage& smem,
                                                   const WorkTile& work, int32_t offset) {
    load_key_rows(params.attention.k, params.attention.head_dim, params.k_aligned, work, smem.k + offset);
  }
  // Copies the values of `work` to `offset` bytes after smem.v.
  static __device__ __forceinline__ void load_values(const KernelParams& params, SharedStorage& smem,
                                                     const WorkTile& work, int32_t offset) {
    load_key_rows(params.attention.v, params.attention.head_dim_v, params.v_aligned, work, smem.v + offset);
  }
  static __device__ __forceinline__ void load_key_rows(const HeadsView& view, int32_t columns, bool aligned,
                                                       const WorkTile& work, uint8_t* tile) {
    const int32_t first = work.key_block * Traits::kBlockN;
    load_tile<Traits, Traits::kBlockN>(
        tile, head_rows<const T>(view, work.batch, work.head_kv, work.sequence.begin_k + first), view.seq_stride,
        work.sequence.seqlen_k - first, columns, aligned);
  }

  // Called by one thread: sets the source of the tiles of `step`.
  static __device__ __forceinline__ void set_source(const KernelParams& params, SharedStorage& smem,
                                                    const WorkTile& work, const Step& step) {
    const AttentionBackwardParams& p = params.attention;
    const int32_t first = step.query_block(work) * Traits::kBlockM;
    const int64_t row = params.statistics.index(work.batch, step.head, work.sequence.begin_q) + first;
    smem.source.q = head_rows<const T>(p.q, work.batch, step.head, work.sequence.begin_q + first);
    smem.source.dout = head_rows<const T>(p.dout, work.batch, step.head, work.sequence.begin_q + first);
    smem.source.lse = params.statistics.lse_log2 + row;
    smem.source.delta = params.statistics.delta + row;
    smem.source.rows = work.sequence.seqlen_q - first;
    smem.source.exists = true;
  }

  // Called by one thread: moves the source from step `index` to the next step, or to the next work tile's first step.
  static __device__ __forceinline__ void advance(const KernelParams& params, SharedStorage& smem, int32_t index) {
    if (index + 1 < smem.work.steps()) {
      advance_source(params, smem, smem.work, smem.steps[(index + first_stage(smem)) % 2]);
    } else {
      fetch_work_tile(params, smem);
    }
  }

  // Heads and rows have constant strides, so additions suffice.
  static __device__ __forceinline__ void advance_source(const KernelParams& params, SharedStorage& smem,
                                                        const WorkTile& work, const Step& step) {
    const Step next(step, work);
    const int32_t heads = next.head - step.head;
    const int32_t rows = (next.query_block(work) - step.query_block(work)) * Traits::kBlockM;
    const AttentionBackwardParams& p = params.attention;
    smem.source.q += heads * p.q.head_stride + rows * p.q.seq_stride;
    smem.source.dout += heads * p.dout.head_stride + rows * p.dout.seq_stride;
    const int64_t statistics = heads * params.statistics.head_stride + rows;
    smem.source.lse += statistics;
    smem.source.delta += statistics;
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
    constexpr int kPieces = Traits::kBlockM / 4;
    static_assert(2 * kPieces <= Traits::kThreads, "a thread a piece");
    if (threadIdx.x < 2 * kPieces) {
      const bool is_delta = threadIdx.x >= kPieces;
      const int32_t piece = threadIdx.x % kPieces * 4;
      copy_async_16(smem_address((is_delta ? smem.delta : smem.lse)[stage] + piece),
                    (is_delta ? smem.source.delta : smem.source.lse) + piece, 16);
    }
  }

  // c (keys, queries) += keys (kBlockN, kHeadDim) * queries (kBlockM, kHeadDim)^T, the part of this warp.
  template <typename Products>
  static __device__ __forceinline__ void multiply_keys(const uint8_t* keys, const uint8_t* queries, ScoreTile& c) {
    if constexpr (Products::kChain == 0) {
      add_products<Products, kUnrollKeys>(keys, queries, c, [](int) {});
    } else {
      ScoreTile chain = {};
      multiply_keys<Products>(keys, queries, c, chain);
      end_chain(chain, c);
    }
  }

  // The same if the tensor core chains several steps. `chain` has the sum of the steps that c does not include yet.
  template <typename Products>
  static __device__ __forceinline__ void multiply_keys(const uint8_t* keys, const uint8_t* queries, ScoreTile& c,
                                                       ScoreTile& chain) {
    add_products<Products, Products::kChain>(keys, queries, chain, [&](int step) {
      if (Products::ends_chain(step)) end_chain(chain, c);
    });
  }

  // Calls after_step(k) after each step of the head dimension. Unrolled kInFlight times.
  template <typename Products, int kInFlight, typename F>
  static __device__ __forceinline__ void add_products(const uint8_t* keys, const uint8_t* queries, ScoreTile& c,
                                                      const F& after_step) {
    const int32_t lane = Traits::lane();
    const typename Products::template RowsA<Traits::kRowBytes, kHeadSteps> rows_a(
        smem_address(keys), lane, Traits::warp_n() * Traits::kKeyTiles * 16);
    const typename Products::template RowsB<Traits::kRowBytes> rows_b(smem_address(queries), lane,
                                                                      Traits::warp_s() * Traits::kScoreTiles * 8);
#pragma unroll(kInFlight)
    for (int k = 0; k < kHeadSteps; ++k) {
      typename Products::A a[Traits::kKeyTiles];
#pragma unroll
      for (int mt = 0; mt < Traits::kKeyTiles; ++mt) a[mt] = rows_a.load(mt * 16, k);
#pragma unroll
      for (int nt = 0; nt < Traits::kScoreTiles; nt += 2) {
        const typename Products::B b[1] = {rows_b.load(nt * 8, k)};
#pragma unroll
        for (int mt = 0; mt < Traits::kKeyTiles; ++mt) Products::multiply(c[mt] + nt, a[mt], b);
      }
      after_step(k);
    }
  }

  // Adds `chain` to `c` and starts a new chain at zero.
  static __device__ __forceinline__ void end_chain(ScoreTile& chain, ScoreTile& c) {
    ScorePlace<Traits>::for_each([&](int mt, int nt, int e) {
      c[mt][nt][e] += chain[mt][nt][e];
      chain[mt][nt][e] = 0.f;
    });
  }

  static __device__ __forceinline__ void hold(const ScoreTile& c, Held& held) {
#pragma unroll
    for (int mt = 0; mt < Traits::kKeyTiles; ++mt) {
#pragma unroll
      for (int k = 0; k < kWarpSteps; ++k) held[mt][k] = M::hold(c[mt] + k * M::kHeldTiles);
    }
  }

  static __device__ __forceinline__ void store_scores(uint8_t* tile, const Held& held) {
#pragma unroll
    for (int mt = 0; mt < Traits::kKeyTiles; ++mt) {
#pragma unroll
      for (int k = 0; k < kWarpSteps; ++k) {
        M::template store<Traits::kScoreRowBytes>(smem_address(tile), (Traits::warp_n() * Traits::kKeyTiles + mt) * 16,
                                                  Traits::warp_s() * Traits::kScoreTiles * 8 + k * M::kStep,
                                                  Traits::lane(), held[mt][k]);
      }
    }
  }

  // c (keys, columns) += scores (keys, queries) * rows (kBlockM, kHeadDim), over this warp's own queries.
  static __device__ __forceinline__ void add_own(const Held& held, const uint8_t* rows, Gradient& c) {
    if constexpr (!kHoldsOwn) return;
    const auto columns_b = columns_of<true>(rows, Traits::kExchange ? Traits::warp_s() : 0);
#pragma unroll
    for (int k = 0; k < kWarpSteps; ++k) {
      typename M::A a[Traits::kKeyTiles];
#pragma unroll
      for (int mt = 0; mt < Traits::kKeyTiles; ++mt) a[mt] = M::operand(held[mt][k]);
      add_step(a, columns_b, k, c);
    }
  }

  // The same over the queries of the other warps, which have stored their scores (kBlockN, kBlockM) in shared memory.
  static __device__ __forceinline__ void add_others(const uint8_t* scores, const uint8_t* rows, Gradient& c) {
    if constexpr (kHoldsOwn) {
#pragma unroll
      for (int other = 1; other < Traits::kWarpsS; ++other) {
        add_steps<kWarpSteps>(scores, rows, (Traits::warp_s() + other) % Traits::kWarpsS, c);
      }
    } else {
      add_steps<kQuerySteps>(scores, rows, 0, c);
    }
  }

  // kSteps steps, starting at the first query of warp `part` of those that share the keys.
  template <int kSteps>
  static __device__ __forceinline__ void add_steps(const uint8_t* scores, const uint8_t* rows, int32_t part,
                                                   Gradient& c) {
    const auto columns_b = columns_of<false>(rows, part);
    const typename M::template RowsA<Traits::kScoreRowBytes, kSteps> rows_a(
        smem_address(scores), Traits::lane(), Traits::warp_n() * Traits::kKeyTiles * 16, part * kWarpSteps);
#pragma unroll(kUnroll)
    for (int k = 0; k < kSteps; ++k) {
      typename M::A a[Traits::kKeyTiles];
#pragma unroll
      for (int mt = 0; mt < Traits::kKeyTiles; ++mt) a[mt] = rows_a.load(mt * 16, k);
      add_step(a, columns_b, k, c);
    }
  }

  // Operand B: this warp's columns of the rows that belong to the queries of warp `part`.
  template <bool kHeld>
  static __device__ __forceinline__ auto columns_of(const uint8_t* rows, int32_t part) {
    return typename M::template ColumnsB<Traits::kRowBytes, Traits::kGradientTiles * 8, kHeld>(
        smem_address(rows) + part * kWarpSteps * M::kStep * Traits::kRowBytes, Traits::lane(),
        Traits::warp_s() * Traits::kGradientTiles * 8);
  }

  template <typename Columns>
  static __device__ __forceinline__ void add_step(const typename M::A (&a)[Traits::kKeyTiles], const Columns& columns_b,
                                                  int k, Gradient& c) {
#pragma unroll
    for (int nt = 0; nt < Traits::kGradientTiles; nt += 2) {
      const typename M::B b[1] = {columns_b.load(k, nt * 8)};
#pragma unroll
      for (int mt = 0; mt < Traits::kKeyTiles; ++mt) M::multiply(c[mt] + nt, a[mt], b);
    }
  }

  // dq (queries, columns) = ds (kBlockN, kBlockM)^T * k (kBlockN, kHeadDim), added to the accumulator in global memory.
  // `dq` must be zero on entry; with whole heads it has the sum of the earlier key blocks.
  static __device__ __forceinline__ void add_dq(const KernelParams& params, SharedStorage& smem, const WorkTile& work,
                                                int32_t head, int32_t query_block, DqSums& dq) {
    if constexpr (Traits::kWholeHeads) {
      multiply_dq(smem, 0, dq);
      DqTile<Traits>(params, work, head, query_block).store(params, work, head, query_block, dq);
      return;
    }
    const DqRows<Traits> dq_rows(params, work, head, query_block);
    if constexpr (Traits::kDqPasses == 1) {
      multiply_dq(smem, 0, dq);
      if (params.dq_semaphores != nullptr)
        DqSemaphore(params, work, head, query_block, Traits::kBlockM, Traits::kBlockN).wait();
      put_dq(smem, dq_rows, dq, 0);
    } else {
      if (params.dq_semaphores != nullptr)
        DqSemaphore(params, work, head, query_block, Traits::kBlockM, Traits::kBlockN).wait();
#pragma unroll 1
      for (int32_t column = 0; column < Traits::kHeadDim; column += Traits::kHeadDim / Traits::kDqPasses) {
        DqSums dq = {};
        multiply_dq(smem, column, dq);
        put_dq(smem, dq_rows, dq, column);
      }
    }
    if (params.dq_semaphores != nullptr)
      DqSemaphore(params, work, head, query_block, Traits::kBlockM, Traits::kBlockN).release();
  }

  static __device__ __forceinline__ void put_dq(const SharedStorage& smem, const DqRows<Traits>& rows, const DqSums& dq,
                                                int32_t column) {
    if (Traits::kFirstStores && smem.first_add.stores) {
      rows.template add<true>(dq, column);
    } else {
      rows.add(dq, column);
    }
  }

  // One pass over dq's columns, which starts at `column`.
  static __device__ __forceinline__ void multiply_dq(const SharedStorage& smem, int32_t column, DqSums& dq) {
    const int32_t lane = Bias<Traits>::kKeepsLane ? Traits::lane() : Bias<Traits>::lane_again();
    const typename M::template ColumnsA<Traits::kScoreRowBytes, Traits::kQueryTiles * 16> columns_a(
        smem_address(smem.ds), lane, Traits::warp_q() * Traits::kQueryTiles * 16);
    const typename M::template ColumnsB<Traits::kRowBytes, Traits::kColumnTiles * 8, false> columns_b(
        smem_address(smem.k + keys_offset(smem)), lane, column + Traits::warp_d() * Traits::kColumnTiles * 8);
#pragma unroll(kUnroll)
    for (int k = 0; k < Traits::kBlockN / M::kStep; ++k) {
      typename M::A a[Traits::kQueryTiles];
#pragma unroll
      for (int mt = 0; mt < Traits::kQueryTiles; ++mt) a[mt] = columns_a.load(k, mt * 16);
#pragma unroll
      for (int nt = 0; nt < Traits::kColumnTiles; nt += 2 * kDqPairs) {
        typename M::B b[kDqPairs];
#pragma unroll
        for (int i = 0; i < kDqPairs; ++i) b[i] = columns_b.load(k, (nt + 2 * i) * 8);
#pragma unroll
        for (int mt = 0; mt < Traits::kQueryTiles; ++mt) M::multiply(dq[mt] + nt, a[mt], b);
      }
    }
  }
};

}  // namespace flashbwd::sm80

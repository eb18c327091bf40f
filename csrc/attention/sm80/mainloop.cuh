// The query loop of one CTA for its key block.
//
// s^T = k q^T and dp^T = v dout^T are computed transposed, so that a warp's p^T and ds^T are already operand A of `dv
// += p^T dout` and `dk += ds^T q`. dv and dk stay in registers. ds^T goes through shared memory for `dq = ds k`, which
// is added to an fp32 accumulator in global memory. docs/kernels/attention_sm80.md draws one iteration.
#pragma once

#include <cstdint>
#include <type_traits>

#include "copies.cuh"
#include "features.cuh"
#include "generated_scores.cuh"
#include "products.cuh"

namespace flashbwd::sm80 {

template <typename Traits>
struct Mainloop : Copies<Traits>, Products<Traits> {
  using T = typename Traits::T;
  using M = typename Traits::M;
  using SharedStorage = typename Traits::SharedStorage;
  using WorkTile = typename Traits::WorkTile;
  using QueryIteration = typename Traits::QueryIteration;
  using DqSums = typename DqAccumulator<Traits>::Tile;
  using WithoutLists = std::conditional_t<Traits::kFeatures, Features<Traits>, Scores<Traits>>;
  using WithLists = std::conditional_t<Traits::kGenerated, GeneratedScores<Traits>, BlockMaskScores<Traits>>;
  using ScoreWork = std::conditional_t<Traits::kListed, WithLists, WithoutLists>;
  using FromCopies = sm80::Copies<Traits>;
  using FromProducts = sm80::Products<Traits>;
  using FromCopies::advance, FromCopies::fetch_work_tile, FromCopies::first_stage, FromCopies::keys_offset,
      FromCopies::load_douts, FromCopies::load_queries, FromCopies::load_values, FromCopies::start_copies;
  using FromProducts::add_others, FromProducts::add_own, FromProducts::hold, FromProducts::kUnroll,
      FromProducts::store_scores;
  using typename FromProducts::Gradient, typename FromProducts::Held, typename FromProducts::ScoreTile;
  // Operands B of dq loaded at a time. The three products of an fp32 tile depend on each other, so more tiles
  // interleave.
  static constexpr int kDqPairs = sizeof(T) == 4 && Traits::kColumnTiles % 4 == 0 ? 2 : 1;

  // Runs the query loop of smem.work, whose first copies have been started: sums dk and dv, starting at zero, and adds
  // dq. Also fetches the next work tile.
  static __device__ __forceinline__ void run(const KernelParams& params, SharedStorage& smem, Gradient& dk,
                                             Gradient& dv) {
    const WorkTile& work = smem.work;
    zero(dk, dv);
    if (work.num_iterations() == 0) {
      if (threadIdx.x == 0) fetch_work_tile(params, smem);
      return;
    }
    const AttentionBackwardParams& p = params.attention;
    ScoreWork scores(params, work);
    if constexpr (Traits::kVariant == Variant::kAllFeatures) {
      KeyBits<Traits>::store(params, work, smem.key_bits);
      scores.key_bits = smem.key_bits;
    }
    if constexpr (Traits::kStages > 1) {
      if (threadIdx.x == 0) advance(params, smem, 0);
      copy_async_wait<0>();
      smem.tiles_loaded.arrive();
    }
    [[maybe_unused]] typename FromProducts::KeptRows k_rows, v_rows;
    // Plain attention rereads this from shared memory, which saves a register.
    const int32_t all_iterations = work.num_iterations();
    const auto num_iterations = [&] { return Traits::kFeatures ? all_iterations : work.num_iterations(); };
#pragma unroll 1
    for (int32_t index = 0; index < num_iterations(); ++index) {
      const int32_t ring_index = index + first_stage(smem);
      const int32_t stage = ring_index % Traits::kStages;
      const uint32_t phase = ring_index % 2;
      const QueryIteration& iteration = smem.iterations[ring_index % 2];
      const bool more = index + 1 < num_iterations();
      if constexpr (Traits::kStages > 1) {
        // The copies of all threads have landed, and all warps are done with the previous p: a thread arrives after
        // add_others.
        smem.tiles_loaded.wait(phase);
        if constexpr (!Traits::kExchange) smem.done.wait(phase ^ 1);
      } else {
        copy_async_wait<0>();
        // The tiles of this iteration have landed, thread 0 has written the next source, and all threads are done with
        // the previous iteration.
        __syncthreads();
      }
      const int32_t query_block = iteration.query_block(work);
      uint8_t* const bias = Traits::kExchange ? smem.p : smem.ds;
      if constexpr (Traits::kFeatures) scores.load_bias(iteration.head, query_block, bias);
      if constexpr (Traits::kListed) scores.load_bits(iteration.entry.bits);
      if constexpr (Traits::kStages == 1) {
        if (threadIdx.x == 0) prepare_next(params, smem, iteration, index, ring_index, query_block, more);
      }
      if constexpr (Traits::kFeatures) scores.draw_mask(iteration.head, query_block);
      ScoreTile s = {}, dp = {};
      if constexpr (Traits::kKeepsRows) {
        if (index == 0) {
          k_rows.load_all(smem.k + keys_offset(smem));
          v_rows.load_all(smem.v + keys_offset(smem));
        }
        FromProducts::template multiply_keys<M>(k_rows, smem.q[stage], s);
      } else {
        using ScoreMma = typename Traits::ScoreMma;
        const auto rows = FromProducts::template rows_of_keys<ScoreMma>(smem.k + keys_offset(smem));
        FromProducts::template multiply_keys<ScoreMma>(rows, smem.q[stage], s);
      }
      if constexpr (Traits::kStages > 1) {
        if constexpr (Traits::kExchange) smem.done.wait(phase ^ 1);  // all threads are done with the previous iteration
        start_copies(params, smem, ring_index, more);
      }
      if constexpr (Traits::kKeepsRows) {
        FromProducts::template multiply_keys<M>(v_rows, smem.dout[stage], dp);
      } else {
        using DpMma = typename Traits::DpMma;
        const auto rows = FromProducts::template rows_of_keys<DpMma>(smem.v + keys_offset(smem));
        FromProducts::template multiply_keys<DpMma>(rows, smem.dout[stage], dp);
      }
      if constexpr (Traits::kFeatures) {
        scores.template apply<(Traits::kStages > 1 ? 1 : 0)>(iteration.head, query_block, smem.lse[stage],
                                                             smem.delta[stage], bias, smem.ds, s, dp);
      } else if constexpr (Traits::kListed) {
        scores.apply(iteration, smem.lse[stage], smem.delta[stage], s, dp);
      } else {
        scores.apply(query_block, smem.lse[stage], smem.delta[stage], s, dp);
      }
      Held p_held, ds_held;
      hold(s, p_held);
      if constexpr (Traits::kVariant == Variant::kSharedBias) {
        // p is used first, because the sums of the bias gradient need its registers.
        store_scores(smem.p, p_held);
        typename ScoreWork::Sums sums = {};
        scores.load_sums(iteration.head, query_block, sums);
        add_own(p_held, smem.dout[stage], dv);
        scores.add_gradient(iteration.head, query_block, smem.ds, dp, sums);
      }
      hold(dp, ds_held);
      store_scores(smem.ds, ds_held);
      if constexpr (Traits::kVariant == Variant::kAllFeatures) scores.finish_tile(iteration.head, query_block, smem.ds);
      if constexpr (Traits::kExchange && Traits::kVariant != Variant::kSharedBias) store_scores(smem.p, p_held);
      if constexpr (Traits::kStages > 1) smem.scores_stored.arrive();
      if constexpr (Traits::kVariant == Variant::kBias) scores.finish_tile(iteration.head, query_block, smem.ds);
      if constexpr (Traits::kVariant != Variant::kSharedBias) add_own(p_held, smem.dout[stage], dv);
      if constexpr (Traits::kStages > 1) {
        finish_two_stages(params, smem, scores, iteration, index, stage, phase, query_block, more, ds_held, dk, dv);
      } else {
        finish_one_stage(params, smem, iteration, query_block, more, ds_held, dk, dv);
      }
    }
    scale(dk, p.softmax_scale);
    if constexpr (Traits::kVariant == Variant::kAllFeatures) scale(dv, params.dropout_scale);
  }

 protected:
  static __device__ __forceinline__ void zero(Gradient& dk, Gradient& dv) {
#pragma unroll
    for (int mt = 0; mt < Traits::kKeyTiles; ++mt) {
#pragma unroll
      for (int nt = 0; nt < Traits::kGradientTiles; ++nt) {
#pragma unroll
        for (int e = 0; e < 4; ++e) dk[mt][nt][e] = dv[mt][nt][e] = 0.f;
      }
    }
  }
  static __device__ __forceinline__ void scale(Gradient& gradient, const float& factor) {
#pragma unroll
    for (int mt = 0; mt < Traits::kKeyTiles; ++mt) {
#pragma unroll
      for (int nt = 0; nt < Traits::kGradientTiles; ++nt) {
#pragma unroll
        for (int e = 0; e < 4; ++e) gradient[mt][nt][e] *= factor;
      }
    }
  }

  // One stage, called by one thread: writes the next iteration and the source of its tiles.
  static __device__ __forceinline__ void prepare_next(const KernelParams& params, SharedStorage& smem,
                                                      const QueryIteration& iteration, int32_t index,
                                                      int32_t ring_index, int32_t query_block, bool more) {
    if constexpr (Traits::kFirstStores) {
      if (index > 0) smem.first_add.release();
      smem.first_add.find(params, smem.work, iteration.head, query_block, Traits::kBlockM, Traits::kBlockN);
    }
    if (more) smem.iterations[(ring_index + 1) % 2] = QueryIteration(iteration, smem.work);
    advance(params, smem, index);
  }

  // Two stages, after this warp has added its own queries to dv: adds the other warps' queries to dv, then dk and dq.
  static __device__ __forceinline__ void finish_two_stages(const KernelParams& params, SharedStorage& smem,
                                                           ScoreWork& scores, const QueryIteration& iteration,
                                                           int32_t index, int32_t stage, uint32_t phase,
                                                           int32_t query_block, bool more, const Held& ds_held,
                                                           Gradient& dk, Gradient& dv) {
    constexpr bool kSharedBias = Traits::kVariant == Variant::kSharedBias;
    const WorkTile& work = smem.work;
    DqSums dq = {};
    // dv and dk need p and ds only from the warps that share this warp's keys. All of these warps arrive and wait.
    if constexpr (Traits::kExchange) named_barrier(1 + Traits::warp_n(), Traits::kWarpsS * 32);
    add_others(smem.p, smem.dout[stage], dv);
    add_own(ds_held, smem.q[stage], dk);
    add_others(smem.ds, smem.q[stage], dk);
    if (more) {
      copy_async_wait<0>();
      smem.tiles_loaded.arrive();
    }
    // Waits until all threads have stored ds. Recomputing the phase saves a register, except with a shared bias.
    smem.scores_stored.wait(kSharedBias ? phase : (index + first_stage(smem)) % 2);
    if constexpr (kSharedBias) scores.release(iteration.head, query_block);
    if constexpr (Traits::kWholeHeads)
      DqTile<Traits>(params, work, iteration.head, query_block).load(dq);  // for add_dq
    if (threadIdx.x == 0 && more) advance(params, smem, index + 1);
    // The reductions of dq complete during the products of the next iteration.
    add_dq(params, smem, work, iteration, iteration.head, query_block, dq);
    smem.done.arrive();
  }

  // One stage: as finish_two_stages. Also starts the copies of the next tiles as their buffers become free.
  static __device__ __forceinline__ void finish_one_stage(const KernelParams& params, SharedStorage& smem,
                                                          const QueryIteration& iteration, int32_t query_block,
                                                          bool more, const Held& ds_held, Gradient& dk, Gradient& dv) {
    DqSums dq = {};
    __syncthreads();  // ds (and p) of all warps are stored; all threads are done with v
    add_others(smem.p, smem.dout[0], dv);
    if constexpr (Traits::kExchange) __syncthreads();  // all threads are done with dout
    if (Traits::kRefills && !more && smem.source.exists) load_values(params, smem, smem.next_work, 0);
    if (Traits::kRefills ? smem.source.exists : more) load_douts(params, smem, 0);
    add_own(ds_held, smem.q[0], dk);
    add_others(smem.ds, smem.q[0], dk);
    if (Traits::kFirstStores && threadIdx.x == 0) smem.first_add.wait();
    __syncthreads();  // all threads are done with q, and may store or add dq
    if (Traits::kRefills ? smem.source.exists : more) load_queries(params, smem, 0);
    copy_async_commit();
    add_dq(params, smem, smem.work, iteration, iteration.head, query_block, dq);  // while the copies run
  }

  // dq (queries, columns) = ds (kBlockN, kBlockM)^T * k (kBlockN, kHeadDim), added to the accumulator in global memory.
  // `dq` must be zero on entry; with whole heads it has the sum of the earlier key blocks.
  static __device__ __forceinline__ void add_dq(const KernelParams& params, SharedStorage& smem, const WorkTile& work,
                                                const QueryIteration& iteration, int32_t head, int32_t query_block,
                                                DqSums& dq) {
    if constexpr (Traits::kWholeHeads) {
      multiply_dq(smem, 0, dq);
      DqTile<Traits>(params, work, head, query_block).store(params, work, head, query_block, dq);
      return;
    }
    const DqAccumulator<Traits> accumulator(params, work, head, query_block);
    if constexpr (Traits::kDqPasses == 1) {
      multiply_dq(smem, 0, dq);
      if (params.dq_semaphores != nullptr)
        DqSemaphore(params, work, iteration, head, query_block, Traits::kBlockM, Traits::kBlockN).wait();
      add_or_store_dq(smem, accumulator, dq, 0);
    } else {
      if (params.dq_semaphores != nullptr)
        DqSemaphore(params, work, iteration, head, query_block, Traits::kBlockM, Traits::kBlockN).wait();
#pragma unroll 1
      for (int32_t column = 0; column < Traits::kHeadDim; column += Traits::kHeadDim / Traits::kDqPasses) {
        DqSums dq = {};
        multiply_dq(smem, column, dq);
        add_or_store_dq(smem, accumulator, dq, column);
      }
    }
    if (params.dq_semaphores != nullptr)
      DqSemaphore(params, work, iteration, head, query_block, Traits::kBlockM, Traits::kBlockN).release();
  }

  static __device__ __forceinline__ void add_or_store_dq(const SharedStorage& smem, const DqAccumulator<Traits>& rows,
                                                         const DqSums& dq, int32_t column) {
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

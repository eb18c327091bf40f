// The query loop of one CTA for head dimensions of any size.
//
// s and dp are summed over blocks of columns in registers. p and ds of the whole tile go to shared memory. Then dv, dk
// and dq are computed one block of columns after the other. Between query tiles, dk and dv are in global memory, in the
// order of the threads' registers as 16-byte vectors: a thread reads only what it wrote itself.
#pragma once

#include <cstdint>

#include "epilogue.cuh"
#include "large_head_dim_traits.cuh"

namespace flashbwd::sm80 {

template <typename Traits>
struct LargeMainloop : Mainloop<Traits> {
  using Base = Mainloop<Traits>;
  using M = typename Base::M;
  using SharedStorage = typename Traits::SharedStorage;
  using Gradient = typename Base::Gradient;
  using ScoreTile = typename Base::ScoreTile;
  using DqTile = typename DqAccumulator<Traits>::Tile;
  static constexpr int kSubtileSteps = Traits::kSubtileRows / M::kStep;
  // 16-byte vectors of a thread per block of columns
  static constexpr int kVectors = Traits::kKeyTiles * Traits::kGradientTiles;

  // dk or dv: the partial sums between query tiles, and the gradient.
  struct Target {
    float* kept;  // this thread's first vector; the next thread's is 16 bytes further
    const GradientTarget& gradient;
    float scale;
  };

  // Writes dk and dv of the key block, and adds dq of all query tiles.
  static __device__ __forceinline__ void run(const KernelParams& params, SharedStorage& smem, const WorkTile& work) {
    const AttentionBackwardParams& p = params.attention;
    const int32_t blocks_k = OperandCursor<Traits>::blocks_for_gradients(p.head_dim);
    const int32_t blocks_v = OperandCursor<Traits>::blocks_for_gradients(p.head_dim_v);
    constexpr int64_t kBlockFloats = Traits::kBlockN * Traits::kGradientColumns;
    float* const kept = params.gradients + int64_t{blockIdx.x} * (blocks_k + blocks_v) * kBlockFloats + threadIdx.x * 4;
    const Target dk = {kept, params.dk, p.softmax_scale};
    const Target dv = {kept + blocks_k * kBlockFloats, params.dv, params.dropout_scale};
    const int32_t num_iterations = work.num_iterations();
    if (num_iterations == 0) {
      for (int32_t block = 0; block < blocks_k; ++block) store_zeros(dk, work, block);
      for (int32_t block = 0; block < blocks_v; ++block) store_zeros(dv, work, block);
      return;
    }

    typename Base::ScoreWork scores(params, work);
    if constexpr (Traits::kVariant == Variant::kAllFeatures) {
      KeyBits<Traits>::store(params, work, smem.key_bits);
      scores.key_bits = smem.key_bits;
    }
    OperandStream<Traits> stream(params, smem, work);
#pragma unroll 1
    for (QueryIteration iteration(work); iteration.index < num_iterations; iteration.advance(work)) {
      const int32_t query_block = iteration.query_block(work);
      {
        ScoreTile s = {}, dp = {};
        multiply<typename M::Scores>(stream, p.head_dim, s);
        // All threads have passed a barrier since the previous query tile, so no thread reads its p and ds any more.
        if constexpr (Traits::kFeatures) {
          scores.load_bias(iteration.head, query_block, smem.p);
          scores.draw_mask(iteration.head, query_block);
        }
        multiply<M>(stream, p.head_dim_v, dp);
        if constexpr (Traits::kFeatures) {
          scores.template apply<0>(iteration.head, query_block, smem.lse, smem.delta, smem.p, smem.ds, s, dp);
        } else {
          scores.apply(query_block, smem.lse, smem.delta, s, dp);
        }
        typename Base::Held held;
        Base::hold(s, held);
        Base::store_scores(smem.p, held);
        Base::hold(dp, held);
        Base::store_scores(smem.ds, held);
        if constexpr (Traits::kFeatures) scores.finish_tile(iteration.head, query_block, smem.ds);
      }
      const BlockRange subtiles = OperandCursor<Traits>::subtiles(work, query_block);
      add_gradient(stream, smem.p, subtiles, dv, work, iteration.index == 0, iteration.index + 1 == num_iterations);
      add_gradient(stream, smem.ds, subtiles, dk, work, iteration.index == 0, iteration.index + 1 == num_iterations);
      add_dq(stream, iteration, iteration.head, query_block);
    }
  }

 private:
  // c (keys, queries) += keys (kBlockN, columns) * queries (kBlockM, columns)^T.
  template <typename Products>
  static __device__ __forceinline__ void multiply(OperandStream<Traits>& stream, int32_t columns, ScoreTile& c) {
    ScoreTile chain = {};
#pragma unroll 1
    for (int32_t block = OperandCursor<Traits>::blocks_for_scores(columns); block > 0; --block) {
      const uint8_t* const keys = stream.acquire();
      const uint8_t* const queries = keys + Traits::kBlockN * Traits::kRowBytes;
      const auto rows = Base::template rows_of_keys<Products>(keys);
      if constexpr (Products::kChain == 0) {
        Base::template multiply_keys<Products>(rows, queries, c);
      } else {
        Base::template multiply_keys<Products>(rows, queries, c, chain);
      }
    }
    if constexpr (Products::kChain > 0) Base::end_chain(chain, c);
  }

  static __device__ __forceinline__ void store_zeros(const Target& target, const WorkTile& work, int32_t block) {
    const Gradient zeros = {};
    store(target, work, block, zeros);
  }

  static __device__ __forceinline__ void store(const Target& target, const WorkTile& work, int32_t block,
                                               const Gradient& gradient) {
    Epilogue<Traits>::template store_one<Traits::kPairColumns>(
        target.gradient, work, block * Traits::kGradientColumns + Traits::warp_s() * 16, gradient);
  }

  // Adds scores (keys, queries) * rows (queries, columns) to dk or dv, over all columns.
  static __device__ __forceinline__ void add_gradient(OperandStream<Traits>& stream, const uint8_t* scores,
                                                      const BlockRange& subtiles, const Target& target,
                                                      const WorkTile& work, bool first, bool last) {
    const int32_t columns = target.gradient.columns;
    const int32_t blocks = OperandCursor<Traits>::blocks_for_gradients(columns);
#pragma unroll 1
    for (int32_t block = 0; block < blocks; ++block) {
      const int32_t left = columns - block * Traits::kGradientColumns;
      const int32_t pairs = min((left + Traits::kPairColumns - 1) / Traits::kPairColumns, Traits::kPairs);
      auto* const kept = reinterpret_cast<float4*>(target.kept) + int64_t{block} * kVectors * Traits::kThreads;
      float4 before[Traits::kKeyTiles][Traits::kGradientTiles];  // loaded while the products run
      Gradient sum;
#pragma unroll
      for (int mt = 0; mt < Traits::kKeyTiles; ++mt) {
#pragma unroll
        for (int nt = 0; nt < Traits::kGradientTiles; ++nt) {
          before[mt][nt] = make_float4(0.f, 0.f, 0.f, 0.f);
          if (!first && nt / 2 < pairs) {
            before[mt][nt] = __ldcg(kept + (mt * Traits::kGradientTiles + nt) * Traits::kThreads);
          }
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[mt][nt][e] = 0.f;
        }
      }
#pragma unroll 1
      for (int32_t subtile = subtiles.begin; subtile < subtiles.end; ++subtile) {
        const uint8_t* const rows = stream.acquire();
        if (pairs == Traits::kPairs) {
          multiply_subtile<true>(scores, rows, subtile, pairs, sum);
        } else {
          multiply_subtile<false>(scores, rows, subtile, pairs, sum);
        }
      }
#pragma unroll
      for (int mt = 0; mt < Traits::kKeyTiles; ++mt) {
#pragma unroll
        for (int nt = 0; nt < Traits::kGradientTiles; ++nt) {
          float (&c)[4] = sum[mt][nt];
          c[0] += before[mt][nt].x;
          c[1] += before[mt][nt].y;
          c[2] += before[mt][nt].z;
          c[3] += before[mt][nt].w;
          if (!last && nt / 2 < pairs) {
            __stcg(kept + (mt * Traits::kGradientTiles + nt) * Traits::kThreads, make_float4(c[0], c[1], c[2], c[3]));
          }
#pragma unroll
          for (int e = 0; e < 4; ++e) c[e] *= target.scale;
        }
      }
      if (last) store(target, work, block, sum);
    }
  }

  // c (keys, columns) += scores (keys, queries of a subtile) * rows (kSubtileRows, columns). kWhole: all pairs of
  // column tiles exist.
  template <bool kWhole>
  static __device__ __forceinline__ void multiply_subtile(const uint8_t* scores, const uint8_t* rows, int32_t subtile,
                                                          int32_t pairs, Gradient& c) {
    const int32_t lane = Traits::lane();
    const typename M::template RowsA<Traits::kScoreRowBytes, kSubtileSteps> rows_a(
        smem_address(scores), lane, Traits::warp_n() * Traits::kKeyTiles * 16, subtile * kSubtileSteps);
    const typename M::template ColumnsB<Traits::kGradientRowBytes, 16, false> columns_b(smem_address(rows), lane,
                                                                                        Traits::warp_s() * 16);
#pragma unroll(Base::kUnroll)
    for (int k = 0; k < kSubtileSteps; ++k) {
      typename M::A a[Traits::kKeyTiles];
#pragma unroll
      for (int mt = 0; mt < Traits::kKeyTiles; ++mt) a[mt] = rows_a.load(mt * 16, k);
#pragma unroll
      for (int pair = 0; pair < Traits::kPairs; ++pair) {
        if (!kWhole && pair >= pairs) break;
        const typename M::B b[1] = {columns_b.load(k, pair * Traits::kPairColumns)};
#pragma unroll
        for (int mt = 0; mt < Traits::kKeyTiles; ++mt) M::multiply(c[mt] + 2 * pair, a[mt], b);
      }
    }
  }

  // dq (queries, columns) = ds (kBlockN, kBlockM)^T * k (kBlockN, columns), added to the accumulator in global memory.
  static __device__ __forceinline__ void add_dq(OperandStream<Traits>& stream, const QueryIteration& iteration,
                                                int32_t head, int32_t query_block) {
    const KernelParams& params = stream.params;
    const AttentionBackwardParams& p = params.attention;
    const WorkTile& work = stream.work;
    const DqAccumulator<Traits> accumulator(params, work, head, query_block);
    const bool ordered = params.dq_semaphores != nullptr;
    if (ordered) DqSemaphore(params, work, iteration, head, query_block, Traits::kBlockM, Traits::kBlockN).wait();
#pragma unroll 1
    for (int32_t block = 0; block < p.head_dim; block += Traits::kGradientColumns) {
      const uint8_t* const keys = stream.acquire();
      const int32_t columns = min(p.head_dim - block, Traits::kGradientColumns);
#pragma unroll 1
      for (int32_t column = 0; column < columns; column += Traits::kDqStep) {
        DqTile dq = {};
        multiply_dq(stream.smem.ds, keys, column, dq);
        accumulator.add(dq, block + column);
      }
    }
    if (ordered) DqSemaphore(params, work, iteration, head, query_block, Traits::kBlockM, Traits::kBlockN).release();
  }

  static __device__ __forceinline__ void multiply_dq(const uint8_t* ds, const uint8_t* keys, int32_t column,
                                                     DqTile& dq) {
    const int32_t lane = Traits::lane();
    const typename M::template ColumnsA<Traits::kScoreRowBytes, Traits::kQueryTiles * 16> columns_a(
        smem_address(ds), lane, Traits::warp_q() * Traits::kQueryTiles * 16);
    const typename M::template ColumnsB<Traits::kGradientRowBytes, Traits::kColumnTiles * 8, false> columns_b(
        smem_address(keys), lane, column + Traits::warp_d() * Traits::kColumnTiles * 8);
#pragma unroll(Base::kUnroll)
    for (int k = 0; k < Traits::kBlockN / M::kStep; ++k) {
      typename M::A a[Traits::kQueryTiles];
#pragma unroll
      for (int mt = 0; mt < Traits::kQueryTiles; ++mt) a[mt] = columns_a.load(k, mt * 16);
#pragma unroll
      for (int nt = 0; nt < Traits::kColumnTiles; nt += 2) {
        const typename M::B b[1] = {columns_b.load(k, nt * 8)};
#pragma unroll
        for (int mt = 0; mt < Traits::kQueryTiles; ++mt) M::multiply(dq[mt] + nt, a[mt], b);
      }
    }
  }
};

}  // namespace flashbwd::sm80

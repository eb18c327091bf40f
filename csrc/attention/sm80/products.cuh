// The products of a warp: its keys and queries of s and dp, its keys and columns of dv and dk.
#pragma once

#include <cstdint>

#include "scores.cuh"
#include "traits.cuh"

namespace flashbwd::sm80 {

template <typename Traits>
struct Products {
  using T = typename Traits::T;
  using M = typename Traits::M;
  using Gradient = float[Traits::kKeyTiles][Traits::kGradientTiles][4];
  using ScoreTile = typename ScorePosition<Traits>::Accumulator;
  static constexpr int kHeadSteps = Traits::kHeadDim / M::kStep;    // of s and dp
  static constexpr int kQuerySteps = Traits::kBlockM / M::kStep;    // of dk and dv
  static constexpr int kWarpSteps = kQuerySteps / Traits::kWarpsS;  // of a warp's own queries
  using Held = typename M::Held[Traits::kKeyTiles][kWarpSteps];
  // Unrolling of the products for s and dp, and of the others. Fragments of fp32 are twice as large, and their products
  // take twelve times as long.
  static constexpr int kUnrollKeys = sizeof(T) == 2 ? 16 : 2;
  static constexpr int kUnroll = Traits::kTile.head_dim <= 128 || sizeof(T) == 2 ? kUnrollKeys : 1;

  // Whether a warp keeps p and ds of its own queries in registers as an operand. For fp32 this takes too many
  // registers.
  static constexpr bool kHoldsOwn = sizeof(T) == 2;

  // Operand A of the products for s and dp: the rows of this warp's keys.
  template <typename Kind>
  static __device__ __forceinline__ auto rows_of_keys(const uint8_t* keys) {
    return typename Kind::template RowsA<Traits::kRowBytes, kHeadSteps>(smem_address(keys), Traits::lane(),
                                                                        Traits::warp_n() * Traits::kKeyTiles * 16);
  }
  // The same in registers.
  struct KeptRows {
    typename M::A a[kHeadSteps][Traits::kKeyTiles];

    __device__ __forceinline__ void load_all(const uint8_t* keys) {
      const auto rows = rows_of_keys<M>(keys);
#pragma unroll
      for (int k = 0; k < kHeadSteps; ++k) {
#pragma unroll
        for (int mt = 0; mt < Traits::kKeyTiles; ++mt) a[k][mt] = rows.load(mt * 16, k);
      }
    }
    __device__ __forceinline__ const typename M::A& load(int row, int k) const { return a[k][row / 16]; }
  };

  // c (keys, queries) += keys (kBlockN, kHeadDim) * queries (kBlockM, kHeadDim)^T, for the keys and queries of
  // this warp. `keys`: rows_of_keys, or KeptRows.
  template <typename Kind, typename Keys>
  static __device__ __forceinline__ void multiply_keys(const Keys& keys, const uint8_t* queries, ScoreTile& c) {
    if constexpr (Kind::kChain == 0) {
      add_products<Kind, kUnrollKeys>(keys, queries, c, [](int) {});
    } else {
      ScoreTile chain = {};
      multiply_keys<Kind>(keys, queries, c, chain);
      end_chain(chain, c);
    }
  }

  // The same if the tensor core sums several k steps in a chain. `chain`: the sum of the k steps that c does not
  // include yet.
  template <typename Kind, typename Keys>
  static __device__ __forceinline__ void multiply_keys(const Keys& keys, const uint8_t* queries, ScoreTile& c,
                                                       ScoreTile& chain) {
    add_products<Kind, Kind::kChain>(keys, queries, chain, [&](int step) {
      if (Kind::ends_chain(step)) end_chain(chain, c);
    });
  }

  // Calls after_step(k) after each k step. The loop is unrolled kUnrolled times.
  template <typename Kind, int kUnrolled, typename Keys, typename F>
  static __device__ __forceinline__ void add_products(const Keys& keys, const uint8_t* queries, ScoreTile& c,
                                                      const F& after_step) {
    const typename Kind::template RowsB<Traits::kRowBytes> rows_b(smem_address(queries), Traits::lane(),
                                                                  Traits::warp_s() * Traits::kScoreTiles * 8);
#pragma unroll(kUnrolled)
    for (int k = 0; k < kHeadSteps; ++k) {
      typename Kind::A a[Traits::kKeyTiles];
#pragma unroll
      for (int mt = 0; mt < Traits::kKeyTiles; ++mt) a[mt] = keys.load(mt * 16, k);
#pragma unroll
      for (int nt = 0; nt < Traits::kScoreTiles; nt += 2) {
        const typename Kind::B b[1] = {rows_b.load(nt * 8, k)};
#pragma unroll
        for (int mt = 0; mt < Traits::kKeyTiles; ++mt) Kind::multiply(c[mt] + nt, a[mt], b);
      }
      after_step(k);
    }
  }

  // Adds `chain` to `c` and starts a new chain at zero.
  static __device__ __forceinline__ void end_chain(ScoreTile& chain, ScoreTile& c) {
    ScorePosition<Traits>::for_each([&](int mt, int nt, int e) {
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
    __syncwarp();  // all lanes have read what Features::cap stored in this tile
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

  // c (keys, columns) += scores (keys, queries) * rows (kBlockM, kHeadDim), over this warp's own queries. fp32: does
  // nothing, add_others adds all queries.
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

  // The same over the queries of the other warps (fp32: of all warps), which have stored their scores (kBlockN,
  // kBlockM) in shared memory.
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

  // Adds kSteps k steps, from the first query of warp `warp` of the warps that share the keys.
  template <int kSteps>
  static __device__ __forceinline__ void add_steps(const uint8_t* scores, const uint8_t* rows, int32_t warp,
                                                   Gradient& c) {
    const auto columns_b = columns_of<false>(rows, warp);
    const typename M::template RowsA<Traits::kScoreRowBytes, kSteps> rows_a(
        smem_address(scores), Traits::lane(), Traits::warp_n() * Traits::kKeyTiles * 16, warp * kWarpSteps);
#pragma unroll(kUnroll)
    for (int k = 0; k < kSteps; ++k) {
      typename M::A a[Traits::kKeyTiles];
#pragma unroll
      for (int mt = 0; mt < Traits::kKeyTiles; ++mt) a[mt] = rows_a.load(mt * 16, k);
      add_step(a, columns_b, k, c);
    }
  }

  // Operand B: this warp's columns of the rows that belong to the queries of warp `warp`.
  template <bool kHeld>
  static __device__ __forceinline__ auto columns_of(const uint8_t* rows, int32_t warp) {
    return typename M::template ColumnsB<Traits::kRowBytes, Traits::kGradientTiles * 8, kHeld>(
        smem_address(rows) + warp * kWarpSteps * M::kStep * Traits::kRowBytes, Traits::lane(),
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
};

}  // namespace flashbwd::sm80

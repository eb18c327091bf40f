// Adds a tile of dq from registers to the fp32 accumulator in global memory, or stores it as the gradient.
#pragma once

#include <cstdint>

#include "../index/dq_layout.h"
#include "scheduler.cuh"
#include "store_tile.cuh"

namespace flashbwd::sm80 {

// The reduction returns no result, so the thread does not wait for it.
__device__ __forceinline__ void add_to_global(float* destination, float value) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(destination), "f"(value) : "memory");
}

template <bool kStores>
__device__ __forceinline__ void add_or_store(float* destination, float value) {
  if constexpr (kStores) {
    __stcg(destination, value);
  } else {
    add_to_global(destination, value);
  }
}

// Adds tiles of dq to the accumulator. In whole 8 x 8 blocks (dq_block_offset in index/dq_layout.h), an instruction of
// a warp adds to 128 consecutive bytes. At the ends of rows and sequences, each element is added on its own.
template <typename Traits>
struct DqAccumulator {
  using Tile = float[Traits::kQueryTiles][Traits::kColumnTiles][4];
  static constexpr int kRowGroups = Traits::kQueryTiles * 2;  // groups of 8 rows of the warp's tile

  float* blocks;  // this lane's element of the warp's first block
  int64_t row_stride;
  int32_t rows;     // from the warp's first row to the end of the sequence
  int32_t columns;  // from the warp's first column to the head dimension
  bool in_blocks;

  __device__ __forceinline__ DqAccumulator(const KernelParams& params, const WorkTile& work, int32_t head,
                                           int32_t query_block)
      : row_stride(params.dq_row_stride), in_blocks(params.dq_blocks) {
    const AttentionBackwardParams& p = params.attention;
    const int32_t row = query_block * Traits::kBlockM + Traits::warp_q() * Traits::kQueryTiles * 16;
    const int32_t column = Traits::warp_d() * Traits::kColumnTiles * 8;
    blocks = params.dq_accumulator + work.dq_begin + dq_row_offset(head, row, work.sequence.rows_q, row_stride) +
             column * kDqBlock + Traits::lane();
    rows = work.sequence.rows_q - row;
    columns = p.head_dim - column;
  }

  // `column`: the first column of `dq`, relative to the tile; a multiple of kDqBlock. kStores: stores instead of
  // adding.
  template <bool kStores = false>
  __device__ __forceinline__ void add(const Tile& dq, int32_t column = 0) const {
    if (in_blocks && kRowGroups * kDqBlock <= rows && column + Traits::kColumnTiles * kDqBlock <= columns) {
      add_whole<kStores>(dq, column);
      return;
    }
#pragma unroll
    for (int group = 0; group < kRowGroups; ++group) add_row_group<kStores>(group, dq, column);
  }
  template <bool kStores = false>
  __device__ __forceinline__ void add_row_group(int group, const Tile& dq, int32_t column = 0) const {
    if (in_blocks && group * kDqBlock + kDqBlock <= rows) {
      float* const destination = blocks + group * kDqBlock * row_stride + column * kDqBlock;
#pragma unroll
      for (int nt = 0; nt < Traits::kColumnTiles; ++nt) {
        if (column + nt * 8 >= columns) break;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          add_or_store<kStores>(destination + nt * kDqBlockElements + c * (kDqBlockElements / 2),
                                dq[group / 2][nt][group % 2 * 2 + c]);
        }
      }
    } else {
      add_elements<kStores>(group, dq, column);
    }
  }

 private:
  // Requires that the tile ends neither past the last row nor past the last column.
  template <bool kStores>
  __device__ __forceinline__ void add_whole(const Tile& dq, int32_t column) const {
    float* destination = blocks + column * kDqBlock;
#pragma unroll
    for (int group = 0; group < kRowGroups; ++group, destination += kDqBlock * row_stride) {
#pragma unroll
      for (int nt = 0; nt < Traits::kColumnTiles; ++nt) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          add_or_store<kStores>(destination + nt * kDqBlockElements + c * (kDqBlockElements / 2),
                                dq[group / 2][nt][group % 2 * 2 + c]);
        }
      }
    }
  }
  template <bool kStores>
  __device__ __forceinline__ void add_elements(int group, const Tile& dq, int32_t first) const {
    const int32_t lane = Traits::lane(), row = group * kDqBlock + lane / 4;
    if (row >= rows) return;
    const int32_t first_column = Traits::warp_d() * Traits::kColumnTiles * 8;
    float* const destination = blocks - lane - first_column * kDqBlock + first_column + row * row_stride;
#pragma unroll
    for (int nt = 0; nt < Traits::kColumnTiles; ++nt) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int32_t column = first + nt * 8 + lane % 4 * 2 + c;
        if (column < columns) add_or_store<kStores>(destination + column, dq[group / 2][nt][group % 2 * 2 + c]);
      }
    }
  }
};

// dq of a CTA with whole heads. Each thread loads and stores only its own registers, as 16-byte vectors. The first key
// block of a tile loads nothing; the last one writes the gradient.
template <typename Traits>
struct DqTile {
  using Tile = typename DqAccumulator<Traits>::Tile;
  static constexpr int kVectors = Traits::kQueryTiles * Traits::kColumnTiles;

  float4* sums;
  bool first, last;

  __device__ __forceinline__ DqTile(const KernelParams& params, const WorkTile& work, int32_t head,
                                    int32_t query_block) {
    constexpr int kTileFloats = Traits::kBlockM * Traits::kHeadDim;
    const int32_t head_of_cta = static_cast<int32_t>(blockIdx.x) * work.heads_per_kv + head % work.heads_per_kv;
    float* const tile =
        params.dq_tiles + (int64_t{head_of_cta} * params.schedule.query_blocks + query_block) * kTileFloats;
    sums = reinterpret_cast<float4*>(tile) + threadIdx.x;
    const BlockRange seen = key_blocks(work.visibility, query_block, Traits::kBlockM, Traits::kBlockN);
    first = work.key_block == seen.begin;
    last = work.key_block + 1 == seen.end;
  }

  // dq must be zero on entry.
  __device__ __forceinline__ void load(Tile& dq) const {
    if (first) return;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const float4 sum = __ldcg(sums + i * Traits::kThreads);
      float* const to = dq[i / Traits::kColumnTiles][i % Traits::kColumnTiles];
      to[0] = sum.x;
      to[1] = sum.y;
      to[2] = sum.z;
      to[3] = sum.w;
    }
  }
  __device__ __forceinline__ void store(const KernelParams& params, const WorkTile& work, int32_t head,
                                        int32_t query_block, Tile& dq) const {
    if (!last) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const float* const sum = dq[i / Traits::kColumnTiles][i % Traits::kColumnTiles];
        __stcg(sums + i * Traits::kThreads, make_float4(sum[0], sum[1], sum[2], sum[3]));
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kVectors * 4; ++i) {
      dq[i / 4 / Traits::kColumnTiles][i / 4 % Traits::kColumnTiles][i % 4] *= params.attention.softmax_scale;
    }
    const HeadsView& view = params.dq.view;
    const int32_t row =
        query_block * Traits::kBlockM + Traits::warp_q() * Traits::kQueryTiles * 16 + Traits::lane() / 4;
    const int64_t offset = work.batch * view.batch_stride + head * view.head_stride + row * view.seq_stride;
    StoreTile<typename Traits::T, Traits::kQueryTiles, Traits::kColumnTiles>::store(
        params.dq, offset, work.sequence.rows_q - row, Traits::warp_d() * Traits::kColumnTiles * 8, dq);
  }
};

}  // namespace flashbwd::sm80

// A tile of dq from registers into the fp32 accumulator in global memory.
#pragma once

#include <cstdint>

#include "scheduler.cuh"

namespace flashbwd::sm80 {

// No result to wait for.
__device__ __forceinline__ void add_to_global(float* place, float value) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(place), "f"(value) : "memory");
}

// In blocks (see dq_block_offset) an instruction adds to 128 consecutive bytes; where there are no whole blocks,
// element by element.
template <typename Traits>
struct DqRows {
  using Tile = float[Traits::kQueryTiles][Traits::kColumnTiles][4];
  static constexpr int kParts = Traits::kQueryTiles * 2;  // of the tile: 8 rows a warp each

  float* blocks;  // this lane's place in the first block of the warp
  int64_t row_stride;
  int32_t rows;     // from the warp's first one on, to the end of the sequence
  int32_t columns;  // from the warp's first one on
  bool in_blocks;

  __device__ __forceinline__ DqRows(const KernelParams& params, const Work& work, int32_t head, int32_t query_block)
      : row_stride(params.dq_row_stride), in_blocks(params.dq_blocks) {
    const AttentionBackwardParams& p = params.attention;
    const int32_t row = query_block * Traits::kBlockM + Traits::warp_q() * Traits::kQueryTiles * 16;
    const int32_t column = Traits::warp_d() * Traits::kColumnTiles * 8;
    const int64_t first_row = p.cu_seqlens_q != nullptr ? work.sequence.begin_q : int64_t{work.batch} * p.seqlen_q;
    blocks = params.dq_accumulator + first_row * p.heads * row_stride +
             dq_row_offset(head, 0, row, 1, work.sequence.rows_q, row_stride) + column * kDqBlock + Traits::lane();
    rows = work.sequence.rows_q - row;
    columns = p.head_dim - column;
  }

  // `column`: of dq, of the tile's first one; a multiple of kDqBlock.
  __device__ __forceinline__ void add(const Tile& dq, int32_t column = 0) const {
    if (in_blocks && kParts * kDqBlock <= rows && column + Traits::kColumnTiles * kDqBlock <= columns) {
      add_whole(dq, column);
      return;
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) add_part(part, dq, column);
  }
  __device__ __forceinline__ void add_part(int part, const Tile& dq, int32_t column = 0) const {
    if (in_blocks && part * kDqBlock + kDqBlock <= rows) {
      float* const place = blocks + part * kDqBlock * row_stride + column * kDqBlock;
#pragma unroll
      for (int nt = 0; nt < Traits::kColumnTiles; ++nt) {
        if (column + nt * 8 >= columns) break;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          add_to_global(place + nt * kDqBlockElements + c * (kDqBlockElements / 2), dq[part / 2][nt][part % 2 * 2 + c]);
        }
      }
    } else {
      add_elements(part, dq, column);
    }
  }

 private:
  // No row or column of the tile is past the end.
  __device__ __forceinline__ void add_whole(const Tile& dq, int32_t column) const {
    float* place = blocks + column * kDqBlock;
#pragma unroll
    for (int part = 0; part < kParts; ++part, place += kDqBlock * row_stride) {
#pragma unroll
      for (int nt = 0; nt < Traits::kColumnTiles; ++nt) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          add_to_global(place + nt * kDqBlockElements + c * (kDqBlockElements / 2), dq[part / 2][nt][part % 2 * 2 + c]);
        }
      }
    }
  }
  __device__ __forceinline__ void add_elements(int part, const Tile& dq, int32_t first) const {
    const int32_t lane = Traits::lane(), row = part * kDqBlock + lane / 4;
    if (row >= rows) return;
    const int32_t first_column = Traits::warp_d() * Traits::kColumnTiles * 8;
    float* const place = blocks - lane - first_column * kDqBlock + first_column + row * row_stride;
#pragma unroll
    for (int nt = 0; nt < Traits::kColumnTiles; ++nt) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int32_t column = first + nt * 8 + lane % 4 * 2 + c;
        if (column < columns) add_to_global(place + column, dq[part / 2][nt][part % 2 * 2 + c]);
      }
    }
  }
};

}  // namespace flashbwd::sm80

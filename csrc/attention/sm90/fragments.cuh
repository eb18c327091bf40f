// Work on a tile in the registers of a warpgroup between the products. S^T and dP^T are accumulators of (64 keys,
// kBlockM queries). Thread `lane` of warp w holds keys 16 w + lane / 4 and 8 further, and of each 8 queries j the pair
// 8 j + lane % 4 * 2 and the next: values 4 j and 4 j + 1 of the first key, 4 j + 2 and 4 j + 3 of the second.
#pragma once

#include "../../common/hopper.cuh"
#include "../../common/numeric.cuh"
#include "../../common/wgmma.cuh"
#include "../index/dq_layout.h"
#include "../index/visibility.h"
#include "block_mask.cuh"
#include "config.h"

namespace flashbwd::sm90 {

constexpr float kLog2E = 1.44269504088896340736f;

// r = 1 - tanh(x), with an error of about 1e-7. The derivative of tanh is r (2 - r).
__device__ __forceinline__ float tanh_complement(float twice_x_log2) {
  return __fdividef(2.f, 1.f + exp2_approximate(twice_x_log2));
}

// Row statistics of a thread's queries in shared memory, a pair for each four values of an accumulator. `first` points
// at its first query. The first kEarly pairs are loaded before they are needed.
template <int kEarly>
struct RowPairs {
  const float* first;
  float2 early[kEarly + 1];  // one more, because kEarly may be 0

  __device__ __forceinline__ explicit RowPairs(const float* first) : first(first) {
#pragma unroll
    for (int j = 0; j < kEarly; ++j) early[j] = *reinterpret_cast<const float2*>(&first[8 * j]);
  }
  __device__ __forceinline__ float2 operator[](int j) const {
    return j < kEarly ? early[j] : *reinterpret_cast<const float2*>(&first[8 * j]);
  }
};

// Calls visit(i, row) for values kBegin to kEnd of an accumulator with the statistic of their query.
template <int kBegin, int kEnd, int kEarly, typename Visit>
__device__ __forceinline__ void for_each_row(const RowPairs<kEarly>& rows, Visit visit) {
#pragma unroll
  for (int j = kBegin / 4; j < kEnd / 4; ++j) {
    const float2 pair = rows[j];
#pragma unroll
    for (int i = 0; i < 4; ++i) visit(4 * j + i, i % 2 == 0 ? pair.x : pair.y);
  }
}

// S becomes P = exp(scale * S - lse).
template <int kValues, int kEarly>
__device__ __forceinline__ void exponentiate(float (&s)[kValues], const RowPairs<kEarly>& lse_log2, float scale_log2) {
  for_each_row<0, kValues>(lse_log2, [&](int i, float lse) { s[i] = exp2_approximate(s[i] * scale_log2 - lse); });
}

// Bit n is set if the thread's n-th column, 8 (n / 2) + n % 2, is below `bound`, which is at most 128.
__device__ __forceinline__ uint32_t columns_below(int32_t bound) {
  const int32_t columns = bound / 8 * 2 + min(bound % 8, 2);
  return columns == 32 ? ~0u : (1u << columns) - 1;
}

// The mask of a tile in terms of its own rows and columns, clamped if it is far away: key first_key + r sees columns c
// with diagonal_begin + r <= c < diagonal_end + r, if r < keys and c < queries.
struct TileVisibility {
  int32_t diagonal_begin, diagonal_end, keys, queries;

  __device__ __forceinline__ TileVisibility(const Visibility& v, int32_t first_key, int32_t first_query)
      : diagonal_begin(near(int64_t{first_key} - first_query - v.hi + 1)),
        diagonal_end(near(int64_t{first_key} - first_query - v.lo + 1)),
        keys(near(int64_t{v.seqlen_k} - first_key)),
        queries(near(int64_t{v.seqlen_q} - first_query)) {}

  static __device__ __forceinline__ int32_t near(int64_t distance) {
    return static_cast<int32_t>(at_least(at_most(distance, 1024), -1024));
  }
};

// One bit for each of the thread's columns in kBlockM, from `column` on: set if it sees key `row`.
template <int kBlockM>
__device__ __forceinline__ uint32_t columns_that_see(const TileVisibility& tile, int32_t row, int32_t column) {
  static_assert(kBlockM <= 128, "a bit for each column of a thread");
  const int32_t begin = row < tile.keys ? max(tile.diagonal_begin + row - column, 0) : kBlockM;
  const int32_t end = max(min(tile.diagonal_end + row, tile.queries) - column, 0);
  return columns_below(min(end, kBlockM)) & ~columns_below(min(begin, kBlockM));
}

// Zeroes values for which key `row` of a tile (or row + 8) is invisible. `column` is the thread's first column.
template <int kValues>
__device__ __forceinline__ void mask(float (&p)[kValues], const TileVisibility& tile, int32_t row, int32_t column) {
  constexpr int kBlockM = 2 * kValues;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t visible = columns_that_see<kBlockM>(tile, row + 8 * half, column);
#pragma unroll
    for (int i = 0; i < kBlockM / 8; ++i) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        float& value = p[4 * i + 2 * half + odd];
        value = visible >> (2 * i + odd) & 1 ? value : 0.f;
      }
    }
  }
}

// The same for pairs of 16-bit values.
template <int kPairs>
__device__ __forceinline__ void mask_pairs(uint32_t (&p)[kPairs], const TileVisibility& tile, int32_t row,
                                           int32_t column) {
  constexpr int kBlockM = 4 * kPairs;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t visible = columns_that_see<kBlockM>(tile, row + 8 * half, column);
#pragma unroll
    for (int i = 0; i < kBlockM / 8; ++i) {
      if ((visible >> (2 * i) & 1) == 0) p[2 * i + half] &= 0xffff0000u;
      if ((visible >> (2 * i + 1) & 1) == 0) p[2 * i + half] &= 0x0000ffffu;
    }
  }
}

// kPositive: negative values become 0.
template <typename T, bool kPositive = false, int kValues>
__device__ __forceinline__ void pack(uint32_t (&packed)[kValues / 2], const float (&values)[kValues]) {
#pragma unroll
  for (int i = 0; i < kValues / 2; ++i) {
    const float low = values[2 * i], high = values[2 * i + 1];
    packed[i] = kPositive ? pack2_positive<T>(low, high) : pack2<T>(low, high);
  }
}

// Loads the first kSteps groups of 16 columns of a first operand from chunks with rows of kRowBytes: four registers
// each.
template <int kChunkBytes, int kSteps, int kRowBytes = kChunkRowBytes, int kRegisters>
__device__ __forceinline__ void load_operand(uint32_t (&operand)[kRegisters], uint32_t address, int32_t warp,
                                             int32_t lane) {
  constexpr int kChunkSteps = kRowBytes / 32;
  const uint32_t row = address + (warp * 16 + lane % 16) * kRowBytes;
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const int32_t place = swizzled<kRowBytes>(k % kChunkSteps * 2 + lane / 16, lane % 16);
    load_matrix_x4(row + k / kChunkSteps * kChunkBytes + place * 16, operand[4 * k], operand[4 * k + 1],
                   operand[4 * k + 2], operand[4 * k + 3]);
  }
}

// Stores dS^T of one warp, 16 keys from `key` on, into chunks of 64 queries and kBlockN keys.
template <int kBlockN, int kPairs>
__device__ __forceinline__ void store_ds(uint32_t address, const uint32_t (&ds16)[kPairs], int32_t key, int32_t lane) {
  const int32_t row = key + lane % 16;
#pragma unroll
  for (int k = 0; k < kPairs / 4; ++k) {
    const int32_t piece = k % 4 * 2 + lane / 16;
    const uint32_t in_chunk = address + row * kChunkRowBytes + ((piece ^ row % 8) * 16);
    store_matrix_x4(in_chunk + k / 4 * (kBlockN * kChunkRowBytes), ds16[4 * k], ds16[4 * k + 1], ds16[4 * k + 2],
                    ds16[4 * k + 3]);
  }
}

// Places of dq of one warp (16 of 64 queries) in a box of 32 columns, swizzled as TMA expects. A thread has columns 8 j
// + lane % 4 * 2 and the next, j from 0 to 3, of rows lane / 4 and lane / 4 + 8. With permuted columns (parted_place),
// four rows of a store fall into four different sets of banks.
struct DqPlaces {
  bool parted;
  uint32_t first;
  static constexpr int kRowsFurther = 8 * kChunkRowBytes / sizeof(float2);

  __device__ __forceinline__ DqPlaces(bool parted, int32_t warp, int32_t lane) : parted(parted) {
    const int32_t row = warp * 16 + lane / 4, odd_piece = lane / 2 % 2;
    first = row * kChunkRowBytes + ((odd_piece * (parted ? 4 : 1)) ^ row % 8) * 16 + lane % 2 * 8;
  }
  // The place 8 rows further is kRowsFurther elements further.
  __device__ __forceinline__ float2* at(float* box, int32_t j) const {
    return reinterpret_cast<float2*>(reinterpret_cast<uint8_t*>(box) + (first ^ (j * (parted ? 16 : 32))));
  }
};

// Stores dq of one warp, 2 kValues columns, into boxes. `columns` of the head dimension are left from its first column
// on.
template <int kValues>
__device__ __forceinline__ void store_dq_boxes(float (*boxes)[64 * 32], const float (&dq)[kValues], int32_t columns,
                                               int32_t warp, int32_t lane) {
#pragma unroll
  for (int j = 0; j < kValues / 4; ++j) {
    float2* const place = DqPlaces(is_parted(j * 8, columns), warp, lane).at(boxes[j / 4], j % 4);
    place[0] = make_float2(dq[4 * j], dq[4 * j + 1]);
    place[DqPlaces::kRowsFurther] = make_float2(dq[4 * j + 2], dq[4 * j + 3]);
  }
}

// Adds to dq what store_dq_boxes or TMA has put into boxes.
template <int kValues>
__device__ __forceinline__ void add_dq_boxes(float (&dq)[kValues], float (*boxes)[64 * 32], int32_t columns,
                                             int32_t warp, int32_t lane) {
#pragma unroll
  for (int j = 0; j < kValues / 4; ++j) {
    const float2* const place = DqPlaces(is_parted(j * 8, columns), warp, lane).at(boxes[j / 4], j % 4);
    const float2 upper = place[0], lower = place[DqPlaces::kRowsFurther];
    dq[4 * j] += upper.x;
    dq[4 * j + 1] += upper.y;
    dq[4 * j + 2] += lower.x;
    dq[4 * j + 3] += lower.y;
  }
}

// Stages up to kChunks chunks of 64 columns of an accumulator, from chunk kFirst on, as 16-bit values, kChunkBytes
// apart, as TMA reads them.
template <typename T, int kChunkBytes, int kFirst, int kChunks, int kValues>
__device__ __forceinline__ void stage_16bit(uint8_t* staging, const float (&values)[kValues]) {
  const auto thread = read_thread();  // read again, so that no register holds it over the main loop
  const int32_t lane = thread % 32;
  const int32_t row = thread % kWarpgroupThreads / 32 * 16 + lane % 16;
#pragma unroll
  for (int k = 4 * kFirst; k < kValues / 8 && k < 4 * (kFirst + kChunks); ++k) {
    const int32_t piece = k % 4 * 2 + lane / 16;
    store_matrix_x4(
        smem_address(staging) + (k / 4 - kFirst) * kChunkBytes + row * kChunkRowBytes + (piece ^ row % 8) * 16,
        pack2<T>(values[8 * k], values[8 * k + 1]), pack2<T>(values[8 * k + 2], values[8 * k + 3]),
        pack2<T>(values[8 * k + 4], values[8 * k + 5]), pack2<T>(values[8 * k + 6], values[8 * k + 7]));
  }
}

// Zeroes rows from `valid` on of a tile: they belong to another sequence or to none, and 0 * NaN is NaN. Called by
// kThreads consecutive threads, which meet at `barrier`.
template <int kChunks, int kChunkBytes, int kThreads, int kRowBytes = kChunkRowBytes>
__device__ void scrub(uint8_t* tile, int32_t valid, uint32_t barrier) {
  constexpr int kRows = kChunkBytes / kRowBytes;
  const int32_t vectors = (kRows - valid) * (kRowBytes / 16);
#pragma unroll 1
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    uint4* rows = reinterpret_cast<uint4*>(tile + chunk * kChunkBytes + valid * kRowBytes);
#pragma unroll 1
    for (int i = threadIdx.x % kThreads; i < vectors; i += kThreads) rows[i] = make_uint4(0, 0, 0, 0);
  }
  fence_async_shared();
  named_barrier_sync(barrier, kThreads);
}

}  // namespace flashbwd::sm90

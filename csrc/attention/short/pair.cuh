// A pair of a sequence and a KV head, the copies of its tiles to shared memory, and the statistics of its query rows.
#pragma once

#include <cstdint>

#include "../pre_post/lse_delta.h"
#include "../sequence.cuh"
#include "traits.cuh"

namespace flashbwd::short_sequences {

struct Pair {
  int32_t batch, head_kv;
  Sequence sequence;
  Visibility visibility;

  __device__ __forceinline__ Pair(const AttentionBackwardParams& p, int32_t batch, int32_t head_kv)
      : batch(batch), head_kv(head_kv), sequence(load_sequence(p, batch)), visibility(visibility_of(p, sequence)) {}
};

// The element of a view of the LSE or of dlse that belongs to a query row.
__device__ __forceinline__ int64_t index_of_row(const RowsView& view, const Pair& pair, int32_t head, int32_t row) {
  return pair.batch * view.batch_stride + head * view.head_stride +
         (view.packed_rows ? pair.sequence.begin_q + row : row) * view.seq_stride;
}

template <typename Traits>
struct Tiles {
  using T = typename Traits::T;
  using SharedStorage = typename Traits::SharedStorage;

  static __device__ __forceinline__ const T* rows_of(const HeadsView& view, int32_t batch, int32_t head,
                                                     int64_t first_row) {
    return static_cast<const T*>(view.data) + batch * view.batch_stride + head * view.head_stride +
           first_row * view.seq_stride;
  }

  // Starts the copies of the first `rows` rows and `columns` columns, and of zeros to the rest of the tile and to rows
  // that `shown` (a key mask; null: none) hides. Four threads copy 64 contiguous bytes.
  static __device__ __forceinline__ void load(uint8_t* tile, const T* source, int64_t row_stride, int32_t rows,
                                              int32_t columns, const uint8_t* shown, int64_t shown_stride) {
    constexpr int kRowsAtOnce = Traits::kThreads / 4;
    static_assert(kRowsAtOnce % 8 == 0, "the swizzle of all rows of a thread is the same");
    const int32_t thread = renew(threadIdx.x), first_row = thread / 4, column = thread % 4 * 8;
    const T* from = source + first_row * row_stride + column;
#pragma unroll
    for (int r = 0; r < Traits::kRows; r += kRowsAtOnce, from += kRowsAtOnce * row_stride) {
      bool exists = first_row + r < rows;
      if (Traits::kFeatures && shown != nullptr) exists = exists && shown[(first_row + r) * shown_stride] != 0;
#pragma unroll
      for (int c = 0; c < Traits::kHeadDim; c += 32) {
        if (Traits::kHeadDim % 32 != 0 && column + c >= Traits::kHeadDim) break;
        const bool here = exists && column + c < columns;
        copy_async_16(smem_address(tile) + r * Traits::kRowBytes +
                          VectorSwizzle<Traits::kRowBytes>::offset(first_row, (column + c) / 8),
                      here ? from + c : source, here ? 16 : 0);
      }
    }
  }

  static __device__ __forceinline__ void load_queries(const AttentionBackwardParams& p, SharedStorage& smem,
                                                      const Pair& pair, int32_t head) {
    const Sequence& s = pair.sequence;
    load(smem.q, rows_of(p.q, pair.batch, head, s.begin_q), p.q.seq_stride, s.seqlen_q, p.head_dim, nullptr, 0);
    load(smem.dout, rows_of(p.dout, pair.batch, head, s.begin_q), p.dout.seq_stride, s.seqlen_q, p.head_dim_v, nullptr,
         0);
  }

  static __device__ __forceinline__ void load_keys(const AttentionBackwardParams& p, SharedStorage& smem,
                                                   const Pair& pair) {
    const Sequence& s = pair.sequence;
    const KeyMaskView& mask = p.key_mask;
    const uint8_t* const shown = mask.data != nullptr ? mask.data + pair.batch * mask.batch_stride : nullptr;
    load(smem.k, rows_of(p.k, pair.batch, pair.head_kv, s.begin_k), p.k.seq_stride, s.seqlen_k, p.head_dim, shown,
         mask.key_stride);
    load(smem.v, rows_of(p.v, pair.batch, pair.head_kv, s.begin_k), p.v.seq_stride, s.seqlen_k, p.head_dim_v, shown,
         mask.key_stride);
  }
};

// lse * log2(e) and delta of a thread's two rows, lane / 4 and lane / 4 + 8 of the warp's 16 queries. They are those
// that pre_post/preprocess.cuh computes for the other families.
template <typename Traits>
struct RowStatistics {
  using T = typename Traits::T;
  static constexpr int kVectors = (Traits::kHeadDim + 31) / 32;  // of a row of `out`, per lane

  float lse_log2[2], delta[2];

  // Starts the loads of `out`, the LSE and dlse.
  __device__ __forceinline__ RowStatistics(const AttentionBackwardParams& p, const Pair& pair, int32_t head) {
    const T* const out = Tiles<Traits>::rows_of(p.out, pair.batch, head, pair.sequence.begin_q);
    const int32_t lane = renew(Traits::lane());
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t row = row_of(r, lane);
      const bool live = sees_a_key(pair.visibility, row);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int32_t column = column_of(i, lane);
        vectors[r][i] = live && column < p.head_dim_v
                            ? __ldg(reinterpret_cast<const uint4*>(out + row * p.out.seq_stride + column))
                            : uint4{};
      }
      const float lse = live ? static_cast<const float*>(p.lse.data)[index_of_row(p.lse, pair, head, row)] : INFINITY;
      counts[r] = !sees_nothing(lse);
      lse_log2[r] = counts[r] ? lse * kLog2E : INFINITY;
      delta[r] = counts[r] && p.dlse.data != nullptr
                     ? -static_cast<const float*>(p.dlse.data)[index_of_row(p.dlse, pair, head, row)]
                     : 0.f;
    }
  }

  // Called when `dout` is in shared memory.
  __device__ __forceinline__ void finish(const uint8_t* dout) {
    const int32_t lane = renew(Traits::lane());
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (Traits::kHeadDim % 32 != 0 && column_of(i, lane) >= Traits::kHeadDim) break;
        const uint32_t offset = VectorSwizzle<Traits::kRowBytes>::offset(row_of(r, lane), column_of(i, lane) / 8);
        sum += dot(vectors[r][i], *reinterpret_cast<const uint4*>(dout + offset));
      }
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (counts[r]) delta[r] += sum;
    }
  }

 private:
  uint4 vectors[2][kVectors];
  bool counts[2];  // the row gets a gradient

  static __device__ __forceinline__ int32_t row_of(int r, int32_t lane) {
    return Traits::warp() * kWarpRows + lane / 4 + r * 8;
  }
  // The four lanes of a row read adjacent vectors.
  static __device__ __forceinline__ int32_t column_of(int i, int32_t lane) { return (i * 4 + lane % 4) * 8; }

  static __device__ __forceinline__ float dot(const uint4& a, const uint4& b) {
    const uint32_t words_a[4] = {a.x, a.y, a.z, a.w}, words_b[4] = {b.x, b.y, b.z, b.w};
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 x = unpack2<T>(words_a[w]), y = unpack2<T>(words_b[w]);
      sum += x.x * y.x + x.y * y.y;
    }
    return sum;
  }
};

}  // namespace flashbwd::short_sequences

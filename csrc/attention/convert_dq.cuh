// After the main kernel: dq = softmax_scale * the sum of the accumulator's slots in index order, in dq's own dtype.
#pragma once

#include <cstdint>

#include "../common/numeric.cuh"
#include "params.h"
#include "schedule.h"
#include "sequence.cuh"
#include "workspace.h"

namespace flashbwd {

constexpr int kConvertThreads = 256;
constexpr int kConvertLanes = 16;  // threads a row, four columns each at a time
constexpr int kConvertRows = kConvertThreads / kConvertLanes;

struct ConvertArguments {
  AttentionBackwardParams params;
  WorkspaceLayout workspace;
  int32_t row_blocks = 0;  // CTAs a (batch, head)
  bool vectors = false;    // four columns of dq can be written at once
};

template <typename T>
__device__ __forceinline__ void store4(T* destination, float4 value) {
  if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<float4*>(destination) = value;
  } else {
    *reinterpret_cast<uint2*>(destination) = make_uint2(pack2<T>(value.x, value.y), pack2<T>(value.z, value.w));
  }
}

template <typename T>
__global__ void __launch_bounds__(kConvertThreads) convert_dq_kernel(const __grid_constant__ ConvertArguments a) {
  const AttentionBackwardParams& p = a.params;
  const WorkspaceLayout& w = a.workspace;
  const uint8_t* const workspace = static_cast<const uint8_t*>(p.workspace);

  const int64_t row_block = blockIdx.x % a.row_blocks;
  const int64_t batch_head = blockIdx.x / a.row_blocks;
  const int32_t head = static_cast<int32_t>(batch_head % p.heads);
  const int32_t batch = static_cast<int32_t>(batch_head / p.heads);
  const Sequence sequence = load_sequence(p, batch);
  const int64_t row = row_block * kConvertRows + threadIdx.x / kConvertLanes;
  const int32_t lane = threadIdx.x % kConvertLanes;
  if (row >= sequence.rows_q) return;

  const int32_t nsplits = reinterpret_cast<const int32_t*>(workspace + w.nsplits_offset)[w.tables > 1 ? batch : 0];
  const int64_t first_row = p.cu_seqlens_q != nullptr ? sequence.begin_q : int64_t{batch} * p.seqlen_q;
  const int64_t first = w.has_offsets ? reinterpret_cast<const int64_t*>(workspace + w.offsets_offset)[batch]
                                      : first_row * p.heads * nsplits * w.row_stride;
  const float* slot = reinterpret_cast<const float*>(workspace + w.accumulator_offset) + first +
                      dq_row_offset(head, 0, row, nsplits, sequence.rows_q, w.row_stride);
  const int64_t slot_stride = sequence.rows_q * w.row_stride;
  T* dq = static_cast<T*>(p.dq.data) + batch * p.dq.batch_stride + head * p.dq.head_stride +
          (sequence.begin_q + row) * p.dq.seq_stride;
  const bool live = row < sequence.seqlen_q;

  for (int32_t column = lane * 4; column < p.head_dim; column += kConvertLanes * 4) {
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int32_t split = 0; live && split < nsplits; ++split) {
      const float4 part = *reinterpret_cast<const float4*>(slot + split * slot_stride + column);
      sum.x += part.x;
      sum.y += part.y;
      sum.z += part.z;
      sum.w += part.w;
    }
    sum.x *= p.softmax_scale;
    sum.y *= p.softmax_scale;
    sum.z *= p.softmax_scale;
    sum.w *= p.softmax_scale;
    if (a.vectors && column + 4 <= p.head_dim) {
      store4(dq + column, sum);
    } else {
      const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (column + i < p.head_dim) dq[column + i] = from_float<T>(values[i]);
      }
    }
  }
}

}  // namespace flashbwd

// dq of finished heads from its fp32 sums, a few rows at a time: a chore (../chores.cuh). Here the warp that finds jobs
// does them while it waits, from global memory; what is left in the end every warp does that has computed.
#pragma once

#include "../../../common/numeric.cuh"
#include "../chores.cuh"
#include "../kernel_params.h"

namespace flashbwd::sm90::wide {

struct Conversion {
  int32_t ticket = -1;  // of the chore that is next
  int32_t chore = -1;   // that is begun
  int32_t next = 0;     // of its vectors of four sums
};

// Of one warp, which is together. `state` is its own, in shared memory where registers are few.
template <typename Traits>
struct Converter {
  static constexpr int kVectors = Traits::kHeadDim <= 192 ? 4 : 2;  // of a lane, read at the same time

  const KernelParams& params;
  Conversion& state;
  int32_t lane;

  // False: no head is finished whose dq is left.
  __device__ bool advance() {
    if (state.chore < 0) {
      __syncwarp();
      if (lane == 0) {
        state.chore = choose_chore(params, state.ticket);
        state.next = 0;
      }
      __syncwarp();
      if (state.chore < 0) return false;
    }
    const int32_t chore = state.chore, next = state.next + lane;
    const AttentionBackwardParams& p = params.attention;
    const int32_t head = chore / params.chores_of_head, batch = head / p.heads;
    const int32_t first_row = (chore - head * params.chores_of_head) * kWideChoreRows;
    const int32_t vectors_of_row = p.head_dim / 4;
    const int32_t vectors = min(kWideChoreRows, p.seqlen_q - first_row) * vectors_of_row;
    const float* const sums = params.dq_sums + (int64_t{head} * p.seqlen_q + first_row) * p.head_dim;
    float4 values[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      values[i] = __ldcg(reinterpret_cast<const float4*>(sums) + min(next + i * 32, vectors - 1));
    }
    using T = typename Traits::T;
    T* const dq = static_cast<T*>(p.dq.data) + batch * p.dq.batch_stride + (head - batch * p.heads) * p.dq.head_stride +
                  first_row * p.dq.seq_stride;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int32_t vector = next + i * 32;
      if (vector >= vectors) continue;
      const int32_t row = vector / vectors_of_row, place = (vector - row * vectors_of_row) * 4;
      *reinterpret_cast<uint2*>(dq + row * p.dq.seq_stride + parted_column(place, p.head_dim)) = {
          pack2<T>(values[i].x * p.softmax_scale, values[i].y * p.softmax_scale),
          pack2<T>(values[i].z * p.softmax_scale, values[i].w * p.softmax_scale)};
    }
    __syncwarp();
    if (lane == 0) {
      state.next += kVectors * 32;
      if (state.next >= vectors) state.chore = -1;
    }
    __syncwarp();
    return true;
  }

  // Until the barrier's phase is there.
  __device__ void advance_until(uint64_t* barrier, uint32_t phase) {
    if (Traits::kChores && params.chores > 0) {
      while (!__all_sync(0xffffffffu, mbarrier_test(barrier, phase))) advance();
    } else {
      mbarrier_wait(barrier, phase);
    }
  }

  // Until all are done or another warp's.
  __device__ void finish() {
    while (Traits::kChores && params.chores > 0) {
      if (!advance()) {
        if (state.ticket >= params.chores) return;
        __nanosleep(100);
      }
    }
  }
};

}  // namespace flashbwd::sm90::wide

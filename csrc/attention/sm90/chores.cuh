// dq from its fp32 sums, 128 rows of a head at a time: a chore. There are about as many chores as jobs. A CTA takes one
// with each job; when its head is finished, the store warps do it between two jobs, in the buffers of dq, while the
// consumers are in the first step of the next job. What is left in the end the consumers do.
#pragma once

#include "../../common/numeric.cuh"
#include "../../common/ordered.cuh"
#include "kernel_params.h"
#include "traits.cuh"

namespace flashbwd::sm90 {

// By one thread: the chore of this CTA, if its head is finished; -1: none yet, or none any more.
inline __device__ int32_t choose_chore(const KernelParams& params, int32_t& ticket) {
  if (params.chores == 0) return -1;
  if (ticket < 0) ticket = atomicAdd(params.chores_taken, 1);
  if (ticket >= params.chores) return -1;
  const int32_t head = ticket / params.chores_of_head;  // of batch * heads
  const int32_t* finished = params.finished + head / (params.attention.heads / params.attention.heads_kv);
  if (load_acquire(finished) < params.counts_of_head) return -1;
  const int32_t chore = ticket;
  ticket = -1;
  return chore;
}

// The part of a chore that falls to a store warp: 64 rows, as parts of dq tiles do.
template <typename Traits, int kBuffer>
struct StoreWarpChore {
  static_assert(Traits::kDqColumnParts == 1 && kChoreRows == 64 * kStoreWarps, "a store warp has 64 whole rows");
  static constexpr int kRow = kBuffer * 64;
  using SharedStorage = typename Traits::SharedStorage;

  // By one thread, when its buffer is free.
  static __device__ __forceinline__ void load(const KernelParams& params, SharedStorage& smem, int32_t chore) {
    const int32_t head = chore / params.chores_of_head;
    const int32_t row = (chore - head * params.chores_of_head) * kChoreRows + kRow;
    fence_async_global();  // sums that are seen to be complete are so to the copy engine
    mbarrier_arrive_expect(&smem.sums_full[kBuffer], sizeof(smem.dq[0][0]));
#pragma unroll
    for (int box = 0; box < 2; ++box) {
      tensor_load_3d(&params.dq_accumulator, &smem.sums_full[kBuffer], smem.dq[kBuffer][0][box], box * 32, row, head);
    }
  }

  // By the warp.
  static __device__ __forceinline__ void convert(const KernelParams& params, SharedStorage& smem, int32_t chore,
                                                 int32_t lane) {
    const AttentionBackwardParams& p = params.attention;
    asm volatile("" : "+r"(lane));  // places that follow from it take no register before
    uint8_t* const sums = reinterpret_cast<uint8_t*>(smem.dq[kBuffer][0]);
    convert_in_place(sums, p.head_dim, params.gradient_scale, lane);
    __syncwarp();
    if (lane == 0 && is_alone()) {
      fence_async_shared();
      const int32_t head = chore / params.chores_of_head;
      const int32_t batch = head / p.heads;
      tensor_store_4d(&params.dq, sums, 0, (chore - head * params.chores_of_head) * kChoreRows + kRow,
                      head - batch * p.heads, batch);
      bulk_commit();
    }
  }

 private:
  // 64 rows of two boxes of 32 columns to one chunk of 64 columns, in the place of the first box. Two rows at a time, a
  // half of the warp each; a lane has 4 columns.
  static __device__ __forceinline__ void convert_in_place(uint8_t* boxes, int32_t head_dim, float scale, int32_t lane) {
    using T = typename Traits::T;
    constexpr int kRowsAtOnce = 4;
    const int32_t columns = lane % 16, place = parted_place(columns * 4, head_dim) / 4;
#pragma unroll 1
    for (int32_t first = lane / 16; first < 64; first += kRowsAtOnce) {
      float4 sums[kRowsAtOnce / 2];
#pragma unroll
      for (int i = 0; i < kRowsAtOnce / 2; ++i) {
        const int32_t row = first + 2 * i;
        sums[i] = *reinterpret_cast<const float4*>(boxes + place / 8 * (64 * kChunkRowBytes) + row * kChunkRowBytes +
                                                   (place % 8 ^ row % 8) * 16);
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kRowsAtOnce / 2; ++i) {
        const int32_t row = first + 2 * i;
        *reinterpret_cast<uint2*>(boxes + row * kChunkRowBytes + (columns / 2 ^ row % 8) * 16 + columns % 2 * 8) = {
            pack2<T>(sums[i].x * scale, sums[i].y * scale), pack2<T>(sums[i].z * scale, sums[i].w * scale)};
      }
    }
  }
};

// By all consumers, when no job is left: the chores that are left, from global memory.
template <typename Traits>
__device__ void finish_chores(const KernelParams& params, typename Traits::SharedStorage& smem) {
  using T = typename Traits::T;
  constexpr int kLanes = Traits::kHeadDim / 4;  // threads a row
  constexpr int kRowsAbreast = kConsumerThreads / kLanes;
  static_assert(kRowsAbreast * kLanes == kConsumerThreads);
  constexpr int kRows = (kChoreRows + kRowsAbreast - 1) / kRowsAbreast;  // of a thread
  const AttentionBackwardParams& p = params.attention;
  const int32_t thread = threadIdx.x - kWarpgroupThreads;
  const int32_t column = thread % kLanes * 4;
  if (params.chores == 0) return;
  while (true) {
    named_barrier_sync(kConsumersBarrier, kConsumerThreads);  // the chore before is read
    if (thread == 0) {
      int32_t chore = choose_chore(params, smem.chores.ticket);
      while (chore < 0 && smem.chores.ticket < params.chores) {
        __nanosleep(100);
        chore = choose_chore(params, smem.chores.ticket);
      }
      smem.chores.last = chore;
    }
    named_barrier_sync(kConsumersBarrier, kConsumerThreads);  // the next one is chosen
    const int32_t chore = smem.chores.last;
    if (chore < 0) return;
    if (column >= p.head_dim) continue;
    const int32_t head = chore / params.chores_of_head, batch = head / p.heads;
    const int32_t first_row = (chore - head * params.chores_of_head) * kChoreRows;
    const int32_t row = first_row + thread / kLanes, end = min(first_row + kChoreRows, p.seqlen_q);
    const float* const source =
        params.dq_sums + int64_t{head} * p.seqlen_q * params.dq_sums_stride + parted_place(column, p.head_dim);
    T* const destination =
        static_cast<T*>(p.dq.data) + batch * p.dq.batch_stride + (head - batch * p.heads) * p.dq.head_stride + column;
    float4 sums[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int32_t r = min(row + i * kRowsAbreast, end - 1);
      sums[i] = __ldcg(reinterpret_cast<const float4*>(source + int64_t{r} * params.dq_sums_stride));
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int32_t r = row + i * kRowsAbreast;
      const float scale = params.gradient_scale;
      if (r < end) {
        *reinterpret_cast<uint2*>(destination + r * p.dq.seq_stride) = {pack2<T>(sums[i].x * scale, sums[i].y * scale),
                                                                        pack2<T>(sums[i].z * scale, sums[i].w * scale)};
      }
    }
  }
}

}  // namespace flashbwd::sm90

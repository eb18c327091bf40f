// The consumer warpgroups. Each owns 64 keys: with S^T = K Q^T and dP^T = V dO^T its accumulators hold P^T and dS^T in
// the order in which the products dV += P^T dO and dK += dS^T Q want their first operand: from registers. Only dQ = dS
// K needs the keys of all warpgroups and takes dS through shared memory.
#pragma once

#include "../../common/numeric.cuh"
#include "kernel_params.h"
#include "traits.cuh"

namespace flashbwd::sm90 {

template <typename Traits>
struct Mainloop {
  using T = typename Traits::T;
  using SharedStorage = typename Traits::SharedStorage;
  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kStages = Traits::kStages;
  static constexpr bool kEarlyDv = Traits::kEarlyDv;
  using Ring = sm90::Ring<kStages>;
  using Work = typename Traits::Work;
  using KeyColumns = AlongColumns<Traits::kKeyChunkBytes>;
  using KeyRows = AlongRows<Traits::kKeyChunkBytes>;
  using QueryColumns = AlongColumns<Traits::kQueryChunkBytes>;
  using QueryRows = AlongRows<Traits::kQueryChunkBytes>;

  // dk, dv: (64 keys, kHeadDim) accumulators of this warpgroup, zero at entry.
  static __device__ void compute(const KernelParams& params, SharedStorage& smem, const Work& work, int32_t warpgroup,
                                 float (&dk)[kHeadDim / 2], float (&dv)[kHeadDim / 2]) {
    Consumer consumer{params, smem, work, warpgroup, Step(work)};
    wait_keys(params, smem, work);
    consumer.run(dk, dv);
  }

 private:
  struct Consumer {
    const KernelParams& params;
    SharedStorage& smem;
    const Work& work;
    int32_t warpgroup;
    Step step;
    // Of work, what every step asks for: shared memory would answer too late.
    BlockRange interior = work.interior;
    int32_t last_step = work.steps - 1;
    int32_t warp = threadIdx.x % kWarpgroupThreads / 32;
    int32_t lane = threadIdx.x % 32;
    int32_t pair = lane % 4 * 2;  // first of this thread's two adjacent columns in each 8 of an accumulator
    float scale_log2 = params.attention.softmax_scale * 1.44269504088896340736f;

    // Operands of this warpgroup: its 64 rows of k and v, and its 64 x 64 part of dq.
    uint32_t k_rows = smem_address(smem.k) + warpgroup * 64 * kChunkRowBytes;
    uint32_t v_rows = smem_address(smem.v) + warpgroup * 64 * kChunkRowBytes;
    uint32_t k_columns = smem_address(smem.k) + warpgroup % Traits::kDqColumnParts * Traits::kKeyChunkBytes;
    uint32_t ds_part = warpgroup / Traits::kDqColumnParts * (kBlockN * kChunkRowBytes);

    // A step's products are S and dP, then dV, dK and dQ. Something of them is always queued while the warps do
    // arithmetic or wait: dP under P; dV under dS, dK under the barrier and the next S under the write of dq; or, where
    // registers do not allow dV so early, dV under the barrier, S and dK under the write of dq. The compiler follows no
    // accumulator that is read in the loop across its back edge, so a turn of the loop begins where nothing is in
    // flight: behind dS of one step. It ends with dS of the next.
    __device__ __forceinline__ void run(float (&dk)[kHeadDim / 2], float (&dv)[kHeadDim / 2]) {
      uint32_t p16[kBlockM / 4], ds16[kBlockM / 4];  // first operands of dV and dK
      float dq[32];                                  // (64 queries, 64 columns)
      {
        float s[kBlockM / 2];
        issue_s(s);
        score_gradients(s, p16, ds16, dv);
      }
#pragma unroll 1
      while (step.index < last_step) {
        const int32_t index = step.index, stage = Ring::stage(index);
        issue_dq(p16, ds16, dq, dk, dv);
        wait_products<1>();  // the product in front of the barrier: its first operand leaves the registers
        step.advance();
        float s[kBlockM / 2];
        issue_s(s);
        if constexpr (kEarlyDv) {
          wait_products<1>();  // dQ
          release(stage);
        } else {
          issue_dk(ds16, dk, stage);
          wait_products<2>();  // dQ
        }
        write_dq(dq, index);
        if constexpr (!kEarlyDv) {
          wait_products<0>();
          release(stage);
        }
        score_gradients(s, p16, ds16, dv);
      }
      const int32_t stage = Ring::stage(step.index);
      issue_dq(p16, ds16, dq, dk, dv);
      if constexpr (!kEarlyDv) issue_dk(ds16, dk, stage);
      wait_products<0>();
      release(stage);
      write_dq(dq, step.index);
      fence_registers(dk);
      fence_registers(dv);
    }

    __device__ __forceinline__ void issue_s(float (&s)[kBlockM / 2]) {
      wait_queries(params, work, step, smem.q_full, smem.q);
      product<T, kHeadDim / 16, false, KeyColumns, QueryColumns>(s, k_rows,
                                                                 smem_address(smem.q[Ring::stage(step.index)]));
    }

    __device__ __forceinline__ void issue_dv(uint32_t (&p16)[kBlockM / 4], float (&dv)[kHeadDim / 2], int32_t stage) {
      product<T, true, QueryRows>(dv, p16, smem_address(smem.dout[stage]));
    }

    __device__ __forceinline__ void issue_dk(uint32_t (&ds16)[kBlockM / 4], float (&dk)[kHeadDim / 2], int32_t stage) {
      product<T, true, QueryRows>(dk, ds16, smem_address(smem.q[stage]));
    }

    // dQ of this step, behind the product that covers the wait for the other warpgroups.
    __device__ __forceinline__ void issue_dq(uint32_t (&p16)[kBlockM / 4], uint32_t (&ds16)[kBlockM / 4],
                                             float (&dq)[32], float (&dk)[kHeadDim / 2], float (&dv)[kHeadDim / 2]) {
      const int32_t stage = Ring::stage(step.index);
      if constexpr (kEarlyDv) {
        issue_dk(ds16, dk, stage);
      } else {
        issue_dv(p16, dv, stage);
      }
      named_barrier_sync(kConsumersBarrier, kConsumerThreads);  // dS of all warpgroups is written
      product<T, kBlockN / 16, false, KeyRows, KeyRows>(dq, smem_address(smem.ds[step.index % 2]) + ds_part, k_columns);
    }

    // From S in flight to dS in registers and in shared memory; nothing is in flight at exit.
    __device__ __forceinline__ void score_gradients(float (&s)[kBlockM / 2], uint32_t (&p16)[kBlockM / 4],
                                                    uint32_t (&ds16)[kBlockM / 4], float (&dv)[kHeadDim / 2]) {
      const int32_t stage = Ring::stage(step.index);
      float dp[kBlockM / 2];  // dP^T, then dS^T: (64 keys, kBlockM)
      // dP queued behind S, without this wait, was 2 to 5 % slower.
      wait_products<0>();
      fence_registers(s);
      wait_queries(params, work, step, smem.dout_full, smem.dout);
      product<T, kHeadDim / 16, false, KeyColumns, QueryColumns>(dp, v_rows, smem_address(smem.dout[stage]));
      // P = exp(scale * S - lse), 0 where masked.
#pragma unroll
      for (int j = 0; j < kBlockM / 8; ++j) {
        const float2 lse = *reinterpret_cast<const float2*>(&smem.lse_log2[stage][8 * j + pair]);
        s[4 * j + 0] = exp2_approximate(s[4 * j + 0] * scale_log2 - lse.x);
        s[4 * j + 1] = exp2_approximate(s[4 * j + 1] * scale_log2 - lse.y);
        s[4 * j + 2] = exp2_approximate(s[4 * j + 2] * scale_log2 - lse.x);
        s[4 * j + 3] = exp2_approximate(s[4 * j + 3] * scale_log2 - lse.y);
      }
      if (!interior.contains(step.query_block)) {
        mask(s, work.visibility, work.first_key + warpgroup * 64 + warp * 16 + lane / 4,
             step.query_block * kBlockM + pair);
      }
      if constexpr (kEarlyDv) {
        pack(p16, s);
        issue_dv(p16, dv, stage);
        wait_products<1>();
      } else {
        wait_products<0>();
      }
      fence_registers(dp);
      // dS = P * (dP - delta)
#pragma unroll
      for (int j = 0; j < kBlockM / 8; ++j) {
        const float2 delta = *reinterpret_cast<const float2*>(&smem.delta[stage][8 * j + pair]);
        dp[4 * j + 0] = s[4 * j + 0] * (dp[4 * j + 0] - delta.x);
        dp[4 * j + 1] = s[4 * j + 1] * (dp[4 * j + 1] - delta.y);
        dp[4 * j + 2] = s[4 * j + 2] * (dp[4 * j + 2] - delta.x);
        dp[4 * j + 3] = s[4 * j + 3] * (dp[4 * j + 3] - delta.y);
      }
      if constexpr (!kEarlyDv) pack(p16, s);
      pack(ds16, dp);
      // This buffer of dS was read two steps ago, by products that every warpgroup waited for before it arrived at the
      // barrier of the last step.
      store_ds(smem_address(smem.ds[step.index % 2]), ds16, warpgroup * 64 + warp * 16, lane);
      fence_async_shared();
      if constexpr (kEarlyDv) wait_products<0>();
    }

    // The stage of q and dout is read; every warp says so.
    __device__ __forceinline__ void release(int32_t stage) {
      __syncwarp();
      if (lane == 0) {
        mbarrier_arrive(&smem.dout_empty[stage]);
        mbarrier_arrive(&smem.q_empty[stage]);
      }
    }

    // Into two boxes of 32 columns, swizzled as the copy engine reads them, when the store warp has let go of them.
    __device__ __forceinline__ void write_dq(float (&dq)[32], int32_t index) {
      fence_registers(dq);
      named_barrier_sync(kDqEmptyBarrier + warpgroup, kDqBarrierThreads);
      const int32_t row = warp * 16 + lane / 4;
      // Odd rows go through the columns in another order: four rows then fall into four different sets of banks.
      const bool odd = row % 2 != 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int32_t piece = ((odd ? j ^ 2 : j) % 4 * 2 + lane % 4 / 2) ^ row % 8;  // row + 8 has the same row % 8
        float* place = smem.dq[index % 2][warpgroup][j / 4] + row * 32 + piece * 4 + lane % 2 * 2;
        const float2 upper =
            odd ? make_float2(dq[4 * (j ^ 2)], dq[4 * (j ^ 2) + 1]) : make_float2(dq[4 * j], dq[4 * j + 1]);
        const float2 lower =
            odd ? make_float2(dq[4 * (j ^ 2) + 2], dq[4 * (j ^ 2) + 3]) : make_float2(dq[4 * j + 2], dq[4 * j + 3]);
        *reinterpret_cast<float2*>(place) = upper;
        *reinterpret_cast<float2*>(place + 8 * 32) = lower;
      }
      named_barrier_arrive(kDqFullBarrier + warpgroup, kDqBarrierThreads);
    }
  };

  // Rows from `valid` on of a tile become zero: they belong to another sequence, or to nobody, and 0 * NaN is NaN.
  // All consumers call it.
  template <int kChunkBytes>
  static __device__ void scrub(uint8_t* tile, int32_t valid) {
    constexpr int kRows = kChunkBytes / kChunkRowBytes;
    const int32_t vectors = (kRows - valid) * (kChunkRowBytes / 16);
    for (int chunk = 0; chunk < Traits::kChunks; ++chunk) {
      uint4* rows = reinterpret_cast<uint4*>(tile + chunk * kChunkBytes + valid * kChunkRowBytes);
      for (int i = threadIdx.x % kConsumerThreads; i < vectors; i += kConsumerThreads) rows[i] = make_uint4(0, 0, 0, 0);
    }
    fence_async_shared();
    named_barrier_sync(kConsumersBarrier, kConsumerThreads);
  }

  static __device__ void wait_keys(const KernelParams& params, SharedStorage& smem, const Work& work) {
    mbarrier_wait(&smem.k_full, 0);
    mbarrier_wait(&smem.v_full, 0);
    const int32_t valid = work.visibility.seqlen_k - work.first_key;
    if (params.rows_may_be_poisoned && valid < kBlockN) {
      scrub<Traits::kKeyChunkBytes>(smem.k, valid);
      scrub<Traits::kKeyChunkBytes>(smem.v, valid);
    }
  }

  static __device__ __forceinline__ void wait_queries(const KernelParams& params, const Work& work, const Step& step,
                                                      uint64_t* full, uint8_t (*tiles)[Traits::kQueryBytes]) {
    const int32_t stage = Ring::stage(step.index);
    mbarrier_wait(&full[stage], Ring::phase(step.index));
    const int32_t valid = work.visibility.seqlen_q - step.query_block * kBlockM;
    if (params.rows_may_be_poisoned && valid < kBlockM) scrub<Traits::kQueryChunkBytes>(tiles[stage], valid);
  }

  // Zero where key `key` (and key + 8) is invisible to the queries of an accumulator whose first column of this thread
  // is `query`.
  static __device__ __forceinline__ void mask(float (&p)[kBlockM / 2], const Visibility& visibility, int32_t key,
                                              int32_t query) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t j = key + 8 * half;
      // Columns c in [begin, end) see key j: lo <= j - i < hi for i = query + c.
      const int64_t begin = at_least(at_most(j - visibility.hi + 1 - query, kBlockM), 0);
      const int64_t end = at_least(at_most(at_most(j - visibility.lo + 1, visibility.seqlen_q) - query, kBlockM), 0);
      const int32_t first = static_cast<int32_t>(j < visibility.seqlen_k ? begin : kBlockM);
      const int32_t past = static_cast<int32_t>(end);
#pragma unroll
      for (int i = 0; i < kBlockM / 8; ++i) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const int column = 8 * i + odd;
          float& value = p[4 * i + 2 * half + odd];
          value = column >= first && column < past ? value : 0.f;
        }
      }
    }
  }

  static __device__ __forceinline__ void pack(uint32_t (&packed)[kBlockM / 4], const float (&values)[kBlockM / 2]) {
#pragma unroll
    for (int i = 0; i < kBlockM / 4; ++i) packed[i] = pack2<T>(values[2 * i], values[2 * i + 1]);
  }

  // dS^T of one warp, 16 keys from `key` on, into chunks of 64 queries.
  static __device__ __forceinline__ void store_ds(uint32_t address, const uint32_t (&ds16)[kBlockM / 4], int32_t key,
                                                  int32_t lane) {
    const int32_t row = key + lane % 16;
#pragma unroll
    for (int k = 0; k < kBlockM / 16; ++k) {
      const int32_t piece = k % 4 * 2 + lane / 16;
      const uint32_t place = k / 4 * (kBlockN * kChunkRowBytes) + row * kChunkRowBytes + ((piece ^ row % 8) * 16);
      store_matrix_x4(address + place, ds16[4 * k], ds16[4 * k + 1], ds16[4 * k + 2], ds16[4 * k + 3]);
    }
  }
};

}  // namespace flashbwd::sm90

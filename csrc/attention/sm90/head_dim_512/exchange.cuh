// Scores of a tile in shared memory, in the order in which threads hold them: they pass from a thread to the threads of
// the same number in other warpgroups, in this CTA or in the other one of the cluster.
#pragma once

#include "traits.cuh"

namespace flashbwd::sm90::head_dim_512 {

// Stores 16 bytes to `destination` in another CTA; its `barrier` receives the bytes.
__device__ __forceinline__ void store_to_cta(void* destination, uint64_t* barrier, uint32_t rank, const uint4& value) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   address_in_cta(destination, rank)),
               "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(address_in_cta(barrier, rank))
               : "memory");
}

// Packed scores in this thread's slots of the first half of an exchange buffer.
template <typename Exchange>
__device__ __forceinline__ void store_packed(Exchange& exchange, int32_t thread,
                                             const uint32_t (&packed)[kScores / 2]) {
#pragma unroll
  for (int j = 0; j < kScores / 8; ++j) {
    reinterpret_cast<uint4&>(exchange[j][thread]) =
        make_uint4(packed[4 * j], packed[4 * j + 1], packed[4 * j + 2], packed[4 * j + 3]);
  }
}

template <typename Exchange>
__device__ __forceinline__ void load_packed(uint32_t (&packed)[kScores / 2], const Exchange& exchange, int32_t thread) {
#pragma unroll
  for (int j = 0; j < kScores / 8; ++j) {
    const float4 slot = load_in_order(exchange[j][thread]);
    packed[4 * j] = __float_as_uint(slot.x);
    packed[4 * j + 1] = __float_as_uint(slot.y);
    packed[4 * j + 2] = __float_as_uint(slot.z);
    packed[4 * j + 3] = __float_as_uint(slot.w);
  }
}

}  // namespace flashbwd::sm90::head_dim_512

// Hopper's own instructions, one function each: mbarriers, bulk and tensor copies, named barriers, register budgets.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace flashbwd {

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- mbarriers. `phase` is the parity of the phase waited for; a fresh barrier has completed parity 1. ----

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(arrivals));
}

// Makes initialised barriers visible to the copy engine. Follow with a CTA barrier for the other threads.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t phase) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n"
      "}" ::"r"(smem_address(barrier)),
      "r"(phase)
      : "memory");
}

// Whether the phase is there.
__device__ __forceinline__ bool mbarrier_test(uint64_t* barrier, uint32_t phase) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(done)
      : "r"(smem_address(barrier)), "r"(phase)
      : "memory");
  return done != 0;
}

// ---- Clusters. An address of this CTA's shared memory is also one of the same place in another CTA's. ----

__device__ __forceinline__ uint32_t rank_in_cluster() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ uint32_t address_in_cta(const void* smem, uint32_t rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(smem_address(smem)), "r"(rank));
  return address;
}

// A barrier of all threads of all CTAs: what they did to shared memory before they arrived is seen behind the wait.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// To `destination` of another CTA, whose `barrier` is told the four bytes.
__device__ __forceinline__ void store_to_cta(int32_t* destination, uint64_t* barrier, uint32_t rank, int32_t value) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.s32 [%0], %1, [%2];" ::"r"(
                   address_in_cta(destination, rank)),
               "r"(value), "r"(address_in_cta(barrier, rank))
               : "memory");
}

// What this thread has read is read; what it has written is not yet seen by the other CTA. A release to the cluster
// would be a fence of the whole GPU.
__device__ __forceinline__ void mbarrier_arrive_in_cta(uint64_t* barrier, uint32_t rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in_cta(barrier, rank)) : "memory");
}

// From this CTA's shared memory to `destination` of another's, whose `barrier` is told the bytes.
__device__ __forceinline__ void bulk_copy_to_cta(void* destination, uint64_t* barrier, uint32_t rank,
                                                 const void* source, uint32_t bytes) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   address_in_cta(destination, rank)),
               "r"(smem_address(source)), "r"(bytes), "r"(address_in_cta(barrier, rank))
               : "memory");
}

// ---- The copy engine ----

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(map)) : "memory");
}

__device__ __forceinline__ void tensor_load_3d(const CUtensorMap* map, uint64_t* barrier, void* smem, int32_t c0,
                                               int32_t c1, int32_t c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(smem_address(smem)),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(smem_address(barrier)), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

// By a warp: what L2 has of these numbers is never written to memory, and they are lost.
__device__ __forceinline__ void discard_lines(const float* numbers, int32_t count, int32_t lane) {
  constexpr uintptr_t kLine = 128;
  const uintptr_t first = reinterpret_cast<uintptr_t>(numbers), end = first + count * sizeof(float);
  for (uintptr_t line = (first + kLine - 1) / kLine * kLine + lane * kLine; line + kLine <= end; line += 32 * kLine) {
    asm volatile("discard.global.L2 [%0], 128;" ::"l"(line) : "memory");
  }
}

// Into L2.
__device__ __forceinline__ void tensor_prefetch_3d(const CUtensorMap* map, int32_t c0, int32_t c1, int32_t c2) {
  asm volatile(
      "cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(reinterpret_cast<uint64_t>(map)),
      "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

__device__ __forceinline__ void tensor_load_4d(const CUtensorMap* map, uint64_t* barrier, void* smem, int32_t c0,
                                               int32_t c1, int32_t c2, int32_t c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(smem_address(smem)),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(smem_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// How long L2 keeps what a copy brings or stores, as createpolicy.fractional encodes it for all of an access.
constexpr uint64_t kEvictNormal = 0x1000000000000000;
constexpr uint64_t kEvictFirst = 0x12f0000000000000;

__device__ __forceinline__ void tensor_load_4d(const CUtensorMap* map, uint64_t* barrier, void* smem, int32_t c0,
                                               int32_t c1, int32_t c2, int32_t c3, uint64_t keep) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(smem_address(smem)),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(smem_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(keep)
      : "memory");
}

__device__ __forceinline__ void bulk_load(void* smem, const void* global, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   smem_address(smem)),
               "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(smem_address(barrier))
               : "memory");
}

__device__ __forceinline__ void tensor_reduce_add_3d(const CUtensorMap* map, const void* smem, int32_t c0, int32_t c1,
                                                     int32_t c2) {
  asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
                   reinterpret_cast<uint64_t>(map)),
               "r"(smem_address(smem)), "r"(c0), "r"(c1), "r"(c2)
               : "memory");
}

__device__ __forceinline__ void tensor_store_3d(const CUtensorMap* map, const void* smem, int32_t c0, int32_t c1,
                                                int32_t c2) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
                   reinterpret_cast<uint64_t>(map)),
               "r"(smem_address(smem)), "r"(c0), "r"(c1), "r"(c2)
               : "memory");
}

__device__ __forceinline__ void tensor_store_4d(const CUtensorMap* map, const void* smem, int32_t c0, int32_t c1,
                                                int32_t c2, int32_t c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
                   reinterpret_cast<uint64_t>(map)),
               "r"(smem_address(smem)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}

__device__ __forceinline__ void tensor_store_4d(const CUtensorMap* map, const void* smem, int32_t c0, int32_t c1,
                                                int32_t c2, int32_t c3, uint64_t keep) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%2, %3, %4, %5}], [%1], "
      "%6;" ::"l"(reinterpret_cast<uint64_t>(map)),
      "r"(smem_address(smem)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(keep)
      : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Shared memory of all but the last kPending groups may be reused.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// All but the last kPending groups have reached global memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Ordinary stores to shared memory before it are seen by wgmma and the copy engine after it.
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The same between ordinary accesses to global memory and those of the copy engine.
__device__ __forceinline__ void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ---- Named barriers among `threads` threads; barrier 0 is __syncthreads. ----

__device__ __forceinline__ void named_barrier_sync(uint32_t barrier, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(uint32_t barrier, uint32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ---- Register budgets ----

template <int kRegisters>
__device__ __forceinline__ void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- Small conveniences ----

// True for one thread of those lanes of a warp, always the same one. They are here together, all others are not.
template <uint32_t kLanes>
__device__ __forceinline__ bool elect_of() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred one;\n"
      "elect.sync _|one, %1;\n"
      "selp.u32 %0, 1, 0, one;\n"
      "}"
      : "=r"(elected)
      : "n"(kLanes));
  return elected != 0;
}

// True for one thread of a warp that is together. The compiler knows that no other follows, and takes the operands of a
// copy as they are; behind `lane == 0` it makes a loop over the lanes of each copy.
__device__ __forceinline__ bool elect_one() { return elect_of<~0u>(); }

// The same behind `lane == 0`: true.
__device__ __forceinline__ bool is_alone() { return elect_of<1>(); }

// threadIdx.x, read again: no register holds it, or what follows from it, since it was read before.
__device__ __forceinline__ int32_t read_thread() {
  int32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Four 8 x 8 matrices of 16-bit elements from fragments to shared memory; lane l gives the row address of row l % 8 of
// matrix l / 8.
__device__ __forceinline__ void store_matrix_x4(uint32_t address, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m0), "r"(m1),
               "r"(m2), "r"(m3)
               : "memory");
}

// The same of transposed matrices: fragments of tiles whose rows lie as columns.
__device__ __forceinline__ void store_matrix_x4_transposed(uint32_t address, uint32_t m0, uint32_t m1, uint32_t m2,
                                                           uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m0),
               "r"(m1), "r"(m2), "r"(m3)
               : "memory");
}

// The other way, into registers.
__device__ __forceinline__ void load_matrix_x4(uint32_t address, uint32_t& m0, uint32_t& m1, uint32_t& m2,
                                               uint32_t& m3) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared::cta.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m0), "=r"(m1), "=r"(m2), "=r"(m3)
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void load_matrix_x4_transposed(uint32_t address, uint32_t& m0, uint32_t& m1, uint32_t& m2,
                                                          uint32_t& m3) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m0), "=r"(m1), "=r"(m2), "=r"(m3)
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace flashbwd

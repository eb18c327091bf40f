// Hopper instructions, one function each: mbarriers, bulk and tensor copies (TMA), named barriers, register budgets.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "numeric.cuh"

namespace flashbwd {

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- mbarriers. `phase` is the parity of the phase to wait for; parity 1 of a new barrier counts as completed. ----

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(arrivals));
}

// Makes initialized barriers visible to TMA. The caller then needs a CTA barrier for the other threads.
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

// Whether the phase has completed.
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

// ---- Clusters. An address in this CTA's shared memory also names the same offset in another CTA's. ----

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

// A barrier of all threads of the cluster. Writes to shared memory before the arrival are visible after the wait.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// Stores to `destination` in another CTA; its `barrier` receives the four bytes.
__device__ __forceinline__ void store_to_cta(int32_t* destination, uint64_t* barrier, uint32_t rank, int32_t value) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.s32 [%0], %1, [%2];" ::"r"(
                   address_in_cta(destination, rank)),
               "r"(value), "r"(address_in_cta(barrier, rank))
               : "memory");
}

// Arrives at another CTA's barrier. It orders nothing for that CTA, because a release at cluster scope would compile to
// a GPU-wide fence: earlier writes may not be visible there yet, and a read whose value nothing has used may still be
// under way. So use the value of a read first, if the other CTA then overwrites what was read.
__device__ __forceinline__ void mbarrier_arrive_in_cta(uint64_t* barrier, uint32_t rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in_cta(barrier, rank)) : "memory");
}

// Copies from this CTA's shared memory to `destination` in another CTA; its `barrier` receives the bytes.
__device__ __forceinline__ void bulk_copy_to_cta(void* destination, uint64_t* barrier, uint32_t rank,
                                                 const void* source, uint32_t bytes) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   address_in_cta(destination, rank)),
               "r"(smem_address(source)), "r"(bytes), "r"(address_in_cta(barrier, rank))
               : "memory");
}

// ---- TMA ----

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

// Called by a warp. Discards the L2 lines that lie entirely within these numbers: they are not written back to memory,
// and their values are lost.
__device__ __forceinline__ void discard_lines(const float* numbers, int32_t count, int32_t lane) {
  constexpr uintptr_t kLine = 128;
  const uintptr_t first = reinterpret_cast<uintptr_t>(numbers), end = first + count * sizeof(float);
  for (uintptr_t line = (first + kLine - 1) / kLine * kLine + lane * kLine; line + kLine <= end; line += 32 * kLine) {
    asm volatile("discard.global.L2 [%0], 128;" ::"l"(line) : "memory");
  }
}

__device__ __forceinline__ void tensor_load_4d(const CUtensorMap* map, uint64_t* barrier, void* smem, int32_t c0,
                                               int32_t c1, int32_t c2, int32_t c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(smem_address(smem)),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(smem_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// Prefetches to L2.
__device__ __forceinline__ void tensor_prefetch_4d(const CUtensorMap* map, int32_t c0, int32_t c1, int32_t c2,
                                                   int32_t c3) {
  asm volatile(
      "cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(reinterpret_cast<uint64_t>(map)),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

__device__ __forceinline__ void bulk_prefetch(const void* global, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(global)), "r"(bytes)
               : "memory");
}

// L2 eviction priorities, encoded as createpolicy.fractional does for a fraction of 1.
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

// Waits until the shared memory of all but the last kPending groups may be reused.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until all but the last kPending groups have been written to global memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Makes earlier normal stores to shared memory visible to later wgmma and TMA instructions.
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Orders normal accesses to global memory and those of TMA.
__device__ __forceinline__ void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Adds four adjacent numbers in global memory, whose address is a multiple of 16 bytes, in no particular order. The
// thread does not wait for the add.
__device__ __forceinline__ void add_vector(float* sums, float x, float y, float z, float w) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(sums)),
               "f"(x), "f"(y), "f"(z), "f"(w)
               : "memory");
}

// ---- Named barriers of `threads` threads; barrier 0 is __syncthreads. ----

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

// ---- Miscellaneous ----

// True for one of the lanes in the mask kLanes, always the same one. Exactly these lanes must call it, converged.
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

// True for one thread of a converged warp. The compiler then knows that a single thread remains, and uses a copy's
// operands directly; after `if (lane == 0)` it would emit a loop over the lanes around each copy.
__device__ __forceinline__ bool elect_one() { return elect_of<~0u>(); }

// Always true. Inside `if (lane == 0)`, it tells the compiler that a single thread remains.
__device__ __forceinline__ bool assume_single_lane() { return elect_of<1>(); }

// Rereads threadIdx.x, so that the compiler keeps neither it nor values derived from it in registers.
__device__ __forceinline__ int32_t read_thread() {
  int32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Stores four 8 x 8 matrices of 16-bit elements from fragments to shared memory. Lane l passes the address of row l % 8
// of matrix l / 8.
__device__ __forceinline__ void store_matrix_x4(uint32_t address, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m0), "r"(m1),
               "r"(m2), "r"(m3)
               : "memory");
}

// The same with transposed matrices.
__device__ __forceinline__ void store_matrix_x4_transposed(uint32_t address, uint32_t m0, uint32_t m1, uint32_t m2,
                                                           uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m0),
               "r"(m1), "r"(m2), "r"(m3)
               : "memory");
}

// Loads such matrices into fragments.
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

// Accesses to shared memory in program order: otherwise the compiler loads a whole tile ahead, into registers that do
// not exist.
__device__ __forceinline__ float4 load_in_order(const float4& source) {
  float4 value;
  asm volatile("ld.volatile.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(smem_address(&source))
               : "memory");
  return value;
}
__device__ __forceinline__ void store_in_order(float4& destination, const float4& value) {
  asm volatile("st.volatile.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(smem_address(&destination)), "f"(value.x),
               "f"(value.y), "f"(value.z), "f"(value.w)
               : "memory");
}

// r = 1 - tanh(x), with an error of about 1e-7. The derivative of tanh is r (2 - r).
__device__ __forceinline__ float tanh_complement(float twice_x_log2) {
  return __fdividef(2.f, 1.f + exp2_approximate(twice_x_log2));
}

}  // namespace flashbwd

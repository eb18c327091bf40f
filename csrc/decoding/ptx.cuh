// PTX wrappers of the decoding kernels. NVRTC compiles this file too, so it includes only headers of
// csrc/.
#pragma once

#include "../mods/scalars.cuh"

#ifdef __CUDACC__

namespace flashbwd {

__device__ __forceinline__ uint32 shared_address(const void* pointer) {
  return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes from global to shared memory; the bytes after the first `bytes` become zero.
__device__ __forceinline__ void copy_async_16(uint32 shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(shared), "l"(global), "r"(bytes)
               : "memory");
}

// Prefetches into L2 with evict_last, so that streaming K and V do not evict the line.
__device__ __forceinline__ void prefetch(const void* global) {
  asm volatile("prefetch.global.L2::evict_last [%0];\n" ::"l"(global));
}

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;\n"); }

// Waits until at most kPending of this thread's cp.async groups are outstanding.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void load_matrices(uint32 (&r)[4], uint32 shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(uint32 (&r)[4], uint32 shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

// d (16, 8) += a (16, 16) @ b (16, 8), 16-bit operands, fp32 accumulation.
template <bool kBFloat16>
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  if constexpr (kBFloat16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// d (16, 8) += a (16, 8) @ b (8, 8) of TF32 values.
__device__ __forceinline__ void mma_16x8x8(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32 to_tf32(float x) {
  uint32 y;
  asm("cvt.rna.tf32.f32 %0, %1;\n" : "=r"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ uint32 load_shared(uint32 shared) {
  uint32 x;
  asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(x) : "r"(shared) : "memory");
  return x;
}

__device__ __forceinline__ void store_shared(uint32 shared, const uint32 (&words)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(shared), "r"(words[0]), "r"(words[1]), "r"(words[2]),
               "r"(words[3])
               : "memory");
}

// Programmatic dependent launch: the next kernel on the stream may start when every CTA has called this or has exited.
// That kernel must call wait_for_previous_launch() before it reads this kernel's results. Before sm_90, both do
// nothing.
__device__ __forceinline__ void allow_next_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_previous_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

// All threads of the cluster's CTAs arrive and wait. Before sm_90 there are no clusters, and this does nothing.
__device__ __forceinline__ void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;\n" ::
          : "memory");
#endif
}

// Loads two floats from address `shared` in the shared memory of the cluster's CTA `rank`.
__device__ __forceinline__ float2 load_cluster(uint32 shared, int rank) {
  float2 x = make_float2(0.f, 0.f);
#if __CUDA_ARCH__ >= 900
  uint32 address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(address) : "r"(shared), "r"(rank));
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];\n" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
#endif
  return x;
}

}  // namespace flashbwd

#endif

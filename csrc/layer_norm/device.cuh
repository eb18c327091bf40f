// Device helpers of the LayerNorm kernels: conversions, cp.async copies, warp sums, barriers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "../common/launch_overlap.cuh"
#include "config.h"

namespace flashbwd::layer_norm {

template <typename T>
__device__ T from_float(float value);
template <>
inline __device__ float from_float<float>(float value) {
  return value;
}
template <>
inline __device__ __half from_float<__half>(float value) {
  return __float2half_rn(value);
}
template <>
inline __device__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

inline __device__ float to_float(float value) { return value; }
inline __device__ float to_float(__half value) { return __half2float(value); }
inline __device__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

inline __device__ float load_float(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kFloat16:
      return __half2float(static_cast<const __half*>(data)[index]);
    case DType::kBFloat16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
    default:
      return static_cast<const float*>(data)[index];
  }
}

inline __device__ void store_float(void* data, DType dtype, int64_t index, float value) {
  switch (dtype) {
    case DType::kFloat16:
      static_cast<__half*>(data)[index] = from_float<__half>(value);
      break;
    case DType::kBFloat16:
      static_cast<__nv_bfloat16*>(data)[index] = from_float<__nv_bfloat16>(value);
      break;
    default:
      static_cast<float*>(data)[index] = value;
  }
}

// Converts 16 bytes to 16 / sizeof(T) floats.
template <typename T>
__device__ void unpack(const uint4& raw, float* values) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      values[i] = __uint_as_float(words[i]);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      values[2 * i] = __uint_as_float(words[i] << 16);
      values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    } else {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
      values[2 * i] = pair.x;
      values[2 * i + 1] = pair.y;
    }
  }
}

template <typename T>
__device__ uint4 pack(const float* values) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      words[i] = __float_as_uint(values[i]);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
      words[i] = *reinterpret_cast<const uint32_t*>(&pair);
    } else {
      const __half2 pair = __floats2half2_rn(values[2 * i], values[2 * i + 1]);
      words[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Stores a vector of floats with 16-byte stores.
template <int kElements>
__device__ void store_floats(float* target, const float (&values)[kElements]) {
#pragma unroll
  for (int q = 0; q < kElements; q += 4) {
    *reinterpret_cast<float4*>(target + q) = make_float4(values[q], values[q + 1], values[q + 2], values[q + 3]);
  }
}

// For xhat = (z - beta) / divisor, with z the norm's output and the divisor gamma, |gamma| clamped from below to
// kLeastGamma.
inline __device__ float inverse_of_divisor(float gamma) {
  constexpr float kMost = 1.f / kLeastGamma;
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(gamma));
  return fmaxf(fminf(inverse, kMost), -kMost);
}
inline __device__ float gamma_over_divisor(float gamma) { return __saturatef(fabsf(gamma) * (1.f / kLeastGamma)); }

inline __device__ void store_streaming(void* address, uint4 value) { __stcs(static_cast<uint4*>(address), value); }

inline __device__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes; with `bytes`, copies the first `bytes` and zeroes the rest. Both addresses are 16-byte aligned.
inline __device__ void copy_async_16(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n" ::"r"(shared), "l"(global) : "memory");
}
inline __device__ void copy_async_16(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(shared), "l"(global), "r"(bytes)
               : "memory");
}

// Copies 4 or 8 bytes; both addresses are aligned to kBytes.
template <int kBytes>
__device__ void copy_async(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;\n" ::"r"(shared), "l"(global), "n"(kBytes) : "memory");
}

template <typename T>
__device__ void store_shared(uint32_t shared, T value) {
  if constexpr (sizeof(T) == 4) {
    asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(shared), "r"(__float_as_uint(value)) : "memory");
  } else if constexpr (sizeof(T) == 1) {
    asm volatile("st.shared.b8 [%0], %1;\n" ::"r"(shared), "r"(static_cast<uint32_t>(value)) : "memory");
  } else {
    asm volatile("st.shared.b16 [%0], %1;\n" ::"r"(shared), "h"(*reinterpret_cast<const uint16_t*>(&value)) : "memory");
  }
}

inline __device__ void store_shared(uint32_t shared, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(shared), "r"(value) : "memory");
}
inline __device__ void store_shared(uint32_t shared, float2 value) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};\n" ::"r"(shared), "f"(value.x), "f"(value.y) : "memory");
}
inline __device__ void store_shared_16(uint32_t shared, uint4 value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(shared), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

// A plain load without asm volatile, which the compiler may reorder.
inline __device__ uint4 load_shared_16(uint32_t shared) {
  return *static_cast<const uint4*>(__cvta_shared_to_generic(shared));
}

template <typename T>
__device__ T load_shared(uint32_t shared) {
  if constexpr (std::is_same_v<T, float2>) {
    float2 value;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];\n" : "=f"(value.x), "=f"(value.y) : "r"(shared) : "memory");
    return value;
  } else if constexpr (std::is_same_v<T, uint2>) {
    uint2 value;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];\n" : "=r"(value.x), "=r"(value.y) : "r"(shared));
    return value;
  } else if constexpr (std::is_same_v<T, uint4>) {
    uint4 value;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(shared));
    return value;
  } else if constexpr (sizeof(T) == 4) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];\n" : "=f"(value) : "r"(shared) : "memory");
    return value;
  } else {
    uint16_t bits;
    asm volatile("ld.shared.b16 %0, [%1];\n" : "=h"(bits) : "r"(shared) : "memory");
    return *reinterpret_cast<const T*>(&bits);
  }
}

// Returns the value through an opaque asm, so that the compiler keeps it in a register instead of recomputing it.
inline __device__ uint32_t keep(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}
template <typename T>
__device__ T* keep(T* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}
inline __device__ void commit_copies() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Waits until at most `pending` of this thread's cp.async groups are outstanding. `pending` is 1 or 2 per stage but
// one, so 1 to 4 or 6; with any other value it waits for all groups.
inline __device__ void wait_copies(int pending) {
  switch (pending) {
    case 1:
      asm volatile("cp.async.wait_group 1;\n" ::: "memory");
      break;
    case 2:
      asm volatile("cp.async.wait_group 2;\n" ::: "memory");
      break;
    case 3:
      asm volatile("cp.async.wait_group 3;\n" ::: "memory");
      break;
    case 4:
      asm volatile("cp.async.wait_group 4;\n" ::: "memory");
      break;
    case 6:
      asm volatile("cp.async.wait_group 6;\n" ::: "memory");
      break;
    default:
      asm volatile("cp.async.wait_group 0;\n" ::: "memory");
  }
}

// Sums over `width` adjacent lanes (a power of two), or over the warp if `width` is larger. All lanes get equal bits.
inline __device__ float2 warp_sum(float2 s, int width) {
  if (width >= kWarp) {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      s.x += __shfl_xor_sync(0xffffffffu, s.x, offset);
      s.y += __shfl_xor_sync(0xffffffffu, s.y, offset);
    }
    return s;
  }
#pragma unroll 1
  for (int offset = 1; offset < width; offset *= 2) {
    s.x += __shfl_xor_sync(0xffffffffu, s.x, offset);
    s.y += __shfl_xor_sync(0xffffffffu, s.y, offset);
  }
  return s;
}

inline __device__ void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Read threadIdx.x and blockIdx.x again, so that no register holds them until here.
inline __device__ int read_thread_index() {
  int index;
  asm volatile("mov.u32 %0, %tid.x;" : "=r"(index));
  return index;
}
inline __device__ int read_block_index() {
  int index;
  asm volatile("mov.u32 %0, %ctaid.x;" : "=r"(index));
  return index;
}

// Named barrier of `threads` threads, a multiple of 32. Barrier 0 is that of __syncthreads().
inline __device__ void group_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

constexpr bool kHasClusters = true;

// Waits until the phase with this parity completes; has acquire semantics.
inline __device__ void wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Arrives on the mbarrier and adds `bytes` to the transaction bytes that its current phase expects.
inline __device__ void arrive_expecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}

// The address that corresponds to `shared` in the shared memory of the cluster's CTA `rank`.
inline __device__ uint32_t peer_address(uint32_t shared, int rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(address) : "r"(shared), "r"(rank));
  return address;
}

// st.async to the cluster's CTA `rank`, which completes the bytes on that CTA's mbarrier. A plain store with a
// releasing arrive would have to wait for all earlier stores of this thread, including those of dx.
inline __device__ void store_to_peer(uint32_t shared, uint32_t barrier, int rank, float2 value) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];\n" ::"r"(
                   peer_address(shared, rank)),
               "f"(value.x), "f"(value.y), "r"(peer_address(barrier, rank))
               : "memory");
}

// All threads of the cluster arrive and wait. Afterwards, mbarriers initialized before it are visible to all CTAs.
inline __device__ void cluster_barrier() {
  asm volatile(
      "fence.mbarrier_init.release.cluster;\n"
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;\n" ::
          : "memory");
}

#else  // before sm_90 there are no clusters; the host requests none

constexpr bool kHasClusters = false;
inline __device__ void wait(uint32_t, uint32_t) {}
inline __device__ void arrive_expecting(uint32_t, int) {}
inline __device__ void store_to_peer(uint32_t, uint32_t, int, float2) {}
inline __device__ void cluster_barrier() { __syncthreads(); }

#endif

}  // namespace flashbwd::layer_norm

// Sums of gradients of captured tensors. NVRTC compiles this file.
#pragma once

#ifdef __CUDACC__

namespace flashbwd {

// Adds to *element in global memory if `adds`. The instruction is predicated: a branch would cost more than it.
__device__ __forceinline__ void add_to_global(bool adds, float* element, float value) {
  asm volatile("{.reg .pred p; setp.ne.s32 p, %2, 0; @p red.relaxed.gpu.global.add.f32 [%0], %1;}" ::"l"(element),
               "f"(value), "r"(static_cast<int>(adds)));
}
__device__ __forceinline__ void add_to_global(bool adds, double* element, double value) {
  asm volatile("{.reg .pred p; setp.ne.s32 p, %2, 0; @p red.relaxed.gpu.global.add.f64 [%0], %1;}" ::"l"(element),
               "d"(value), "r"(static_cast<int>(adds)));
}

// What a thread adds to one captured tensor in one iteration, pair after pair. Many pairs may share an element, as with
// one scale per head or a relative bias that is cut off, and atomic additions to one element are serialised. So a
// thread sums consecutive additions to one element in registers, and if all lanes of a warp end with the same element,
// the warp adds once.
template <typename T>
class GradientSum {
 public:
  // Adds `value` if `adds`. `element` is valid in any case.
  __device__ __forceinline__ void add(bool adds, T* element, T value) {
    if (!adds) value = 0;
    const bool same = element == element_;
    add_to_global(!same && sum_ != 0, element_, sum_);
    sum_ = same ? sum_ + value : value;
    element_ = element;
  }

  // Adds what is left to memory. Called by all lanes of a warp at the end of an iteration.
  __device__ __forceinline__ void finish() {
    const auto address = reinterpret_cast<unsigned long long>(element_);
    const unsigned lanes = __ballot_sync(~0u, address != 0);
    if (lanes == 0) return;
    const unsigned long long common = __shfl_sync(~0u, address, __ffs(lanes) - 1);
    const bool same = __all_sync(~0u, address == 0 || address == common);
    if (same) {
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) sum_ += __shfl_xor_sync(~0u, sum_, offset);
      element_ = reinterpret_cast<T*>(common);
    }
    add_to_global((!same || threadIdx.x % 32 == 0) && sum_ != 0, element_, sum_);
  }

 private:
  T* element_ = nullptr;  // of the captured tensor's gradient; none yet
  T sum_ = 0;
};

}  // namespace flashbwd

#endif

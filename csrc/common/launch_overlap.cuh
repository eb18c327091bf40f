// Device side of launches that overlap (overlap_with_launch_before in launch.h). Before compute capability 9.0 there is
// nothing to do: launches follow one another.
#pragma once

namespace flashbwd {

// Returns when the launch before has ended and all that it wrote is visible. At once if this launch overlaps nothing.
__device__ __forceinline__ void wait_for_launch_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The launch behind may begin as soon as every CTA of this one has come here or ended.
__device__ __forceinline__ void let_launch_behind_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace flashbwd

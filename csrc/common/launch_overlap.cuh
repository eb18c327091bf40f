// The device side of programmatic dependent launch (programmatic_dependent_launch in launch.h). Before compute
// capability 9.0 these functions do nothing, because launches do not overlap.
#pragma once

namespace flashbwd {

// Waits until the previous launch has finished and its writes are visible. Returns at once if the launches do not
// overlap.
__device__ __forceinline__ void wait_for_previous_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Allows the next launch to start once every CTA of this one has called this function or exited.
__device__ __forceinline__ void allow_next_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace flashbwd

// Zeroes the semaphores, and the accumulator if the plan requests it, before the main kernel. The preprocess kernel
// calls init_workspace, so this needs no launch of its own.
#pragma once

#include <cstdint>

#include "../index/arithmetic.h"
#include "../params.h"
#include "../workspace.h"

namespace flashbwd {

struct WorkspaceInit {
  uint4* accumulator = nullptr;     // null: not zeroed
  uint4* semaphores = nullptr;      // null: none
  int64_t accumulator_vectors = 0;  // 16-byte vectors to zero
  int64_t semaphore_vectors = 0;
};

// Called by the host.
inline WorkspaceInit workspace_init(const AttentionBackwardParams& params, const WorkspaceLayout& layout) {
  constexpr auto kVectorBytes = static_cast<int64_t>(sizeof(uint4));
  auto* base = static_cast<uint8_t*>(params.workspace);
  WorkspaceInit init;
  if (layout.semaphore_bytes > 0) {
    init.semaphores = reinterpret_cast<uint4*>(base + layout.semaphore_offset);
    init.semaphore_vectors = layout.semaphore_bytes / kVectorBytes;
  }
  if (layout.zero_accumulator) {
    init.accumulator = reinterpret_cast<uint4*>(base + layout.accumulator_offset);
    init.accumulator_vectors = layout.accumulator_bytes / kVectorBytes;
  }
  return init;
}

// Called by all kThreads threads of every block of the preprocess kernel; `block` is its linear index, num_blocks >= 1.
// Only the next kernel may read the zeros; other blocks of this kernel must not.
template <int kThreads>
__device__ inline void init_workspace(const WorkspaceInit& init, int64_t block, int64_t num_blocks) {
  constexpr int64_t kZeroBlocks = 1024;  // several per SM on any GPU
  const int64_t zero_blocks = at_most(num_blocks, kZeroBlocks);
  if (block >= zero_blocks) return;
  const int64_t first = block * kThreads + threadIdx.x;
  const int64_t step = zero_blocks * kThreads;
  for (int64_t i = first; i < init.semaphore_vectors; i += step) init.semaphores[i] = uint4{};
  for (int64_t i = first; i < init.accumulator_vectors; i += step) init.accumulator[i] = uint4{};
}

}  // namespace flashbwd

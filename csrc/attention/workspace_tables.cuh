// Initializes the workspace before the main kernel: fills the tables, and zeroes the accumulator (if the plan wants it)
// and the semaphores. The preprocess kernel calls init_workspace, so this needs no launch of its own. Nothing is read
// back to the host, so a CUDA graph replays it with the current cu_seqlens.
#pragma once

#include <cstdint>

#include "params.h"
#include "schedule.h"
#include "workspace.h"

namespace flashbwd {

struct WorkspaceInit {
  int32_t* nsplits = nullptr;       // (tables,); null: there is no accumulator
  int64_t* offsets = nullptr;       // (tables + 1,) elements; null: every sequence has `uniform_splits` slots
  uint4* accumulator = nullptr;     // null: not zeroed
  uint4* semaphores = nullptr;      // null: none
  int64_t accumulator_vectors = 0;  // 16-byte vectors to zero; with offsets, only the device knows the number
  int64_t semaphore_vectors = 0;
  const int32_t* cu_seqlens_q = nullptr;  // (tables + 1,); only with offsets, as is cu_seqlens_k
  const int32_t* cu_seqlens_k = nullptr;
  int32_t tables = 0;
  int32_t uniform_splits = 0;
  int32_t block_n = 0;
  int32_t max_seqlen_k = 0;
  int32_t heads = 0;
  int32_t row_stride = 0;  // floats
};

// Host only.
inline WorkspaceInit workspace_init(const AttentionBackwardParams& params, const WorkspaceLayout& layout) {
  auto* base = static_cast<uint8_t*>(params.workspace);
  WorkspaceInit init;
  if (layout.semaphore_bytes > 0) {
    init.semaphores = reinterpret_cast<uint4*>(base + layout.semaphore_offset);
    init.semaphore_vectors = layout.semaphore_bytes / static_cast<int64_t>(sizeof(uint4));
  }
  if (layout.dq_mode == DqMode::kDirect) return init;
  init.nsplits = reinterpret_cast<int32_t*>(base + layout.nsplits_offset);
  if (layout.has_offsets) {
    init.offsets = reinterpret_cast<int64_t*>(base + layout.offsets_offset);
    init.cu_seqlens_q = params.cu_seqlens_q;
    init.cu_seqlens_k = params.cu_seqlens_k;
  }
  if (layout.zero_accumulator) {
    init.accumulator = reinterpret_cast<uint4*>(base + layout.accumulator_offset);
    init.accumulator_vectors = layout.accumulator_bytes / static_cast<int64_t>(sizeof(uint4));
  }
  init.tables = static_cast<int32_t>(layout.tables);
  init.uniform_splits = static_cast<int32_t>(layout.nsplits);
  init.block_n = static_cast<int32_t>(layout.block_n);
  init.max_seqlen_k = params.seqlen_k;
  init.heads = params.heads;
  init.row_stride = static_cast<int32_t>(layout.row_stride);
  return init;
}

struct SequenceSlots {
  int32_t nsplits = 0;
  int64_t elements = 0;  // of the accumulator
};

// Only with offsets. Returns zeros for b >= tables.
__device__ inline SequenceSlots sequence_slots(const WorkspaceInit& init, int64_t b) {
  if (b >= init.tables) return {};
  const int64_t seqlen_q = int64_t{init.cu_seqlens_q[b + 1]} - init.cu_seqlens_q[b];
  const int64_t seqlen_k = int64_t{init.cu_seqlens_k[b + 1]} - init.cu_seqlens_k[b];
  const int64_t nsplits = split_slots(seqlen_k, init.max_seqlen_k, init.block_n);
  return {static_cast<int32_t>(nsplits), dq_elements(init.heads, nsplits, seqlen_q, init.row_stride)};
}

struct ScanResult {
  int64_t inclusive = 0;  // sum over threads 0 to this one
  int64_t total = 0;      // sum over the block
};

// Called by all kThreads threads of the block. warp_sums: (kThreads / 32,) in shared memory, reusable after the call.
template <int kThreads>
__device__ inline ScanResult block_scan(int64_t value, int64_t* warp_sums) {
  static_assert(kThreads % 32 == 0 && kThreads <= 1024, "whole warps");
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int distance = 1; distance < 32; distance *= 2) {
    const int64_t before = __shfl_up_sync(0xffffffffu, value, distance);
    if (lane >= distance) value += before;
  }
  if (lane == 31) warp_sums[warp] = value;
  __syncthreads();  // every warp has written its sum
  ScanResult result{value, 0};
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w < warp) result.inclusive += warp_sums[w];
    result.total += warp_sums[w];
  }
  __syncthreads();  // every thread has read the sums
  return result;
}

// Called by one block: writes nsplits and offsets of all sequences, kThreads sequences at a time.
template <int kThreads>
__device__ inline void fill_tables(const WorkspaceInit& init, int64_t* warp_sums) {
  if (init.offsets == nullptr) {
    for (int64_t b = threadIdx.x; b < init.tables; b += kThreads) init.nsplits[b] = init.uniform_splits;
    return;
  }
  int64_t elements_before = 0;
  // all threads iterate equally often, because block_scan is a barrier
  for (int64_t first = 0; first < init.tables; first += kThreads) {
    const int64_t b = first + threadIdx.x;
    const SequenceSlots slots = sequence_slots(init, b);
    const ScanResult scan = block_scan<kThreads>(slots.elements, warp_sums);
    if (b < init.tables) {
      init.nsplits[b] = slots.nsplits;
      init.offsets[b + 1] = elements_before + scan.inclusive;
    }
    elements_before += scan.total;
  }
  if (threadIdx.x == 0) init.offsets[0] = 0;
}

// The number of 16-byte vectors of the accumulator that are in use. With offsets, each block computes it from
// cu_seqlens, because the offsets table may not be written yet.
template <int kThreads>
__device__ inline int64_t vectors_in_use(const WorkspaceInit& init, int64_t* warp_sums) {
  if (init.offsets == nullptr) return init.accumulator_vectors;
  int64_t elements = 0;
  for (int64_t b = threadIdx.x; b < init.tables; b += kThreads) elements += sequence_slots(init, b).elements;
  return block_scan<kThreads>(elements, warp_sums).total / 4;
}

// Called by all kThreads threads of every block of the preprocess kernel; `block` is its linear index, num_blocks >= 1.
// warp_sums: (kThreads / 32,) in shared memory. Only the next kernel may read what this writes, not other blocks.
template <int kThreads>
__device__ inline void init_workspace(const WorkspaceInit& init, int64_t block, int64_t num_blocks,
                                      int64_t* warp_sums) {
  // Blocks that zero: several per SM on any GPU, but few enough that each can read all of cu_seqlens.
  constexpr int64_t kZeroBlocks = 1024;
  // The last block fills the tables. In a large grid it is not one of the blocks that zero.
  if (init.nsplits != nullptr && block == num_blocks - 1) fill_tables<kThreads>(init, warp_sums);
  const int64_t zero_blocks = at_most(num_blocks, kZeroBlocks);
  if (block >= zero_blocks) return;
  const int64_t first = block * kThreads + threadIdx.x;
  const int64_t step = zero_blocks * kThreads;
  for (int64_t i = first; i < init.semaphore_vectors; i += step) init.semaphores[i] = uint4{};
  if (init.accumulator == nullptr) return;
  const int64_t vectors = vectors_in_use<kThreads>(init, warp_sums);
  for (int64_t i = first; i < vectors; i += step) init.accumulator[i] = uint4{};
}

}  // namespace flashbwd

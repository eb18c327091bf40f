// The work tile of a CTA or cluster: 64 rows that it keeps in shared memory, and the blocks of rows that it streams.
// The kernel for dk and dv keeps keys and streams queries; the kernel for dq keeps queries and streams keys.
#pragma once

#include "../../index/tile_order.h"
#include "../../index/transposed.h"
#include "../../sequence.cuh"
#include "config.h"
#include "kernel_params.h"

namespace flashbwd::sm90::head_dim_512 {

struct WorkTile {
  Visibility visibility;               // with the kept rows as keys and the streamed rows as queries
  BlockRange blocks;                   // streamed blocks
  BlockRange interior;                 // those of them that need no mask
  int32_t batch, head;                 // head of the kept rows
  int32_t first_row;                   // kept rows, within the sequence
  int32_t rows;                        // from first_row to the physical end of the sequence, may exceed kRows
  int32_t kept_begin, streamed_begin;  // first rows of the sequence in packed tensors
  bool exists;                         // false: past the end of its sequence

  __device__ __forceinline__ int32_t valid_rows() const { return visibility.seqlen_k - first_row; }
  __device__ __forceinline__ int32_t valid_rows_of(int32_t block) const { return visibility.seqlen_q - block * kRows; }
};

// Work tiles go head by head. Key blocks ascend and query blocks descend, so that under a causal mask the longest come
// first.
template <bool kKeepsKeys>
__device__ void find_work_tile(WorkTile& work, const AttentionBackwardParams& p, int32_t index) {
  const int32_t* const lengths = kKeepsKeys ? p.cu_seqlens_k : p.cu_seqlens_q;
  const int32_t heads = kKeepsKeys ? p.heads_kv : p.heads;
  const auto blocks = static_cast<int32_t>(ceil_div(kKeepsKeys ? p.seqlen_k : p.seqlen_q, kRows));
  const WorkTileIndex tile = lengths != nullptr
                                 ? varlen_work_tile(index, lengths, p.batch, heads, kRows, [](int32_t) { return 1; })
                                 : dense_work_tile(index, p.batch, heads, blocks, 1);
  work.exists = tile.batch >= 0;
  if (!work.exists) return;
  const Sequence sequence = load_sequence(p, tile.batch);
  const Visibility visibility = visibility_of(p, sequence);
  int32_t block = tile.key_block;
  if (!kKeepsKeys) {
    block = (lengths != nullptr ? work_tiles_of_sequence(lengths, tile.batch, kRows) : blocks) - 1 - block;
  }
  work.visibility = kKeepsKeys ? visibility : transposed(visibility);
  work.blocks = query_blocks(work.visibility, block, kRows, kRows);
  work.interior = interior_query_blocks(work.visibility, block, kRows, kRows);
  work.batch = tile.batch;
  work.head = tile.head;
  work.first_row = block * kRows;
  work.rows = (kKeepsKeys ? sequence.rows_k : sequence.rows_q) - work.first_row;
  work.kept_begin = static_cast<int32_t>(kKeepsKeys ? sequence.begin_k : sequence.begin_q);
  work.streamed_begin = static_cast<int32_t>(kKeepsKeys ? sequence.begin_q : sequence.begin_k);
  work.exists = work.rows > 0;
}

}  // namespace flashbwd::sm90::head_dim_512

// The online softmax of the split-KV kernel.
#pragma once

#include "merge.cuh"

#ifdef __CUDACC__

namespace flashbwd {

// Adds the scores of one key tile to the online softmax of the 16 rows of an MMA tile. Replaces the scores, in log2
// units and -inf where masked out, by P, and rescales O to the new row maximum. tS: (16, 8 kMmaN), tO: (16, 8
// kFragments). The four lanes of a row share the row maximum; each lane keeps the sum of its own columns.
template <int kMmaN, int kFragments>
__device__ __forceinline__ void online_softmax(float (&tS)[kMmaN][4], float (&tO)[kFragments][4], float (&row_max)[2],
                                               float (&row_sum)[2]) {
  float base[2], shrink[2];
  bool grew = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float largest = row_max[half];
#pragma unroll
    for (int i = 0; i < kMmaN * 2; ++i) largest = fmaxf(largest, tS[i / 2][half * 2 + i % 2]);
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    base[half] = largest == -FLASHBWD_INFINITY ? 0.f : largest;
    shrink[half] = exp2_approx(row_max[half] - base[half]);
    grew |= largest != row_max[half];
    row_max[half] = largest;
  }
  if (__any_sync(0xffffffffu, grew)) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row_sum[half] *= shrink[half];
#pragma unroll
      for (int n = 0; n < kFragments; ++n) {
        tO[n][half * 2] *= shrink[half];
        tO[n][half * 2 + 1] *= shrink[half];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kMmaN * 4; ++i) {
    float& s = tS[i / 4][i % 4];
    s = exp2_approx(s - base[i % 4 / 2]);
    row_sum[i % 4 / 2] += s;
  }
}

}  // namespace flashbwd

#endif

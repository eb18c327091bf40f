// Writes a worker's partial sums of dgamma and dbeta from registers to global memory.
#pragma once

#include "arguments.h"
#include "device.cuh"

namespace flashbwd::layer_norm {

// Sums this CTA's dgamma and dbeta over its groups, in a fixed order, and writes them to the worker's row of a.partial.
// `reduce_s`: shared memory, (2, vectors, units, lanes, kElements). It recomputes its indices, so that they do not
// occupy registers during the loop over the rows.
template <int kVectors, int kElements>
__device__ void write_partial(const BackwardArguments& a, float* reduce_s, float (&dgamma)[kVectors][kElements],
                              float (&dbeta)[kVectors][kElements]) {
  const int thread = read_thread_index();
  const int block = read_block_index();
  const int lanes = a.tile.lanes;
  const int group = thread / lanes;
  const int lane = thread - group * lanes;
  const int worker = block / a.tile.ctas_per_row;
  const int first_vector = (block - worker * a.tile.ctas_per_row) * a.tile.cta_vectors;
  // (2, partial_columns), starting at this CTA's columns
  float* partial = a.partial + worker * 2 * a.partial_columns + first_vector * kElements;
  if (a.tile.groups == 1) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int vector = v * lanes + lane;
      if (vector < a.tile.cta_vectors) {
        store_floats(partial + vector * kElements, dgamma[v]);
        store_floats(partial + a.partial_columns + vector * kElements, dbeta[v]);
      }
    }
    return;
  }
  // If a warp holds several groups, each thread has a single vector (see tile_of). Reduce them into the first lanes.
#pragma unroll 1
  for (int offset = lanes; offset < kWarp; offset *= 2) {
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      dgamma[0][e] += __shfl_xor_sync(0xffffffffu, dgamma[0][e], offset);
      dbeta[0][e] += __shfl_xor_sync(0xffffffffu, dbeta[0][e], offset);
    }
  }
  const int units = lanes < kWarp ? blockDim.x / kWarp : a.tile.groups;
  const int unit = lanes < kWarp ? thread / kWarp : group;
  const int row_floats = lanes * kElements;
  const int plane_floats = units * row_floats;
  wait_copies(0);
  __syncthreads();  // all threads have finished reading the stages; their memory is reused
  if (lanes >= kWarp || thread % kWarp < lanes) {
    float* own = reduce_s + unit * row_floats + lane * kElements;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (v < a.tile.vectors) {
        store_floats(own + v * plane_floats, dgamma[v]);
        store_floats(own + (a.tile.vectors + v) * plane_floats, dbeta[v]);
      }
    }
  }
  __syncthreads();  // all threads have written their sums; all threads read them
  const int row_quads = row_floats / 4;
  for (int i = thread; i < 2 * a.tile.vectors * row_quads; i += blockDim.x) {  // four columns each
    const int plane = i / row_quads;
    const int quad = i - plane * row_quads;
    const bool second = plane >= a.tile.vectors;  // dbeta
    const int column = (second ? plane - a.tile.vectors : plane) * row_floats + 4 * quad;
    if (column >= a.tile.cta_vectors * kElements) continue;
    const float* source = reduce_s + plane * plane_floats + 4 * quad;
    double sum[4] = {};  // double: rounded to float only once
#pragma unroll 4
    for (int u = 0; u < units; ++u) {
      const float4 values = *reinterpret_cast<const float4*>(source + u * row_floats);
      sum[0] += values.x;
      sum[1] += values.y;
      sum[2] += values.z;
      sum[3] += values.w;
    }
    *reinterpret_cast<float4*>(partial + (second ? a.partial_columns : 0) + column) = make_float4(
        static_cast<float>(sum[0]), static_cast<float>(sum[1]), static_cast<float>(sum[2]), static_cast<float>(sum[3]));
  }
}

}  // namespace flashbwd::layer_norm

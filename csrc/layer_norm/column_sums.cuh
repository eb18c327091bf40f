// Sums dgamma and dbeta by columns, without partial sums in global memory. Used if there are few rows.
#pragma once

#include "arguments.h"
#include "device.cuh"

namespace flashbwd::layer_norm {

// A vector of kElements elements, loaded from an aligned address.
template <typename T, int kElements>
struct Loaded {
  static constexpr int kSlots = kElements * static_cast<int>(sizeof(T)) / 16;
  uint4 raw[kSlots] = {};

  __device__ void load(const T* source) {
#pragma unroll
    for (int h = 0; h < kSlots; ++h) raw[h] = __ldg(reinterpret_cast<const uint4*>(source) + h);
  }
  __device__ void read(float (&values)[kElements]) const {
#pragma unroll
    for (int h = 0; h < kSlots; ++h) unpack<T>(raw[h], &values[h * 16 / static_cast<int>(sizeof(T))]);
  }
};

// Executed by threads >= first_thread of CTAs >= first_cta, which take blocks of columns round-robin and sum each over
// all rows. They read x and dz a second time, mostly from L2, while other threads compute dx. `warp_sums`: shared
// memory, (warps, 2, kColumnLanes * kElements).
template <typename TX, typename TDZ>
__device__ void sum_columns(const BackwardArguments& a, float* warp_sums, int first_thread, int first_cta) {
  constexpr int kElements = elements_of(sizeof(TX), sizeof(TDZ));
  constexpr int kColumns = columns_at_a_time(kElements);
  constexpr int kLoads = sizeof(TX) == sizeof(TDZ) ? 8 : 4;  // outstanding rows per thread: 64 or 48 registers
  constexpr int kBarrier = 15;                               // the groups of rows use named barriers from 1 upwards
  const int thread = threadIdx.x - first_thread;
  const int threads = blockDim.x - first_thread;
  const int lane = thread % kColumnLanes;
  const int row_step = threads / kColumnLanes;
  const int warps = threads / kWarp;
#pragma unroll 1
  for (int block = blockIdx.x - first_cta; block * kColumns < a.columns; block += gridDim.x - first_cta) {
    const int column = block * kColumns + lane * kElements;
    const TX* x = static_cast<const TX*>(a.x) + column;
    const TDZ* dz = static_cast<const TDZ*>(a.dz) + column;
    const int64_t rows = column < a.columns ? a.rows : 0;
    float dgamma[kElements] = {}, dbeta[kElements] = {};
#pragma unroll 1
    for (int64_t first = thread / kColumnLanes; first < rows; first += kLoads * row_step) {
      Loaded<TX, kElements> of_x[kLoads];
      Loaded<TDZ, kElements> of_dz[kLoads];
      float mu[kLoads] = {}, rs[kLoads] = {};
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int64_t row = first + i * row_step;
        if (row < rows) {
          of_x[i].load(x + row * a.x_stride);
          of_dz[i].load(dz + row * a.dz_stride);
          if (a.mu != nullptr) mu[i] = a.mu[row];
          rs[i] = a.rs[row];
        }
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        float x_values[kElements], dz_values[kElements];
        of_x[i].read(x_values);
        of_dz[i].read(dz_values);
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          dgamma[e] = fmaf(dz_values[e], (x_values[e] - mu[i]) * rs[i], dgamma[e]);
          dbeta[e] += dz_values[e];
        }
      }
    }
#pragma unroll
    for (int offset = kColumnLanes; offset < kWarp; offset *= 2) {
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        dgamma[e] += __shfl_xor_sync(0xffffffffu, dgamma[e], offset);
        dbeta[e] += __shfl_xor_sync(0xffffffffu, dbeta[e], offset);
      }
    }
    if (thread % kWarp < kColumnLanes) {
      float* own = warp_sums + thread / kWarp * 2 * kColumns + lane * kElements;
      store_floats(own, dgamma);
      store_floats(own + kColumns, dbeta);
    }
    group_barrier(kBarrier, threads);  // all warps that sum columns have written their sums; all of them read
    constexpr int kAdders = 4;         // threads per column
    for (int i = thread / kAdders; i < 2 * kColumns; i += threads / kAdders) {
      double sum = 0.;
#pragma unroll 4
      for (int w = thread % kAdders; w < warps; w += kAdders) sum += warp_sums[w * 2 * kColumns + i];
#pragma unroll
      for (int offset = 1; offset < kAdders; offset *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      void* target = i < kColumns ? a.dgamma : a.dbeta;
      const int of_column = block * kColumns + i % kColumns;
      if (thread % kAdders == 0 && target != nullptr && of_column < a.columns) {
        store_float(target, a.gamma_dtype, of_column, static_cast<float>(sum));
      }
    }
    group_barrier(kBarrier, threads);  // these warps have read the sums; the next block overwrites them
  }
}

}  // namespace flashbwd::layer_norm

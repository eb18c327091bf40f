// LayerNorm and RMSNorm forward: statistics and output from one read of x where a row fits in registers.
#pragma once

#include "arguments.h"
#include "exchange.cuh"

namespace flashbwd::layer_norm {

constexpr int kForwardThreads = 512;
constexpr int kForwardColumns = 16;  // a thread holds in registers; what is beyond is read again

struct ForwardArguments {
  BackwardTile tile;  // lanes, groups and parts alone
  int64_t rows = 0;
  int columns = 0;
  float inverse_columns = 0.f;
  float eps = 0.f;
  bool centred = false;  // LayerNorm
  bool zero_centered = false;
  DType parameter_dtype = DType::kFloat32;
  const void* x = nullptr;
  int64_t x_stride = 0;
  void* z = nullptr;
  int64_t z_stride = 0;
  const void* gamma = nullptr;
  const void* beta = nullptr;
  float* mu = nullptr;  // (rows,)
  float* rs = nullptr;
};

// kElements elements of gamma or beta from `column` on.
template <typename T, int kElements>
__device__ void load_parameters(const void* data, DType dtype, int column, float (&values)[kElements]) {
  if constexpr (kElements == 1) {
    values[0] = load_float(data, dtype, column);
  } else if (dtype == DType::kFloat32) {
#pragma unroll
    for (int q = 0; q < kElements; q += 4) {
      unpack<float>(*reinterpret_cast<const uint4*>(static_cast<const float*>(data) + column + q), &values[q]);
    }
  } else {
    unpack<T>(*reinterpret_cast<const uint4*>(static_cast<const T*>(data) + column), values);
  }
}

template <typename T, int kElements>
__device__ void load_vector(const T* source, float (&values)[kElements]) {
  if constexpr (kElements == 1) {
    values[0] = to_float(*source);
  } else {
    unpack<T>(*reinterpret_cast<const uint4*>(source), values);
  }
}

// kElements: of a 16-byte access, or 1 where rows or parameters are not aligned for those.
template <typename T, int kElements>
__global__ void __launch_bounds__(kForwardThreads) forward_kernel(const __grid_constant__ ForwardArguments a) {
  constexpr int kVectors = kForwardColumns / kElements;
  __shared__ __align__(16) char smem[16 + 2 * sizeof(float2) * kForwardThreads / kWarp];
  const int lanes = a.tile.lanes;
  const int group = threadIdx.x / lanes;
  const int lane = threadIdx.x - group * lanes;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * a.tile.groups + group;
  RowExchange exchange(a.tile, shared_address(smem), group, 0);

  // Vectors lane, lane + lanes, ... of the row: the first kVectors are held, the others read again in each pass.
  const int vectors = row < a.rows ? (a.columns + kElements - 1) / kElements : 0;
  const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
  float held[kVectors][kElements];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (lane + v * lanes < vectors) load_vector<T>(x + (lane + v * lanes) * kElements, held[v]);
  }
  const auto for_each = [&](auto&& use) {  // use(column, values)
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (lane + v * lanes < vectors) use((lane + v * lanes) * kElements, held[v]);
    }
    for (int i = lane + kVectors * lanes; i < vectors; i += lanes) {
      float values[kElements];
      load_vector<T>(x + i * kElements, values);
      use(i * kElements, values);
    }
  };

  float mean = 0.f;
  if (a.centred) {
    float2 sum = make_float2(0.f, 0.f);
    for_each([&](int, const float (&values)[kElements]) {
#pragma unroll
      for (int e = 0; e < kElements; ++e) sum.x += values[e];
    });
    mean = exchange.sum(a.tile, sum).x * a.inverse_columns;
  }
  float2 squares = make_float2(0.f, 0.f);
  for_each([&](int, const float (&values)[kElements]) {
#pragma unroll
    for (int e = 0; e < kElements; ++e) squares.x += (values[e] - mean) * (values[e] - mean);
  });
  const float rs = rsqrtf(exchange.sum(a.tile, squares).x * a.inverse_columns + a.eps);
  if (row >= a.rows) return;
  if (lane == 0) {
    if (a.centred) a.mu[row] = mean;
    a.rs[row] = rs;
  }
  T* z = static_cast<T*>(a.z) + row * a.z_stride;
  for_each([&](int column, const float (&values)[kElements]) {
    float gamma[kElements], beta[kElements], out[kElements];
    if (a.gamma != nullptr) load_parameters<T>(a.gamma, a.parameter_dtype, column, gamma);
    if (a.beta != nullptr) load_parameters<T>(a.beta, a.parameter_dtype, column, beta);
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      out[e] = (values[e] - mean) * rs;
      if (a.gamma != nullptr) out[e] *= gamma[e] + (a.zero_centered ? 1.f : 0.f);
      if (a.beta != nullptr) out[e] += beta[e];
    }
    if constexpr (kElements == 1) {
      z[column] = from_float<T>(out[0]);
    } else {
      *reinterpret_cast<uint4*>(z + column) = pack<T>(out);
    }
  });
}

}  // namespace flashbwd::layer_norm

// LayerNorm and RMSNorm forward: statistics and output from one read of x where a row fits in registers. Optionally of
// h = residual + dropout(x), which is written too.
#pragma once

#include "dropout.cuh"
#include "exchange.cuh"

namespace flashbwd::layer_norm {

constexpr int kForwardThreads = 512;
constexpr int kForwardBytes = 64;  // of a row that a thread holds in registers; what is beyond is read again

// Vectors a thread holds.
constexpr int forward_vectors(int elements, int64_t held_bytes, bool add) {
  return elements > 1 ? kForwardBytes / static_cast<int>(elements * held_bytes) : (add ? 4 : 16);
}

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
  const void* residual = nullptr;  // of h's dtype
  int64_t residual_stride = 0;
  Dropout dropout;
  void* h = nullptr;
  int64_t h_stride = 0;
  void* z = nullptr;
  int64_t z_stride = 0;
  const void* gamma = nullptr;
  const void* beta = nullptr;
  float* mu = nullptr;  // (rows,)
  float* rs = nullptr;
};

// kElements neighbours as they lie in memory: 16 bytes or a multiple of that, or one.
template <typename T, int kElements>
struct Vector {
  static constexpr int kSlots = kElements * static_cast<int>(sizeof(T)) / 16;
  static constexpr int kPerSlot = 16 / static_cast<int>(sizeof(T));
  uint4 slots[kSlots];

  __device__ void load(const T* source) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) slots[i] = *reinterpret_cast<const uint4*>(source + i * kPerSlot);
  }
  __device__ void store(T* target) const {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) *reinterpret_cast<uint4*>(target + i * kPerSlot) = slots[i];
  }
  __device__ void read(float (&values)[kElements]) const {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) unpack<T>(slots[i], &values[i * kPerSlot]);
  }
  __device__ void write(const float (&values)[kElements]) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) slots[i] = pack<T>(&values[i * kPerSlot]);
  }
};

template <typename T>
struct Vector<T, 1> {
  T value;

  __device__ void load(const T* source) { value = *source; }
  __device__ void store(T* target) const { *target = value; }
  __device__ void read(float (&values)[1]) const { values[0] = to_float(value); }
  __device__ void write(const float (&values)[1]) { value = from_float<T>(values[0]); }
};

// kElements elements of gamma or beta from `column` on.
template <typename T, int kElements>
__device__ void load_parameters(const void* data, DType dtype, int column, float (&values)[kElements]) {
  if (dtype == DType::kFloat32) {
    Vector<float, kElements> vector;
    vector.load(static_cast<const float*>(data) + column);
    vector.read(values);
  } else {
    Vector<T, kElements> vector;
    vector.load(static_cast<const T*>(data) + column);
    vector.read(values);
  }
}

// T: x, z and, unless they are fp32, gamma and beta. TH: residual and h, where kAdd; T otherwise. kElements: of a
// 16-byte access of T, or 1 where rows or parameters are not aligned for those.
template <typename T, typename TH, bool kAdd, int kElements>
__global__ void __launch_bounds__(kForwardThreads, 1) forward_kernel(const __grid_constant__ ForwardArguments a) {
  using Held = Vector<TH, kElements>;
  constexpr int kVectors = forward_vectors(kElements, sizeof(TH), kAdd);
  __shared__ __align__(16) char smem[kExchangeHead + 2 * sizeof(float2) * kForwardThreads / kWarp];
  const int lanes = a.tile.lanes;
  const int group = threadIdx.x / lanes;
  const int lane = threadIdx.x - group * lanes;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * a.tile.groups + group;
  RowExchange exchange(a.tile, shared_address(smem), group, 0);

  // Vectors lane, lane + lanes, ... of the row: the first kVectors are held, the others read again in each pass.
  const int vectors = row < a.rows ? (a.columns + kElements - 1) / kElements : 0;
  const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
  TH* h = static_cast<TH*>(a.h) + row * a.h_stride;
  const TH* summand =
      kAdd ? static_cast<const TH*>(a.residual) + row * a.residual_stride : reinterpret_cast<const TH*>(x);
  // h of one vector, from x's and the residual's.
  const auto add = [&](int vector, const Vector<T, kElements>& branch, Held& held) {
    const int column = vector * kElements;
    float values[kElements], sum[kElements];
    branch.read(values);
    held.read(sum);
    uint32_t kept = ~0u;
    if (a.dropout.drops) {
      kept = a.dropout.keep != nullptr
                 ? given_bits<kElements>(a.dropout.keep + row * a.dropout.keep_stride + column, 0, kElements,
                                         a.dropout.vector_keep)
                 : drawn_bits<kElements>(a.dropout.rng[0], a.dropout.rng[1] + row * a.columns + column,
                                         a.dropout.keep_from);
    }
#pragma unroll
    for (int e = 0; e < kElements; ++e) sum[e] += kept >> e & 1 ? values[e] * a.dropout.scale : 0.f;
    held.write(sum);
    held.store(h + column);
  };
  Held held[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (lane + v * lanes < vectors) held[v].load(summand + (lane + v * lanes) * kElements);
  }
  if constexpr (kAdd) {
    Vector<T, kElements> branch[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (lane + v * lanes < vectors) branch[v].load(x + (lane + v * lanes) * kElements);
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (lane + v * lanes < vectors) add(lane + v * lanes, branch[v], held[v]);
    }
    for (int i = lane + kVectors * lanes; i < vectors; i += lanes) {
      Held more;
      more.load(summand + i * kElements);
      branch[0].load(x + i * kElements);
      add(i, branch[0], more);
    }
  }
  const TH* rest = kAdd ? h : summand;
  const auto for_each = [&](auto&& use) {  // use(column, values)
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (lane + v * lanes < vectors) {
        float values[kElements];
        held[v].read(values);
        use((lane + v * lanes) * kElements, values);
      }
    }
    for (int i = lane + kVectors * lanes; i < vectors; i += lanes) {
      float values[kElements];
      Held again;
      again.load(rest + i * kElements);
      again.read(values);
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
    Vector<T, kElements> result;
    result.write(out);
    result.store(z + column);
  });
}

}  // namespace flashbwd::layer_norm

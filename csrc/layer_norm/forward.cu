#include <cuda_runtime.h>

#include "forward.cuh"
#include "launch.h"

namespace flashbwd {
namespace layer_norm {
namespace {

bool is_aligned(const void* data, int64_t row_stride_bytes, int64_t bytes = 16) {
  return reinterpret_cast<uintptr_t>(data) % bytes == 0 && row_stride_bytes % bytes == 0;
}

// Threads a row, each with up to `held` columns in registers, and rows a CTA.
BackwardTile forward_tile(int64_t columns, int elements, int held) {
  BackwardTile t;
  const int64_t vectors = (columns + elements - 1) / elements;
  const int64_t lanes = (vectors * elements + held - 1) / held;
  t.lanes = vectors <= kWarp
                ? power_of_two_at_least(vectors)
                : static_cast<int>(std::min<int64_t>((lanes + kWarp - 1) / kWarp * kWarp, kForwardThreads));
  t.groups = std::max(1, kForwardThreads / 2 / t.lanes);
  t.parts = (t.lanes + kWarp - 1) / kWarp;
  return t;
}

template <typename T, typename TH, bool kAdd>
cudaError_t launch(const LayerNormForwardParams& p, void* stream) {
  constexpr int kElements = 16 / static_cast<int>(sizeof(T));
  const bool vector = p.columns % kElements == 0 && is_aligned(p.x, p.x_row_stride * sizeof(T)) &&
                      is_aligned(p.residual, p.residual_row_stride * sizeof(TH)) &&
                      is_aligned(p.h, p.h_row_stride * sizeof(TH)) && is_aligned(p.z, p.z_row_stride * sizeof(T)) &&
                      is_aligned(p.gamma, 0) && is_aligned(p.beta, 0);
  ForwardArguments a;
  const int elements = vector ? kElements : 1;
  a.tile = forward_tile(p.columns, elements, elements * forward_vectors(elements, sizeof(TH), kAdd));
  a.rows = p.rows;
  a.columns = static_cast<int>(p.columns);
  a.inverse_columns = 1.f / static_cast<float>(p.columns);
  a.eps = static_cast<float>(p.eps);
  a.centred = p.mu != nullptr;
  a.zero_centered = p.zero_centered_gamma;
  a.parameter_dtype = p.parameter_dtype;
  a.x = p.x;
  a.x_stride = p.x_row_stride;
  a.residual = p.residual;
  a.residual_stride = p.residual_row_stride;
  a.dropout = dropout_of(p.dropout);
  a.dropout.vector_keep = is_aligned(p.dropout.keep, p.dropout.keep_row_stride, kElements);
  a.h = p.h;
  a.h_stride = p.h_row_stride;
  a.z = p.z;
  a.z_stride = p.z_row_stride;
  a.gamma = p.gamma;
  a.beta = p.beta;
  a.mu = p.mu;
  a.rs = p.rs;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>((p.rows + a.tile.groups - 1) / a.tile.groups));
  config.blockDim = dim3(a.tile.threads());
  config.stream = static_cast<cudaStream_t>(stream);
  return vector ? cudaLaunchKernelEx(&config, forward_kernel<T, TH, kAdd, kElements>, a)
                : cudaLaunchKernelEx(&config, forward_kernel<T, TH, kAdd, 1>, a);
}

template <typename T>
cudaError_t launch_of(const LayerNormForwardParams& p, void* stream) {
  if (p.residual == nullptr) return launch<T, T, false>(p, stream);
  return p.h_dtype == p.x_dtype ? launch<T, T, true>(p, stream) : launch<T, float, true>(p, stream);
}

}  // namespace
}  // namespace layer_norm

const char* launch_layer_norm_forward(const LayerNormForwardParams& p, void* stream) {
  if (p.rows == 0) return nullptr;
  cudaError_t status = cudaErrorInvalidValue;
  if (p.x_dtype == DType::kFloat16) status = layer_norm::launch_of<__half>(p, stream);
  if (p.x_dtype == DType::kBFloat16) status = layer_norm::launch_of<__nv_bfloat16>(p, stream);
  if (p.x_dtype == DType::kFloat32) status = layer_norm::launch_of<float>(p, stream);
  return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}

}  // namespace flashbwd

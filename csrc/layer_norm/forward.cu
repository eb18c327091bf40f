#include <cuda_runtime.h>

#include "forward.cuh"
#include "launch.h"
#include "phase.h"

namespace flashbwd {
namespace layer_norm {
namespace {

// Chooses threads per row, each with up to `held` columns in registers, and rows per CTA.
BackwardTile forward_tile(int64_t columns, int elements, int held) {
  BackwardTile t;
  const int64_t vectors = (columns + elements - 1) / elements;
  const int64_t lanes = (vectors * elements + held - 1) / held;
  t.lanes = vectors <= kWarp
                ? power_of_two_at_least(vectors)
                : static_cast<int>(std::min<int64_t>((lanes + kWarp - 1) / kWarp * kWarp, kForwardThreads));
  t.groups = std::max(1, kForwardThreads / 2 / t.lanes);
  t.partials = (t.lanes + kWarp - 1) / kWarp;
  return t;
}

template <typename T, typename TH, bool kAdd>
cudaError_t launch(const LayerNormForwardParams& p, void* stream) {
  constexpr int kElements = 16 / static_cast<int>(sizeof(T));
  ForwardArguments a;
  const Phase phase = phase_of(p.x, p.x_row_stride, p.x_dtype, kElements);
  const auto in_phase = [&](const void* data, int64_t row_stride, DType dtype) {
    return data == nullptr || phase_of(data, row_stride, dtype, kElements) == phase;
  };
  const bool vector = in_phase(p.z, p.z_row_stride, p.x_dtype) &&
                      in_phase(p.residual, p.residual_row_stride, p.h_dtype) &&
                      in_phase(p.h, p.h_row_stride, p.h_dtype);
  const int per_16_bytes = 16 / static_cast<int>(size_of(p.parameter_dtype));
  a.gamma_phase = phase_of(p.gamma, 0, p.parameter_dtype, per_16_bytes).base;
  a.beta_phase = phase_of(p.beta, 0, p.parameter_dtype, per_16_bytes).base;
  const bool shifted = !phase.none() || p.columns % kElements != 0 || a.gamma_phase != 0 || a.beta_phase != 0;
  a.phase_base = phase.base;
  a.phase_step = phase.step;
  const int elements = vector ? kElements : 1;
  const int64_t row_columns = p.columns + (vector && !phase.none() ? kElements - 1 : 0);
  a.tile = forward_tile(row_columns, elements, elements * forward_vectors(elements, sizeof(TH), kAdd));
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
  a.dropout.vector_keep = in_phase(p.dropout.keep, p.dropout.keep_row_stride, DType::kBool);
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
  if (!vector) return cudaLaunchKernelEx(&config, forward_kernel<T, TH, kAdd, 1, false>, a);
  return shifted ? cudaLaunchKernelEx(&config, forward_kernel<T, TH, kAdd, kElements, true>, a)
                 : cudaLaunchKernelEx(&config, forward_kernel<T, TH, kAdd, kElements, false>, a);
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

// Stages gamma and beta of a CTA's columns in shared memory, in fp32.
#pragma once

#include "arguments.h"
#include "device.cuh"

namespace flashbwd::layer_norm {

// Writes gamma (1 if there is none, 0 outside the row) as (lanes, vectors, kElements / 4) quads of four columns. If the
// tile has two parameters (Form::kOutput), each lane's beta follows its gamma. Called by all threads of the tile.
template <typename T, int kElements>
__device__ void stage_parameters(const BackwardArguments& a, int first_column, uint32_t gamma_s) {
  constexpr int kQuads = kElements / 4;  // per vector
  const T* gamma = static_cast<const T*>(a.gamma);
  const T* beta = static_cast<const T*>(a.beta);
  const int quads = a.tile.vectors * kQuads;  // per lane
  const uint32_t stride = parameter_stride(a.tile);
#pragma unroll 2
  for (int i = threadIdx.x; i < quads * a.tile.lanes; i += a.tile.threads()) {
    const int plane = i / a.tile.lanes;
    const int lane = i - plane * a.tile.lanes;
    const int vector = plane / kQuads * a.tile.lanes + lane;
    const int column = first_column + vector * kElements + plane % kQuads * 4;
    float factor[4], shift[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool inside = column + e >= 0 && column + e < a.columns;
      factor[e] =
          !inside ? 0.f : (gamma == nullptr ? 1.f : to_float(gamma[column + e]) + (a.zero_centered ? 1.f : 0.f));
      shift[e] = inside && beta != nullptr ? to_float(beta[column + e]) : 0.f;
    }
    const uint32_t target = gamma_s + lane * stride + 16 * plane;
    store_shared_16(target, pack<float>(factor));
    if (a.tile.parameters > 1) store_shared_16(target + 16 * quads, pack<float>(shift));
  }
}

}  // namespace flashbwd::layer_norm

// Stores half of the columns of a gradient from the accumulators of a consumer warpgroup to global memory.
#pragma once

#include "../../../common/wgmma_store.cuh"
#include "traits.cuh"

namespace flashbwd::sm90::head_dim_512 {

// `first_column`: of the accumulators. `staging`: shared memory for kStagingAtoms atoms, which only this warpgroup
// writes; the warpgroup synchronizes at named barrier `barrier`.
template <typename T, int kStagingAtoms, int kValues>
__device__ void store_gradient(const Gradient& gradient, const WorkTile& work, int32_t first_column, uint8_t* staging,
                               uint32_t barrier, const float (&values)[kValues]) {
  const int64_t& stride = gradient.view.seq_stride;
  const int64_t first = work.batch * gradient.view.batch_stride + work.head * gradient.view.head_stride +
                        (int64_t{work.kept_begin} + work.first_row) * stride + first_column;
  const int32_t columns = gradient.columns - first_column;
  if (gradient.dtype == DType::kFloat32) {
    store_elements(static_cast<float*>(gradient.view.data) + first, stride, columns, work.rows, values);
  } else {
    store_16bit<T, kAtomBytes, kStagingAtoms>(static_cast<T*>(gradient.view.data) + first, stride, columns,
                                              gradient.vectors, work.rows, staging, barrier, values);
  }
}

}  // namespace flashbwd::sm90::head_dim_512

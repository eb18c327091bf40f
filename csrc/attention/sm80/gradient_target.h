// Fills in where a kernel stores a gradient. The kernels for short sequences store theirs in the same way.
#pragma once

#include "../pre_post/launch.h"
#include "kernel_params.h"
#include "layout.h"

namespace flashbwd::sm80 {

// `partial_sums`: of split work tiles, or null.
inline GradientTarget gradient_target(const HeadsView& view, DType dtype, int32_t columns,
                                      void* partial_sums = nullptr) {
  return {view,
          static_cast<float*>(partial_sums),
          partial_row_stride(columns),
          dtype,
          columns,
          rows_aligned(view, size_of(dtype), 2 * size_of(dtype)),
          is_16bit(dtype) && columns % 8 == 0 && rows_aligned(view, 2, 16)};
}

}  // namespace flashbwd::sm80

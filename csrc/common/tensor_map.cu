#include <cuda_runtime.h>

#include <algorithm>
#include <array>

#include "tensor_map.h"

namespace flashbwd {
namespace {

// The driver's encoder, found at run time: the library does not link libcuda.
using Encoder = decltype(&cuTensorMapEncodeTiled);

Encoder find_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<Encoder>(function);
}

constexpr size_t kMostOuter = 4;

}  // namespace

bool begin_context() {
  int device = 0;
  return cudaGetDevice(&device) == cudaSuccess && cudaSetDevice(device) == cudaSuccess;
}

bool encode_map(CUtensorMap* map, CUtensorMapDataType type, void* data, int64_t columns,
                const std::vector<MapDimension>& outer, int32_t box_columns, int32_t box_rows,
                CUtensorMapSwizzle swizzle) {
  static const Encoder encoder = find_encoder();
  if (encoder == nullptr || outer.size() > kMostOuter) return false;
  std::array<cuuint64_t, kMostOuter + 1> sizes;
  std::array<cuuint64_t, kMostOuter> strides;
  std::array<cuuint32_t, kMostOuter + 1> box, steps;
  box.fill(1);
  steps.fill(1);
  sizes[0] = static_cast<cuuint64_t>(columns);
  box[0] = static_cast<cuuint32_t>(box_columns);
  box[1] = static_cast<cuuint32_t>(box_rows);
  for (size_t i = 0; i < outer.size(); ++i) {
    sizes[i + 1] = static_cast<cuuint64_t>(std::max<int64_t>(outer[i].size, 1));
    // The stride of a dimension of one element is never used and may be anything.
    strides[i] = outer[i].size > 1 ? static_cast<cuuint64_t>(outer[i].stride_bytes) : 128;
  }
  // Boxes are at most 128 bytes wide. With promotion to 256, calls of S 512 and 1024 were 1 to 2 % slower.
  return encoder(map, type, static_cast<cuuint32_t>(outer.size() + 1), data, sizes.data(), strides.data(), box.data(),
                 steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace flashbwd

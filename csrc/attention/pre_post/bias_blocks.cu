// Converts the fp32 sums of a shared bias's gradient, which lie in the blocks of ../index/bias_blocks.h, to dbias.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "../../common/launch.h"
#include "../../common/numeric.cuh"
#include "bias_gradient.h"
#include "store_columns.cuh"

namespace flashbwd {
namespace {

constexpr int kConvertThreads = 256;
constexpr int32_t kColumns = 8;       // of one lane: keys of one query
constexpr int32_t kWarpColumns = 32;  // a warp converts 8 queries and 32 keys, two blocks

struct ConvertArguments {
  BiasGradient sums;
  BiasView dbias;
  int32_t batch = 1, heads = 1;  // planes
  int32_t seqlen_q = 0, seqlen_k = 0;
};

// `vectors`: dbias rows start at multiples of 16 bytes and have adjacent columns.
template <typename T>
__global__ void __launch_bounds__(kConvertThreads)
    convert_bias_blocks_kernel(const __grid_constant__ ConvertArguments a, bool vectors) {
  static_assert(kBiasBlockQueries == 8 && kBiasBlockKeys == 2 * kColumns && kWarpColumns == 4 * kColumns,
                "lanes 0 to 7 have the queries of a block, and four lanes of a query have two blocks");
  const int32_t lane = threadIdx.x % 32;
  const int32_t row_blocks = (a.seqlen_q + kBiasBlockQueries - 1) / kBiasBlockQueries;
  const int32_t column_blocks = (a.seqlen_k + kWarpColumns - 1) / kWarpColumns;
  const int64_t warps = int64_t{gridDim.x} * (kConvertThreads / 32);
  const int64_t work = int64_t{a.batch} * a.heads * row_blocks * column_blocks;
  for (int64_t i = (int64_t{blockIdx.x} * kConvertThreads + threadIdx.x) / 32; i < work; i += warps) {
    const int64_t plane_row = i / column_blocks;
    const int32_t column = static_cast<int32_t>(i - plane_row * column_blocks) * kWarpColumns + lane / 8 * kColumns;
    const int32_t plane = static_cast<int32_t>(plane_row / row_blocks);
    const int32_t row_block = static_cast<int32_t>(plane_row - int64_t{plane} * row_blocks);
    const int32_t row = row_block * kBiasBlockQueries + lane % 8;
    const int32_t batch = plane / a.heads, head = plane - batch * a.heads;
    if (row >= a.seqlen_q || column >= a.seqlen_k) continue;
    const float* const block = static_cast<const float*>(a.sums.data) + batch * a.sums.batch_stride +
                               head * a.sums.head_stride + column / kBiasBlockKeys * a.sums.col_stride +
                               row_block * a.sums.row_stride;
    float values[kColumns];
#pragma unroll
    for (int32_t c = 0; c < kColumns; ++c) {
      values[c] = block[element_of_bias_block(lane % 8, column % kBiasBlockKeys + c)];
    }
    T* const out = static_cast<T*>(a.dbias.data) + batch * a.dbias.batch_stride + head * a.dbias.head_stride +
                   row * a.dbias.row_stride + column * a.dbias.col_stride;
    store_columns(out, values, column, a.seqlen_k, vectors, a.dbias.col_stride);
  }
}

}  // namespace

const char* launch_convert_bias_blocks(const AttentionBackwardParams& p, const BiasGradient& sums, void* stream) {
  const BiasBroadcast broadcast = broadcast_of(p);
  ConvertArguments a;
  a.sums = sums;
  a.dbias = p.dbias;
  a.batch = broadcast.batch ? 1 : p.batch;
  a.heads = broadcast.head ? 1 : p.heads;
  a.seqlen_q = p.seqlen_q;
  a.seqlen_k = p.seqlen_k;
  const int64_t warps =
      int64_t{a.batch} * a.heads * ceil_div(a.seqlen_q, kBiasBlockQueries) * ceil_div(a.seqlen_k, kWarpColumns);
  if (warps == 0) return nullptr;
  constexpr int64_t kMostCtas = 1 << 16;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(std::min(ceil_div(warps, kConvertThreads / 32), kMostCtas)));
  config.blockDim = dim3(kConvertThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  const bool vectors = has_vector_rows(a.dbias, kColumns);
  const cudaError_t error = p.dtype == DType::kBFloat16
                                ? launch_kernel(config, convert_bias_blocks_kernel<__nv_bfloat16>, a, vectors)
                                : launch_kernel(config, convert_bias_blocks_kernel<__half>, a, vectors);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace flashbwd

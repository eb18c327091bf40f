#include <cuda_runtime.h>

#include "../../common/hopper.cuh"
#include "../../common/launch.h"
#include "../../common/numeric.cuh"
#include "../index/arithmetic.h"
#include "../sequence.cuh"
#include "sink_gradient.h"

namespace flashbwd {
namespace {

constexpr int kThreads = 256;

__device__ float bias_value(const BiasView& bias, int64_t index) {
  if (bias.dtype == DType::kFloat32) return static_cast<const float*>(bias.data)[index];
  if (bias.dtype == DType::kBFloat16) return to_float(static_cast<const __nv_bfloat16*>(bias.data)[index]);
  return to_float(static_cast<const __half*>(bias.data)[index]);
}

// True if the key mask hides every key that the row sees, or the key's bias is -inf. For other rows the loop usually
// ends at the first key.
__device__ bool all_keys_hidden(const AttentionBackwardParams& p, const Visibility& visibility, int32_t batch,
                                int32_t head, int32_t row) {
  if (p.bias.data == nullptr && p.key_mask.data == nullptr) return false;
  const uint8_t* const shown = p.key_mask.data + batch * p.key_mask.batch_stride;
  const int64_t first = batch * p.bias.batch_stride + head * p.bias.head_stride + row * p.bias.row_stride;
  const BlockRange keys = key_blocks(visibility, row, 1, 1);
  for (int32_t key = keys.begin; key < keys.end; ++key) {
    if (p.key_mask.data != nullptr && shown[key * p.key_mask.key_stride] == 0) continue;
    if (p.bias.data == nullptr || bias_value(p.bias, first + key * p.bias.col_stride) != -INFINITY) return false;
  }
  return true;
}

// The incoming gradient of the row's LSE.
__device__ float lse_gradient(const AttentionBackwardParams& p, const Sequence& sequence, int32_t batch, int32_t head,
                              int32_t row) {
  if (p.dlse.data == nullptr) return 0.f;
  const int64_t dlse_row = p.dlse.packed_rows ? sequence.begin_q + row : row;
  return static_cast<const float*>(
      p.dlse.data)[batch * p.dlse.batch_stride + head * p.dlse.head_stride + dlse_row * p.dlse.seq_stride];
}

// dsink = -sum of exp(sink - lse) * delta over the rows of all sequences, summed by one CTA per head in a fixed order.
// A row without a visible key has lse = sink, whatever the caller wrote there: it adds its dlse. A sink of -inf gets 0.
__global__ void __launch_bounds__(kThreads)
    sink_kernel(const __grid_constant__ AttentionBackwardParams p, const __grid_constant__ LseDelta lse_delta) {
  const int32_t head = blockIdx.x;
  const float sink = p.sink[head] * kLog2E;
  float sum = 0.f;
  for (int32_t batch = 0; batch < p.batch; ++batch) {
    const Sequence sequence = load_sequence(p, batch);
    const Visibility visibility = visibility_of(p, sequence);
    const int64_t first = lse_delta.index(batch, head, sequence.begin_q);
    for (int32_t row = threadIdx.x; row < sequence.seqlen_q && sink > -INFINITY; row += kThreads) {
      const float lse = lse_delta.lse_log2[first + row];
      // The preprocess wrote +inf if the row sees no key, or if sees_nothing() is true for its LSE.
      if (lse == INFINITY || all_keys_hidden(p, visibility, batch, head, row)) {
        sum += lse_gradient(p, sequence, batch, head, row);
      } else {
        sum -= exp2f(sink - lse) * lse_delta.delta[first + row];
      }
    }
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  __shared__ float warp_sums[kThreads / 32];
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
  __syncthreads();  // every warp has written its sum
  if (threadIdx.x == 0) {
    sum = 0.f;
    for (int warp = 0; warp < kThreads / 32; ++warp) sum += warp_sums[warp];
    p.dsink[head] = sum;
  }
}

}  // namespace

const char* launch_sink_gradient(const AttentionBackwardParams& params, const LseDelta& lse_delta, void* stream) {
  if (params.sink == nullptr || params.dsink == nullptr) return nullptr;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(params.heads);
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  const cudaError_t error = launch_kernel(config, sink_kernel, params, lse_delta);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace flashbwd

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "../../common/launch.h"
#include "../../common/numeric.cuh"
#include "../index/visibility.h"
#include "../scalars.cuh"
#include "../sequence.cuh"
#include "bias_gradient.h"
#include "store_columns.cuh"

namespace flashbwd {
namespace {

// Threads per CTA of the kernels below. Those that sum the gradient of a broadcast bias read the scratch buffer in a
// fixed order.
constexpr int kReduceThreads = 256;

struct Extents {
  int32_t batch = 1, head = 1, slot = 1, row = 1, col = 1;
  __host__ __device__ int64_t count() const { return int64_t{batch} * head * slot * row * col; }
};

struct ReduceArguments {
  BiasGradient source;
  Extents summed;  // 1 if the main kernel has already summed this dimension, or if the bias is not broadcast over it
  BiasView dbias;
  Extents out;
};

// Sums one element of dbias with 32 lanes, or with one thread if there are few terms.
__device__ __forceinline__ float sum_terms(const ReduceArguments& a, int64_t first, int32_t lane, int32_t lanes) {
  const Extents& n = a.summed;
  float sum = 0.f;
  for (int64_t i = lane; i < n.count(); i += lanes) {
    int64_t rest = i;
    const int64_t col = rest % n.col;
    rest /= n.col;
    const int64_t row = rest % n.row;
    rest /= n.row;
    const int64_t slot = rest % n.slot;
    rest /= n.slot;
    const int64_t head = rest % n.head, batch = rest / n.head;
    sum += static_cast<const float*>(
        a.source.data)[first + batch * a.source.batch_stride + head * a.source.head_stride +
                       slot * a.source.slot_stride + row * a.source.row_stride + col * a.source.col_stride];
  }
  return sum;
}

__global__ void __launch_bounds__(kReduceThreads)
    reduce_bias_gradient_kernel(const __grid_constant__ ReduceArguments a, int32_t lanes) {
  const int64_t thread = int64_t{blockIdx.x} * kReduceThreads + threadIdx.x;
  const int64_t step = int64_t{gridDim.x} * kReduceThreads / lanes;
  for (int64_t element = thread / lanes; element < a.out.count(); element += step) {
    int64_t rest = element;
    const int64_t col = rest % a.out.col;
    rest /= a.out.col;
    const int64_t row = rest % a.out.row;
    rest /= a.out.row;
    const int64_t head = rest % a.out.head, batch = rest / a.out.head;
    const int64_t first = batch * a.source.batch_stride + head * a.source.head_stride + row * a.source.row_stride +
                          col * a.source.col_stride;
    float sum = sum_terms(a, first, static_cast<int32_t>(thread % lanes), lanes);
    for (int32_t distance = lanes / 2; distance > 0; distance /= 2) {
      // lanes is 1 or 32, so each warp works on one element or each lane on its own
      sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    }
    if (thread % lanes != 0) continue;
    const int64_t offset =
        batch * a.dbias.batch_stride + head * a.dbias.head_stride + row * a.dbias.row_stride + col * a.dbias.col_stride;
    if (a.dbias.dtype == DType::kFloat32) {
      static_cast<float*>(a.dbias.data)[offset] = sum;
    } else if (a.dbias.dtype == DType::kBFloat16) {
      static_cast<__nv_bfloat16*>(a.dbias.data)[offset] = __float2bfloat16_rn(sum);
    } else {
      static_cast<__half*>(a.dbias.data)[offset] = __float2half_rn(sum);
    }
  }
}

// Sums whole (seqlen_q, seqlen_k) planes over batch and heads; each thread sums four columns of a row. `vectors`:
// source rows start at multiples of 16 bytes, dbias rows at multiples of four elements.
template <typename T>
__global__ void __launch_bounds__(kReduceThreads)
    sum_planes_kernel(const __grid_constant__ ReduceArguments a, bool vectors) {
  const uint32_t rows = static_cast<uint32_t>(a.out.batch) * a.out.head * a.out.row;  // the plan limits this to 2^31
  for (uint32_t i = blockIdx.x; i < rows; i += gridDim.x) {
    const uint32_t plane = i / a.out.row, row = i - plane * a.out.row;
    const uint32_t batch = plane / a.out.head, head = plane - batch * a.out.head;
    const float* const first = static_cast<const float*>(a.source.data) + batch * a.source.batch_stride +
                               head * a.source.head_stride + row * a.source.row_stride;
    const int64_t offset = batch * a.dbias.batch_stride + head * a.dbias.head_stride + row * a.dbias.row_stride;
    for (int32_t column = threadIdx.x * 4; column < a.out.col; column += kReduceThreads * 4) {
      const int32_t columns = a.out.col - column;
      float sum[4] = {};
      for (int32_t b = 0; b < a.summed.batch; ++b) {
        for (int32_t h = 0; h < a.summed.head; ++h) {
          const float* const terms = first + b * a.source.batch_stride + h * a.source.head_stride + column;
          if (vectors && columns >= 4) {
            const float4 term = *reinterpret_cast<const float4*>(terms);
            sum[0] += term.x;
            sum[1] += term.y;
            sum[2] += term.z;
            sum[3] += term.w;
          } else {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              if (e < columns) sum[e] += terms[e];
            }
          }
        }
      }
      T* const out = static_cast<T*>(a.dbias.data) + offset + column * a.dbias.col_stride;
      store_columns(out, sum, column, a.out.col, vectors, a.dbias.col_stride);
    }
  }
}

cudaError_t launch_sum_planes(const ReduceArguments& a, cudaLaunchConfig_t config) {
  const bool vectors = a.source.row_stride % 4 == 0 && has_vector_rows(a.dbias, 4);
  switch (a.dbias.dtype) {
    case DType::kFloat32:
      return launch_kernel(config, sum_planes_kernel<float>, a, vectors);
    case DType::kBFloat16:
      return launch_kernel(config, sum_planes_kernel<__nv_bfloat16>, a, vectors);
    default:
      return launch_kernel(config, sum_planes_kernel<__half>, a, vectors);
  }
}

struct ZeroArguments {
  AttentionBackwardParams params;
  BiasGradient gradient;
  int32_t block_m = 0, block_n = 0;
};

// Zeroes elements [first, last) of a row. Called by one warp.
__device__ __forceinline__ void zero_columns(const BiasGradient& g, int64_t row, int32_t first, int32_t last,
                                             int32_t lane) {
  if (g.col_stride != 1) {
    for (int32_t column = first + lane; column < last; column += 32) {
      store_scalar(g.data, row + column * g.col_stride, g.dtype, 0.f);
    }
    return;
  }
  const auto bytes = static_cast<int32_t>(size_of(g.dtype));
  uint8_t* const begin = static_cast<uint8_t*>(g.data) + (row + first) * bytes;
  uint8_t* const end = static_cast<uint8_t*>(g.data) + (row + last) * bytes;
  const auto zero_scalars = [&](uint8_t* from, uint8_t* to) {  // at most one element per lane
    uint8_t* const element = from + lane * bytes;
    if (element >= to) return;
    if (bytes == 4) {
      *reinterpret_cast<uint32_t*>(element) = 0;
    } else {
      *reinterpret_cast<uint16_t*>(element) = 0;
    }
  };
  constexpr uintptr_t kMask = sizeof(uint4) - 1;
  uint8_t* const body = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(begin) + kMask) & ~kMask);
  uint8_t* const tail = reinterpret_cast<uint8_t*>(reinterpret_cast<uintptr_t>(end) & ~kMask);
  if (body >= tail) return zero_scalars(begin, end);
  zero_scalars(begin, body);
#pragma unroll 4
  for (uint8_t* vector = body + lane * sizeof(uint4); vector < tail; vector += 32 * sizeof(uint4)) {
    *reinterpret_cast<uint4*>(vector) = uint4{};
  }
  zero_scalars(tail, end);
}

// Zeroes the tiles of (batch, heads, seqlen_q, seqlen_k) without a visible element. Each warp zeroes one row of a
// plane.
__global__ void __launch_bounds__(kReduceThreads) zero_unseen_kernel(const __grid_constant__ ZeroArguments a) {
  const AttentionBackwardParams& p = a.params;
  const BiasGradient& g = a.gradient;
  const int64_t rows = int64_t{p.batch} * p.heads * p.seqlen_q, warps = int64_t{gridDim.x} * (kReduceThreads / 32);
  const int32_t lane = threadIdx.x % 32;
  for (int64_t i = (int64_t{blockIdx.x} * kReduceThreads + threadIdx.x) / 32; i < rows; i += warps) {
    const int64_t plane = i / p.seqlen_q;
    const int32_t row = static_cast<int32_t>(i - plane * p.seqlen_q);
    const int32_t batch = static_cast<int32_t>(plane / p.heads), head = static_cast<int32_t>(plane - batch * p.heads);
    const Visibility visibility = visibility_of(p, load_sequence(p, batch));
    const BlockRange seen = key_blocks(visibility, row / a.block_m, a.block_m, a.block_n);
    const int64_t offset = batch * g.batch_stride + head * g.head_stride + row * g.row_stride;
    zero_columns(g, offset, 0, seen.empty() ? p.seqlen_k : seen.begin * a.block_n, lane);
    if (!seen.empty()) zero_columns(g, offset, min(seen.end * a.block_n, p.seqlen_k), p.seqlen_k, lane);
  }
}

cudaLaunchConfig_t config_of_warps(int64_t warps, void* stream) {
  constexpr int64_t kCtas = 2048;  // more than the GPU runs at once
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(std::min(ceil_div(warps, int64_t{kReduceThreads / 32}), kCtas)));
  config.blockDim = dim3(kReduceThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  return config;
}

Visibility visibility_of_call(const AttentionBackwardParams& p) {
  return make_visibility(p.seqlen_q, p.seqlen_k, p.window_left, p.window_right, p.causal);
}

}  // namespace

BiasGradient bias_gradient(const AttentionBackwardParams& p, const BiasGradientScratch& scratch, void* storage) {
  const BiasBroadcast broadcast = broadcast_of(p);
  BiasGradient g;
  g.mode = scratch.mode;
  if (scratch.mode == BiasGradientMode::kNone) return g;
  if (scratch.elements == 0 && scratch.mode == BiasGradientMode::kStore) {
    g.dtype = p.dbias.dtype;
    g.data = p.dbias.data;
    g.batch_stride = p.dbias.batch_stride;
    g.head_stride = p.dbias.head_stride;
    g.row_stride = p.dbias.row_stride;
    g.col_stride = p.dbias.col_stride;
    return g;
  }
  g.data = storage;
  if (scratch.mode == BiasGradientMode::kAddBlocks) {
    const int64_t plane = bias_plane_elements(p.seqlen_q, p.seqlen_k);
    g.row_stride = kBiasBlockElements;
    g.col_stride = bias_key_group_elements(p.seqlen_q);
    g.head_stride = broadcast.head ? 0 : plane;
    g.batch_stride = broadcast.batch ? 0 : broadcast.head ? plane : p.heads * plane;
    return g;
  }
  const int64_t rows = p.seqlen_q, cols = p.seqlen_k;
  switch (scratch.mode) {
    case BiasGradientMode::kKeySums:
      g.col_stride = 1;
      g.slot_stride = cols;
      g.head_stride = scratch.slots * cols;
      break;
    case BiasGradientMode::kRowSums:
      g.row_stride = 1;
      g.slot_stride = rows;
      g.head_stride = scratch.slots * rows;
      break;
    default:
      g.col_stride = 1;
      g.row_stride = cols;
      g.head_stride = scratch.mode == BiasGradientMode::kAdd && broadcast.head ? 0 : rows * cols;
      break;
  }
  const int64_t heads = g.head_stride == 0 ? 1 : p.heads;
  const int64_t plane = g.head_stride == 0 ? rows * cols : g.head_stride;
  g.batch_stride = scratch.mode == BiasGradientMode::kAdd && broadcast.batch ? 0 : heads * plane;
  return g;
}

const char* launch_zero_bias_gradient(const AttentionBackwardParams& p, const BiasGradient& gradient, int32_t block_m,
                                      int32_t block_n, void* stream) {
  if (gradient.mode != BiasGradientMode::kStore) return nullptr;
  const bool dense = p.cu_seqlens_q == nullptr && p.seqused_q == nullptr && p.seqused_k == nullptr;
  if (dense && visibility_of_call(p).full()) return nullptr;
  const int64_t rows = int64_t{p.batch} * p.heads * p.seqlen_q;
  if (rows == 0 || p.seqlen_k == 0) return nullptr;
  const cudaError_t error =
      launch_kernel(config_of_warps(rows, stream), zero_unseen_kernel, ZeroArguments{p, gradient, block_m, block_n});
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

const char* launch_reduce_bias_gradient(const AttentionBackwardParams& p, const BiasGradient& source,
                                        const BiasGradientScratch& scratch, void* stream) {
  if (scratch.mode == BiasGradientMode::kNone || source.data == p.dbias.data) return nullptr;
  if (scratch.mode == BiasGradientMode::kAddBlocks) return launch_convert_bias_blocks(p, source, stream);
  const BiasBroadcast broadcast = broadcast_of(p);
  ReduceArguments a;
  a.source = source;
  a.dbias = p.dbias;
  const auto extent = [](bool is_broadcast, int32_t size) { return is_broadcast ? 1 : size; };
  a.out.batch = extent(broadcast.batch, p.batch);
  a.out.head = extent(broadcast.head, p.heads);
  a.out.row = extent(broadcast.row, p.seqlen_q);
  a.out.col = extent(broadcast.col, p.seqlen_k);
  const bool added = scratch.mode == BiasGradientMode::kAdd;
  a.summed.batch = broadcast.batch && !added ? p.batch : 1;
  a.summed.head = broadcast.head && !added ? p.heads : 1;
  a.summed.slot = static_cast<int32_t>(scratch.slots);
  a.summed.col = broadcast.col && scratch.mode == BiasGradientMode::kKeySums ? p.seqlen_k : 1;
  if (a.out.count() == 0) return nullptr;
  const bool planes = scratch.mode == BiasGradientMode::kAdd || scratch.mode == BiasGradientMode::kStore;
  constexpr int64_t kManyTerms = 64;
  const int32_t lanes = a.summed.count() >= kManyTerms ? 32 : 1;
  constexpr int64_t kMostCtas = 1 << 16;
  const int64_t ctas = planes ? a.out.count() / a.out.col : ceil_div(a.out.count() * lanes, kReduceThreads);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(std::min(ctas, kMostCtas)));
  config.blockDim = dim3(kReduceThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  const cudaError_t error =
      planes ? launch_sum_planes(a, config) : launch_kernel(config, reduce_bias_gradient_kernel, a, lanes);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace flashbwd

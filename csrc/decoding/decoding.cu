// The kernels that every build holds: no modification or an ordinary one, five tiles, two dtypes.
#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "../common/launch.h"
#include "combine.cuh"
#include "launch.h"
#include "ordinary.cuh"
#include "split_kv.cuh"

namespace flashbwd {
namespace {

template <int kD, int kM, bool kBFloat16, class Mod>
__global__ void __launch_bounds__(kWarps * 32) split_kv_kernel(const __grid_constant__ DecodingParams p) {
  extern __shared__ __align__(128) unsigned char shared[];
  split_kv<kD, kM, kBFloat16, Mod>(p, shared);
}

cudaLaunchConfig_t config_of(dim3 grid, int threads, int bytes, void* stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  return config;
}

template <int kD, int kM, bool kBFloat16, class Mod>
cudaError_t launch_prebuilt(const DecodingParams& p, dim3 grid, void* stream) {
  constexpr int kBytes = shared_bytes(kD, kM);
  const auto kernel = split_kv_kernel<kD, kM, kBFloat16, Mod>;
  static std::atomic<uint64_t> allowed_on{0};  // a bit a device
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess && !(allowed_on >> device % 64 & 1)) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    if (error == cudaSuccess) allowed_on |= uint64_t{1} << device % 64;
  }
  if (error != cudaSuccess) return error;
  return launch_kernel(config_of(grid, kWarps * 32, kBytes, stream), kernel, p);
}

template <bool kBFloat16, class Mod>
cudaError_t launch_tile(const DecodingParams& p, DecodingTile tile, dim3 grid, void* stream) {
  if (tile.head_dim == 64 && tile.rows == 16) return launch_prebuilt<64, 16, kBFloat16, Mod>(p, grid, stream);
  if (tile.head_dim == 64 && tile.rows == 32) return launch_prebuilt<64, 32, kBFloat16, Mod>(p, grid, stream);
  if (tile.head_dim == 128 && tile.rows == 16) return launch_prebuilt<128, 16, kBFloat16, Mod>(p, grid, stream);
  if (tile.head_dim == 128 && tile.rows == 32) return launch_prebuilt<128, 32, kBFloat16, Mod>(p, grid, stream);
  if (tile.head_dim == 256 && tile.rows == 16) return launch_prebuilt<256, 16, kBFloat16, Mod>(p, grid, stream);
  return cudaErrorInvalidValue;
}

template <bool kBFloat16>
cudaError_t launch_mod(const DecodingParams& p, DecodingTile tile, dim3 grid, void* stream) {
  if (p.ordinary.kind == OrdinaryMod::kScore)
    return launch_tile<kBFloat16, OrdinaryKernelMod<true, false>>(p, tile, grid, stream);
  if (p.ordinary.kind == OrdinaryMod::kMask)
    return launch_tile<kBFloat16, OrdinaryKernelMod<false, true>>(p, tile, grid, stream);
  if (p.ordinary.kind == OrdinaryMod::kBoth)
    return launch_tile<kBFloat16, OrdinaryKernelMod<true, true>>(p, tile, grid, stream);
  return launch_tile<kBFloat16, NoMod>(p, tile, grid, stream);
}

// A kernel compiled at run time belongs to the driver's interface; its launcher comes without linking libcuda.
cudaError_t launch_compiled(const DecodingParams& p, DecodingTile tile, dim3 grid, void* kernel, void* stream) {
  static const auto launch = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuLaunchKernel", &function, 12000, cudaEnableDefault, &found);
    return error == cudaSuccess ? reinterpret_cast<decltype(&cuLaunchKernel)>(function) : nullptr;
  }();
  if (launch == nullptr) return cudaErrorUnknown;
  void* arguments[] = {const_cast<DecodingParams*>(&p)};
  const CUresult result =
      launch(static_cast<CUfunction>(kernel), grid.x, grid.y, 1, kWarps * 32, 1, 1,
             shared_bytes(tile.head_dim, tile.rows), static_cast<CUstream>(stream), arguments, nullptr);
  return result == CUDA_SUCCESS ? cudaSuccess : static_cast<cudaError_t>(result);  // the numbers are the same
}

template <bool kBFloat16>
cudaError_t launch_combine(const DecodingParams& p, const DeviceInfo& info, void* stream) {
  const dim3 rows(static_cast<unsigned>(p.batch) * p.heads * p.seqlen_q);
  const int bytes = kCombineWarps * p.head_dim_v * static_cast<int>(sizeof(float));
  cudaLaunchConfig_t config = config_of(rows, kCombineWarps * 32, bytes, stream);
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &overlap;
  config.numAttrs = info.cc_major >= 9 ? 1 : 0;
  return launch_kernel(config, combine_kernel<kBFloat16>, p);
}

}  // namespace

const char* run_decoding(const DecodingParams& p, DecodingTile tile, bool bfloat16, void* kernel,
                         const DeviceInfo& info, void* stream) {
  const dim3 grid(static_cast<unsigned>(p.batch) * p.heads_kv * p.row_tiles, p.splits);
  cudaError_t error;
  if (kernel != nullptr) {
    error = launch_compiled(p, tile, grid, kernel, stream);
  } else {
    error = bfloat16 ? launch_mod<true>(p, tile, grid, stream) : launch_mod<false>(p, tile, grid, stream);
  }
  if (error == cudaSuccess && p.splits > 1) {
    error = bfloat16 ? launch_combine<true>(p, info, stream) : launch_combine<false>(p, info, stream);
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace flashbwd

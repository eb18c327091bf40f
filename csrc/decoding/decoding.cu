// Launchers of the prebuilt kernels and of kernels compiled at run time.
#include "../common/launch_driver.h"
#include "combine.cuh"
#include "kernels.h"
#include "launch.h"
#include "sum_slots.cuh"

namespace flashbwd {
namespace {

// Calls f(an object of the kernels' type for `dtype`).
template <typename F>
auto dispatch(DType dtype, const F& f) {
  if (dtype == DType::kFloat32) return f(Float());
  return dtype == DType::kBFloat16 ? f(BFloat16()) : f(Half());
}

DecodingKernels kernels_of(DType dtype, int head_dim) {
  return dispatch(dtype, [&](auto type) {
    using T = decltype(type);
    if (head_dim == 64) return decoding_kernels<64, T>();
    return head_dim == 128 ? decoding_kernels<128, T>() : decoding_kernels<256, T>();
  });
}

}  // namespace

const char* run_decoding(const DecodingParams& p, DecodingTile tile, DType dtype, bool aligned, void* kernel,
                         const DeviceInfo& info, void* stream) {
  const DecodingKernels kernels = kernels_of(dtype, tile.head_dim);
  const dim3 grid(static_cast<unsigned>(p.batch) * p.heads_kv * p.row_tiles, p.splits);
  const int bytes = shared_bytes(tile.head_dim, tile.rows, tile.warps, static_cast<int>(size_of(dtype)));
  const CUlaunchConfig config = config_of(grid, tile.warps * 32, bytes, stream);
  const LaunchForm form = {info.index, p.cluster, info.cc_major >= 9};
  cudaError_t error = kernel != nullptr
                          ? launch_with_driver(&p, kernel, config, form)
                          : launch_prebuilt(p, kernels.split(tile, aligned, p.built_in.kind), config, form);
  if (error == cudaSuccess && p.splits > p.cluster && p.arrivals == nullptr) {
    const dim3 rows(static_cast<unsigned>(p.batch) * p.heads * p.seqlen_q);
    const auto combine = dispatch(dtype, [](auto type) { return combine_kernel<decltype(type)>; });
    error = launch_prebuilt(p, combine, config_of(rows, kCombineWarps * 32, kCombineBytes, stream),
                            {info.index, 1, form.overlaps});
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

const char* run_decoding_backward(const DecodingBackwardParams& p, int head_dim, DType dtype, bool aligned,
                                  void* kernel, const DeviceInfo& info, void* stream) {
  const DecodingKernels kernels = kernels_of(dtype, head_dim);
  const LaunchForm form = {info.index};
  const dim3 grid(static_cast<unsigned>(p.batch_kv) * p.heads_kv, p.splits);
  const int bytes = backward_shared_bytes(head_dim, static_cast<int>(size_of(dtype)));
  const CUlaunchConfig config = config_of(grid, kBackwardWarps * 32, bytes, stream);
  cudaError_t error = kernel != nullptr ? launch_with_driver(&p, kernel, config, form)
                                        : launch_prebuilt(p, kernels.backward(aligned, p.built_in.kind), config, form);
  if (error == cudaSuccess) {
    const int64_t pairs = int64_t{p.batch} * p.heads * p.seqlen_q * ((p.head_dim + 1) / 2);
    const dim3 blocks(static_cast<unsigned>((pairs + kSumThreads - 1) / kSumThreads));
    const auto sum_slots = dispatch(dtype, [](auto type) { return sum_slots_kernel<decltype(type)>; });
    error = launch_prebuilt(p, sum_slots, config_of(blocks, kSumThreads, 0, stream), form);
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace flashbwd

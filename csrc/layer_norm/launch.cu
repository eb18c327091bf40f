#include <cuda_runtime.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>

#include "../common/capture.h"
#include "finalize.cuh"
#include "launch.h"
#include "phase.h"
#include "variants.h"

namespace flashbwd {
namespace layer_norm {
namespace {

constexpr int64_t kAlignment = 256;

Variant variant_of(const LayerNormBackwardParams& p) {
  const Form form = p.from_output ? Form::kOutput : (p.dbranch != nullptr ? Form::kDropout : Form::kPlain);
  switch (p.x_dtype) {
    case DType::kFloat16:
      return variant_of_float16(form, p.dz_dtype);
    case DType::kBFloat16:
      return variant_of_bfloat16(form, p.dz_dtype);
    case DType::kFloat32:
      return variant_of_float32(form, p.dz_dtype);
    default:
      return {};
  }
}

// All arguments of a launch except the address of the workspace.
struct Launch {
  Variant kernels;
  BackwardArguments arguments;
  int ctas = 0;
  int threads = 0;          // per CTA
  bool needs_sums = false;  // dx or dbranch is needed, and with it the row sums
  bool sums_first = false;  // row_sums_kernel computes the row sums first
  // Regions of the workspace, in this order.
  int64_t partial_bytes = 0;
  int64_t progress_bytes = 0;
  int64_t sums_bytes = 0;

  int64_t bytes() const { return partial_bytes + progress_bytes + sums_bytes; }
  const char* error = nullptr;
};

cudaLaunchConfig_t config_of(const BackwardTile& tile, int ctas, int threads, cudaLaunchAttribute* cluster,
                             void* stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(ctas);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = tile.smem_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  if (tile.cluster) {
    cluster->id = cudaLaunchAttributeClusterDimension;
    cluster->val.clusterDim = {static_cast<unsigned>(tile.ctas_per_row), 1, 1};
    config.attrs = cluster;
    config.numAttrs = 1;
  }
  return config;
}

// Allows `kernel` to use all shared memory of the current device and clusters of more than 8 CTAs.
cudaError_t prepare(const void* kernel, const DeviceInfo& device) {
  cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(device.smem_per_block));
  if (status == cudaSuccess && device.cc_major >= 9) {
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  return status;
}

// The number of workers that are resident at the same time, which is the size of the persistent grid; 0 if the device
// does not support clusters of this size. Also prepares the kernel. Cached per kernel, device and tile.
int concurrent_workers(const void* kernel, const BackwardTile& tile, const DeviceInfo& device, cudaError_t* status) {
  using Key = std::tuple<const void*, int, int, int, int64_t>;
  static std::mutex mutex;
  static std::map<Key, int> known;
  int index = 0;
  *status = cudaGetDevice(&index);
  if (*status != cudaSuccess) return 0;
  const Key key(kernel, index, tile.ctas_per_row, tile.threads(), tile.cluster ? tile.smem_bytes : 0);
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = known.find(key); found != known.end()) return found->second;
  const AllowedInCapture allowed;
  *status = prepare(kernel, device);
  if (*status != cudaSuccess) return 0;
  int workers = std::max(1, device.sm_count / tile.ctas_per_row);
  if (tile.cluster) {
    cudaLaunchAttribute attribute;
    const cudaLaunchConfig_t config = config_of(tile, workers * tile.ctas_per_row, tile.threads(), &attribute, nullptr);
    int clusters = 0;
    if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess) {
      cudaGetLastError();  // clear the error: the device does not support clusters of this size
      clusters = 0;
    }
    workers = std::min(workers, clusters);
  }
  return known.emplace(key, workers).first->second;
}

// Sets the tensors of the arguments, and which of them allow 16-byte accesses.
void set_tensors(BackwardArguments& a, const LayerNormBackwardParams& p, const Phase& phase, int elements) {
  const auto in_phase = [&](const void* data, int64_t row_stride, DType dtype) {
    return phase_of(data, row_stride, dtype, elements) == phase;
  };
  a.vector_x = true;
  a.vector_dz = in_phase(p.dz, p.dz_row_stride, p.dz_dtype);
  a.vector_residual = in_phase(p.dresidual, p.dresidual_row_stride, p.x_dtype);
  a.vector_dx = in_phase(p.dx, p.dx_row_stride, p.x_dtype);
  a.vector_branch = in_phase(p.dbranch, p.dbranch_row_stride, p.dz_dtype);
  a.all_vectors = a.vector_x && a.vector_dz;
  a.rows = p.rows;
  a.columns = static_cast<int>(p.columns);
  a.inverse_columns = 1.f / static_cast<float>(p.columns);
  a.x = p.x;
  a.dz = p.dz;
  a.residual = p.dresidual;
  a.centred = p.centred;
  a.mu = p.mu;
  a.rs = p.rs;
  a.gamma = p.gamma;
  a.beta = p.beta;
  a.dx = p.dx;
  a.branch = p.dbranch;
  a.branch_stride = p.dbranch_row_stride;
  a.dropout = dropout_of(p.dropout);
  a.dropout.vector_keep = in_phase(p.dropout.keep, p.dropout.keep_row_stride, DType::kBool);
  a.x_stride = p.x_row_stride;
  a.dz_stride = p.dz_row_stride;
  a.residual_stride = p.dresidual_row_stride;
  a.dx_stride = p.dx_row_stride;
  a.zero_centered = p.zero_centered_gamma;
  a.gamma_dtype = p.gamma_dtype;
  a.dgamma = p.dgamma;
  a.dbeta = p.dbeta;
}

BackwardShape shape_of(const LayerNormBackwardParams& p, const Phase& phase) {
  BackwardShape shape;
  shape.rows = p.rows;
  shape.columns = p.columns;
  shape.x_bytes = size_of(p.x_dtype);
  shape.dz_bytes = size_of(p.dz_dtype);
  shape.from_output = p.from_output;
  shape.residual = p.dresidual != nullptr;
  shape.keep = p.dropout.keep != nullptr;
  shape.draws = p.dropout.keep == nullptr && p.dropout.p > 0.0;
  shape.shifted = !phase.none();
  return shape;
}

Launch plan_launch(const LayerNormBackwardParams& p, const DeviceInfo& device) {
  Launch launch;
  launch.kernels = variant_of(p);
  launch.needs_sums = p.dx != nullptr || p.dbranch != nullptr;
  BackwardArguments& a = launch.arguments;
  const int elements = elements_of(size_of(p.x_dtype), size_of(p.dz_dtype));
  const Phase phase = phase_of(p.x, p.x_row_stride, p.x_dtype, elements);
  set_tensors(a, p, phase, elements);
  BackwardShape shape = shape_of(p, phase);
  // The tile does not depend on which gradients are needed, so omitting one changes no bit of the others.
  const bool in_vectors = !shape.shifted && a.vector_dz && p.columns % elements == 0;
  int num_column_ctas = in_vectors && !p.from_output && !p.of_sum ? column_ctas(shape, device) : 0;
  bool by_columns = num_column_ctas > 0;  // dgamma and dbeta by columns, in separate CTAs or inside the row CTAs
  DeviceInfo for_rows = device;
  for_rows.sm_count -= num_column_ctas;
  cudaError_t status = cudaSuccess;
  int concurrent = 0;
  for (; concurrent == 0 && status == cudaSuccess; shape.most_cluster /= 2) {
    shape.beside_columns = by_columns;
    a.tile = choose_tile(shape, for_rows);
    if (by_columns && a.tile.ctas_per_row > 1) {
      by_columns = shape.beside_columns = false;
      num_column_ctas = 0;
      for_rows = device;
      a.tile = choose_tile(shape, device);
    }
    if (by_columns) {
      if (const BackwardTile within = tile_with_columns(shape, a.tile, num_column_ctas, device); within.found()) {
        a.tile = within;
        num_column_ctas = 0;
      }
    }
    if (!a.tile.found() || launch.kernels.backward == nullptr) {
      launch.error = "no LayerNorm kernel supports this problem";
      return launch;
    }
    concurrent = concurrent_workers(reinterpret_cast<const void*>(launch.kernels.backward), a.tile, device, &status);
  }
  if (status != cudaSuccess) {
    launch.error = cudaGetErrorString(status);
    return launch;
  }
  const bool parameters = p.dgamma != nullptr || p.dbeta != nullptr;
  if (!parameters) {
    by_columns = false;
    num_column_ctas = 0;
  }
  a.schedule = schedule_rows(shape, a.tile, concurrent - num_column_ctas, phase.base, phase.step);
  if (by_columns && !launch.needs_sums) a.schedule.workers = a.schedule.ahead = 0;
  launch.ctas = a.schedule.workers * a.tile.ctas_per_row + num_column_ctas;
  launch.threads = a.tile.threads();
  if (by_columns && num_column_ctas == 0) {
    const int columns = columns_at_a_time(elements);
    launch.ctas = std::max(launch.ctas, static_cast<int>((p.columns + columns - 1) / columns));
    launch.threads = kMaxThreads;
  }

  const auto aligned = [](int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; };
  if (parameters && !by_columns) {
    a.partial_columns = int64_t{a.tile.ctas_per_row} * a.tile.cta_vectors * a.tile.elements;
    launch.partial_bytes = aligned(a.schedule.workers * 2 * a.partial_columns * 4);
  }
  if (a.schedule.ahead > 0) launch.progress_bytes = aligned(sizeof(int));
  launch.sums_first = a.tile.ctas_per_row > 1 && !a.tile.cluster && launch.needs_sums;
  if (launch.sums_first) launch.sums_bytes = aligned(p.rows * int64_t{sizeof(float2)});
  return launch;
}

cudaError_t launch_finalize(const LayerNormBackwardParams& p, const BackwardArguments& a, int workers, bool dependent,
                            void* stream) {
  FinalizeArguments f;
  f.partial = a.partial;
  f.workers = workers;
  f.partial_columns = a.partial_columns;
  f.period = a.schedule.period;
  f.phase_base = a.schedule.phase_base;
  f.phase_step = a.schedule.phase_step;
  f.elements = std::max(1, a.tile.elements);
  f.columns = static_cast<int>(p.columns);
  f.dgamma = p.dgamma;
  f.dbeta = p.dbeta;
  f.dtype = p.gamma_dtype;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3((f.columns + kFinalizeColumns - 1) / kFinalizeColumns, 2);
  config.blockDim = dim3(kFinalizeColumns, kFinalizeRows);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = dependent ? 1 : 0;
  return cudaLaunchKernelEx(&config, finalize_kernel, f);
}

cudaError_t run(const LayerNormBackwardParams& p, const DeviceInfo& device, Launch& launch, void* stream) {
  BackwardArguments& a = launch.arguments;
  char* workspace = static_cast<char*>(p.workspace);
  if (launch.partial_bytes > 0) a.partial = reinterpret_cast<float*>(workspace);
  cudaError_t status = cudaSuccess;
  if (launch.progress_bytes > 0) {
    a.progress = reinterpret_cast<int*>(workspace + launch.partial_bytes);
    status = cudaMemsetAsync(a.progress, 0, sizeof(int), static_cast<cudaStream_t>(stream));
    if (status != cudaSuccess) return status;
  }
  if (launch.sums_first) {
    float2* row_sums = reinterpret_cast<float2*>(workspace + launch.partial_bytes + launch.progress_bytes);
    const int grid = static_cast<int>(std::min<int64_t>(p.rows, 4 * device.sm_count));
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(grid);
    config.blockDim = dim3(kRowSumsThreads);
    config.stream = static_cast<cudaStream_t>(stream);
    status = cudaLaunchKernelEx(&config, launch.kernels.row_sums, a, row_sums);
    if (status != cudaSuccess) return status;
    a.row_sums = row_sums;
  }
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = config_of(a.tile, launch.ctas, launch.threads, &attribute, stream);
  status = cudaLaunchKernelEx(&config, launch.kernels.backward, a);
  if (status != cudaSuccess || launch.partial_bytes == 0) return status;
  return launch_finalize(p, a, a.schedule.workers, device.cc_major >= 9, stream);
}

}  // namespace
}  // namespace layer_norm

int64_t layer_norm_backward_workspace(const LayerNormBackwardParams& params, const DeviceInfo& device) {
  if (params.rows == 0) return 0;
  const layer_norm::Launch launch = layer_norm::plan_launch(params, device);
  return launch.bytes();
}

const char* launch_layer_norm_backward(const LayerNormBackwardParams& params, const DeviceInfo& device, void* stream) {
  cudaError_t status = cudaSuccess;
  if (params.rows == 0) {  // dgamma and dbeta are sums over no rows: the finalize kernel writes zeros
    if (params.dgamma == nullptr && params.dbeta == nullptr) return nullptr;
    status = layer_norm::launch_finalize(params, {}, 0, false, stream);
  } else {
    layer_norm::Launch launch = layer_norm::plan_launch(params, device);
    if (launch.error != nullptr) return launch.error;
    if (params.workspace_bytes < launch.bytes()) return "the workspace is too small";
    status = layer_norm::run(params, device, launch, stream);
  }
  return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}

}  // namespace flashbwd

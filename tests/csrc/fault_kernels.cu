// Operators that fail on purpose, for the tests of error reports with two CUDA runtimes in one process. They are built
// as the kernels are: stable ABI, static CUDA runtime.
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/shim_utils.h>

#include "common/launch.h"

namespace {

using torch::stable::Tensor;

constexpr int kThreads = 256;
constexpr int kTooManyThreads = 4096;  // a block holds 1024 at most

__global__ void add_one_kernel(float* x, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n) x[i] += 1.f;
}

__global__ void write_nowhere_kernel(float* x) { x[threadIdx.x] = 1.f; }

__global__ void trap_kernel() { asm("trap;"); }

cudaLaunchConfig_t config_of(const Tensor& x, int64_t blocks, int threads) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(threads);
  config.stream = static_cast<cudaStream_t>(stream);
  return config;
}

void check(cudaError_t error) { STD_TORCH_CHECK(error == cudaSuccess, "flashbwd: ", cudaGetErrorString(error)); }

float* data_of(const Tensor& x) { return static_cast<float*>(x.data_ptr()); }

// A launch without an error.
void add_one(Tensor x) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const int64_t blocks = (x.numel() + kThreads - 1) / kThreads;
  check(flashbwd::launch_kernel(config_of(x, blocks, kThreads), add_one_kernel, data_of(x), x.numel()));
}

// The launch fails, and the operator reports the error, which also clears it.
void bad_launch(Tensor x) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  check(flashbwd::launch_kernel(config_of(x, 1, kTooManyThreads), add_one_kernel, data_of(x), x.numel()));
}

// The launch fails, no code reads the error, and it stays in this library's runtime.
void unreported_bad_launch(Tensor x) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const cudaLaunchConfig_t config = config_of(x, 1, kTooManyThreads);
  (void)cudaLaunchKernelEx(&config, add_one_kernel, data_of(x), x.numel());
}

// The error that is stored in this library's runtime.
int64_t pending_error(Tensor) { return static_cast<int64_t>(cudaPeekAtLastError()); }

// The launch succeeds. The device reports an error later, and the context is lost.
void illegal_address(Tensor x) {
  auto* nowhere = reinterpret_cast<float*>(uintptr_t{16});
  check(flashbwd::launch_kernel(config_of(x, 1, 32), write_nowhere_kernel, nowhere));
}

void trap(Tensor x) { check(flashbwd::launch_kernel(config_of(x, 1, 1), trap_kernel)); }

}  // namespace

STABLE_TORCH_LIBRARY(flashbwd_testing, m) {
  m.def("add_one(Tensor(a!) x) -> ()");
  m.def("bad_launch(Tensor(a!) x) -> ()");
  m.def("unreported_bad_launch(Tensor(a!) x) -> ()");
  m.def("pending_error(Tensor x) -> int");
  m.def("illegal_address(Tensor(a!) x) -> ()");
  m.def("trap(Tensor(a!) x) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(flashbwd_testing, CUDA, m) {
  m.impl("add_one", TORCH_BOX(&add_one));
  m.impl("bad_launch", TORCH_BOX(&bad_launch));
  m.impl("unreported_bad_launch", TORCH_BOX(&unreported_bad_launch));
  m.impl("pending_error", TORCH_BOX(&pending_error));
  m.impl("illegal_address", TORCH_BOX(&illegal_address));
  m.impl("trap", TORCH_BOX(&trap));
}

// Registers the CUDA backend: _C_cuda adds its kernels here when it is loaded (see cuda_backend.h).
#include <torch/csrc/stable/library.h>

#include "../common/check.h"
#include "cuda_backend.h"

namespace flashbwd {
namespace {

CudaBackend installed;
bool has_cuda = false;

}  // namespace

const CudaBackend* cuda_backend() { return has_cuda ? &installed : nullptr; }

}  // namespace flashbwd

// Returns the message of the last failed check. Python converts an exception whose message starts with it to a
// ValueError.
extern "C" __attribute__((visibility("default"))) const char* flashbwd_last_refusal() {
  return flashbwd::last_refusal.c_str();
}

void flashbwd_install_cuda_backend(const flashbwd::CudaBackend* backend) {
  flashbwd::installed = *backend;
  flashbwd::has_cuda = true;
}

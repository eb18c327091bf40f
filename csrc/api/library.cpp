// The namespace of the operators, and the socket that _C_cuda plugs into.
#include <torch/csrc/stable/library.h>

#include "cuda_backend.h"

namespace flashbwd {
namespace {

CudaBackend installed;
bool has_cuda = false;

}  // namespace

const CudaBackend* cuda_backend() { return has_cuda ? &installed : nullptr; }

}  // namespace flashbwd

void flashbwd_install_cuda_backend(const flashbwd::CudaBackend* backend) {
  flashbwd::installed = *backend;
  flashbwd::has_cuda = true;
}

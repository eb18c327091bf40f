// The operators of the flex decoding backward. They convert tensors that Python has prepared to launch parameters, and
// launch the kernels.
#include <torch/csrc/stable/accelerator.h>

#include <vector>

#include "../common/check.h"
#include "../decoding/call.h"
#include "../decoding/launch.h"
#include "cuda_backend.h"
#include "decoding.h"
#include "tensors.h"

namespace flashbwd {
namespace {

void copy_strides(const TensorDesc& tensor, long long (&strides)[3]) {
  for (int i = 0; i < 3; ++i) strides[i] = tensor.strides[i];
}

// True if the rows of q, k, v and dout are 16-byte aligned and multiples of 16 bytes long.
bool all_rows_are_aligned(const DecodingCall& call, const TensorDesc& dout) {
  DecodingCall others = call;
  others.q = dout;
  return rows_are_aligned(call) && rows_are_aligned(others);
}

void decoding_backward(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader reader(stack);
  const Tensor dout = reader.tensor(), q = reader.tensor(), k = reader.tensor(), v = reader.tensor();
  const Tensor out = reader.tensor(), lse = reader.tensor();
  const auto dlse = reader.optional_tensor();
  const Tensor dq = reader.tensor(), dk = reader.tensor(), dv = reader.tensor();
  const auto states = reader.optional_tensor();
  const auto captured = reader.read<std::vector<Tensor>>();
  const auto gradients = reader.read<std::vector<Tensor>>();
  const auto gradient_slots = reader.read<std::vector<int64_t>>();
  const double scale = reader.read<double>();
  DecodingCall call;
  call.enable_gqa = true;
  call.mask_shape = {reader.read<int64_t>(), reader.read<int64_t>(), 0, 0};
  void* kernel = reinterpret_cast<void*>(reader.read<int64_t>());
  const int64_t modification = reader.read<int64_t>();

  call.q = describe(q);
  call.k = describe(k);
  call.v = describe(v);
  if (states.has_value()) call.mask.push_back(describe(*states));
  call.mask_shape[2] = call.q.sizes[2];
  call.mask_shape[3] = call.k.sizes[2];
  for (const Tensor& tensor : captured) call.captured.push_back(describe(tensor));
  const CudaBackend* cuda = cuda_backend();
  check(cuda != nullptr && cuda->decoding_backward != nullptr, "this installation has no decoding kernels");
  check(kernel_takes(call), "the decoding kernel does not support these tensors");
  check(gradients.size() == gradient_slots.size(), "gradient_slots has ", gradient_slots.size(),
        " elements, expected one for each of the ", gradients.size(), " gradients");
  for (const int64_t slot : gradient_slots) {
    check(slot >= 0 && slot < static_cast<int64_t>(captured.size()), "gradient_slots holds ", slot,
          ", expected the number of one of the ", captured.size(), " captured tensors");
  }
  check(describe(out).dtype == DType::kFloat32, "out is not float32, expected the unrounded float32 output");
  const DecodingShape shape = shape_of(call);
  const int32_t head_dim = padded_head_dim(shape.head_dim, shape.head_dim_v);
  check(head_dim > 0, "query has head dimension ", shape.head_dim, ", expected at most 256 for the decoding kernel");

  const int device = call.q.device.index;
  const DeviceInfo info = cuda->device_info(device);
  const TensorDesc dout_desc = describe(dout);
  DecodingBackwardParams p = {};
  static_cast<DecodingParams&>(p) = params_of(call, {head_dim, kBackwardRows, kBackwardWarps});
  p.built_in = built_in_modification(modification);
  p.scale = static_cast<float>(scale);
  p.out = out.data_ptr();
  copy_strides(describe(out), p.out_strides);
  p.lse = static_cast<float*>(lse.data_ptr());
  p.dout = dout_desc.data;
  copy_strides(dout_desc, p.dout_strides);
  p.dlse = dlse.has_value() ? static_cast<const float*>(dlse->data_ptr()) : nullptr;
  p.dq = dq.data_ptr();
  copy_strides(describe(dq), p.dq_strides);
  p.dk = dk.data_ptr();
  copy_strides(describe(dk), p.dk_strides);
  p.dv = dv.data_ptr();
  copy_strides(describe(dv), p.dv_strides);
  p.batch_kv = static_cast<int>(call.k.sizes[0]);
  for (size_t i = 0; i < gradients.size(); ++i) p.gradients[gradient_slots[i]] = gradients[i].data_ptr();
  p.splits = decoding_backward_splits(shape, p.batch_kv, head_dim, info);
  p.cluster = 1;

  const torch::stable::accelerator::DeviceGuard guard(device);
  const int64_t rows = int64_t{p.batch} * p.heads * p.seqlen_q;
  const Tensor slots = new_empty(q, {p.splits * rows * ((p.head_dim + 1) / 2 * 2)}, DType::kFloat32);
  p.dq_slots = static_cast<float*>(slots.data_ptr());
  const char* error = cuda->decoding_backward(p, head_dim, call.q.dtype, all_rows_are_aligned(call, dout_desc), kernel,
                                              info, cuda->current_stream(device));
  STD_TORCH_CHECK(error == nullptr, "flashbwd: ", error);
}

void decoding_backward_tile(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader reader(stack);
  const TensorDesc dout = describe(reader.tensor());
  DecodingCall call;
  call.q = describe(reader.tensor());
  call.k = describe(reader.tensor());
  call.v = describe(reader.tensor());
  const int head_dim = padded_head_dim(call.q.sizes[3], call.v.sizes[3]);
  stack[0] = boxed<int64_t>(head_dim);
  stack[1] = boxed<bool>(all_rows_are_aligned(call, dout));
  stack[2] = boxed<int64_t>(backward_shared_bytes(head_dim, static_cast<int>(size_of(call.q.dtype))));
}

}  // namespace
}  // namespace flashbwd

STABLE_TORCH_LIBRARY_FRAGMENT(flashbwd, m) {
  m.def(
      "decoding_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, "
      "Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor? states, Tensor[] captured, Tensor(d!)[] gradients, "
      "int[] gradient_slots, float scale, int q_block, int kv_block, int kernel, "
      "int modification) -> ()");
  m.def(
      "decoding_backward_tile(Tensor dout, Tensor q, Tensor k, Tensor v) "
      "-> (int head_dim, bool aligned, int shared_bytes)");
}

STABLE_TORCH_LIBRARY_IMPL(flashbwd, CUDA, m) { m.impl("decoding_backward", flashbwd::decoding_backward); }

STABLE_TORCH_LIBRARY_IMPL(flashbwd, CompositeExplicitAutograd, m) {
  m.impl("decoding_backward_tile", flashbwd::decoding_backward_tile);
}

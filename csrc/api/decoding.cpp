// The operators of flex decoding: what Python has checked, as parameters of a launch.
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <vector>

#include "../common/check.h"
#include "../decoding/launch.h"
#include "../decoding/source.h"
#include "cuda_backend.h"
#include "tensors.h"

namespace flashbwd {
namespace {

void copy_strides(const TensorDesc& tensor, long long (&strides)[3]) {
  for (int i = 0; i < 3; ++i) strides[i] = tensor.sizes[i] == 1 ? 0 : tensor.strides[i];
}

BlockList block_list(const std::optional<Tensor>& counts, const std::optional<Tensor>& indices) {
  BlockList list = {};
  if (!counts.has_value() || !indices.has_value()) return list;
  const TensorDesc c = describe(*counts), i = describe(*indices);
  list.counts = static_cast<const int*>(c.data);
  list.indices = static_cast<const int*>(i.data);
  copy_strides(c, list.count_strides);
  copy_strides(i, list.index_strides);
  return list;
}

// decoding_forward(q, k, v, out!, lse!, max_scores!, partial lists, full lists, states, captured, ...)
void decoding_forward(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader reader(stack);
  const Tensor q = reader.tensor(), k = reader.tensor(), v = reader.tensor();
  const Tensor out = reader.tensor(), lse = reader.tensor(), max_scores = reader.tensor();
  const auto counts = reader.optional_tensor(), indices = reader.optional_tensor();
  const auto full_counts = reader.optional_tensor(), full_indices = reader.optional_tensor();
  const auto states = reader.optional_tensor();
  const std::vector<Tensor> captured = reader.read<std::vector<Tensor>>();
  const double scale = reader.read<double>();
  const int64_t splits = reader.read<int64_t>();
  const int64_t q_block = reader.read<int64_t>(), kv_block = reader.read<int64_t>();
  const int64_t kernel = reader.read<int64_t>();

  const TensorDesc dq = describe(q), dk = describe(k), dv = describe(v), dout = describe(out);
  const CudaBackend* cuda = cuda_backend();
  check(cuda != nullptr && cuda->decoding != nullptr, "this installation holds no decoding kernels");
  const DeviceInfo info = cuda->device_info(dq.device.index);
  check(info.usable, info.why_not);
  check(captured.size() <= DecodingParams::kMaxCaptured, "score_mod and mask_mod capture ", captured.size(),
        " tensors, expected at most ", DecodingParams::kMaxCaptured);

  DecodingParams p = {};
  p.q = dq.data;
  p.k = dk.data;
  p.v = dv.data;
  p.out = dout.data;
  p.lse = static_cast<float*>(lse.data_ptr());
  p.max_scores = static_cast<float*>(max_scores.data_ptr());
  copy_strides(dq, p.q_strides);
  copy_strides(dk, p.k_strides);
  copy_strides(dv, p.v_strides);
  copy_strides(dout, p.out_strides);
  p.batch = static_cast<int>(dq.sizes[0]);
  p.heads = static_cast<int>(dq.sizes[1]);
  p.heads_kv = static_cast<int>(dk.sizes[1]);
  p.group = p.heads / p.heads_kv;
  p.seqlen_q = static_cast<int>(dq.sizes[2]);
  p.seqlen_k = static_cast<int>(dk.sizes[2]);
  p.head_dim = static_cast<int>(dq.sizes[3]);
  p.head_dim_v = static_cast<int>(dv.sizes[3]);
  p.scale = static_cast<float>(scale);
  p.partial = block_list(counts, indices);
  p.full = block_list(full_counts, full_indices);
  if (states.has_value()) {
    const TensorDesc s = describe(*states);
    p.states = static_cast<const unsigned char*>(s.data);
    copy_strides(s, p.state_strides);
  }
  constexpr int64_t kLargestBlock = 1 << 30;
  p.q_block = static_cast<int>(std::min(q_block, kLargestBlock));
  p.kv_block = static_cast<int>(std::min(kv_block, kLargestBlock));
  for (size_t i = 0; i < captured.size(); ++i) {
    const TensorDesc c = describe(captured[i]);
    p.captured[i].data = c.data;
    check(c.dim <= CapturedTensor::kMaxDims, "a captured tensor has ", c.dim, " dimensions, expected at most ",
          CapturedTensor::kMaxDims);
    for (int d = 0; d < c.dim; ++d) {
      p.captured[i].strides[d] = c.strides[d];
      p.captured[i].sizes[d] = static_cast<int>(c.sizes[d]);
    }
  }

  const DecodingTile tile = decoding_tile(p.head_dim, p.head_dim_v, int64_t{p.group} * p.seqlen_q);
  check(tile.head_dim > 0, "query has head dimension ", p.head_dim, ", expected at most 256 for the decoding kernel");
  p.row_tiles = (p.group * p.seqlen_q + tile.rows - 1) / tile.rows;
  const int64_t units = int64_t{p.batch} * p.heads_kv * p.row_tiles;
  p.splits = splits > 0 ? static_cast<int>(std::min<int64_t>(splits, 65535))
                        : decoding_splits(units, p.seqlen_k, tile, info.sm_count, info.smem_per_block);

  const torch::stable::accelerator::DeviceGuard guard(dq.device.index);
  std::optional<Tensor> workspace;
  if (p.splits > 1) {
    const int64_t rows = int64_t{p.batch} * p.heads * p.seqlen_q;
    workspace = new_empty(q, {p.splits * rows * (p.head_dim_v + 2)}, DType::kFloat32);
    p.partial_out = static_cast<float*>(workspace->data_ptr());
    p.partial_stats = p.partial_out + p.splits * rows * p.head_dim_v;
  }
  const char* error = cuda->decoding(p, tile, dq.dtype == DType::kBFloat16, reinterpret_cast<void*>(kernel), info,
                                     cuda->current_stream(dq.device.index));
  STD_TORCH_CHECK(error == nullptr, "flashbwd: ", error);
}

// Why a device cannot run the kernels; empty when it can.
void decoding_refusal(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader reader(stack);
  const int64_t device = reader.read<int64_t>();
  std::string reason;
  if (cuda_backend() == nullptr || cuda_backend()->decoding == nullptr) {
    reason = "this installation holds no decoding kernels";
  } else {
    const DeviceInfo info = cuda_backend()->device_info(static_cast<int>(device));
    if (!info.usable) reason = info.why_not;
    if (info.usable && info.cc_major < 8) reason = "the device is older than compute capability 8.0";
  }
  stack[0] = boxed(reason);
}

void decoding_tile_operator(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader reader(stack);
  const int64_t head_dim = reader.read<int64_t>(), head_dim_v = reader.read<int64_t>();
  const DecodingTile tile = decoding_tile(head_dim, head_dim_v, reader.read<int64_t>());
  stack[0] = boxed<int64_t>(tile.head_dim);
  stack[1] = boxed<int64_t>(tile.rows);
}

void decoding_shared_bytes(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader reader(stack);
  const int64_t head_dim = reader.read<int64_t>();
  stack[0] = boxed<int64_t>(shared_bytes(static_cast<int>(head_dim), static_cast<int>(reader.read<int64_t>())));
}

void decoding_source_operator(StableIValue* stack, uint64_t, uint64_t) { stack[0] = boxed(decoding_source()); }

}  // namespace
}  // namespace flashbwd

STABLE_TORCH_LIBRARY_FRAGMENT(flashbwd, m) {
  m.def(
      "decoding_forward(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!) lse, Tensor(c!) max_scores, "
      "Tensor? kv_num_blocks, Tensor? kv_indices, Tensor? full_kv_num_blocks, Tensor? full_kv_indices, "
      "Tensor? states, Tensor[] captured, float scale, int splits, int q_block, int kv_block, int kernel) -> ()");
  m.def("decoding_refusal(int device) -> str");
  m.def("decoding_tile(int head_dim, int head_dim_v, int rows) -> (int head_dim, int rows)");
  m.def("decoding_shared_bytes(int head_dim, int rows) -> int");
  m.def("decoding_source() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(flashbwd, CUDA, m) { m.impl("decoding_forward", flashbwd::decoding_forward); }

STABLE_TORCH_LIBRARY_IMPL(flashbwd, CompositeExplicitAutograd, m) {
  m.impl("decoding_refusal", flashbwd::decoding_refusal);
  m.impl("decoding_tile", flashbwd::decoding_tile_operator);
  m.impl("decoding_shared_bytes", flashbwd::decoding_shared_bytes);
  m.impl("decoding_source", flashbwd::decoding_source_operator);
}

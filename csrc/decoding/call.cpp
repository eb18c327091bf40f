#include "call.h"

#include <algorithm>

#include "../mods/describe_captured.h"

namespace flashbwd {
namespace {

// PyTorch's empty BlockMask, under which every query sees every key, has blocks of this size. It fits any lengths.
constexpr int64_t kLargestBlock = 1 << 30;

bool rows_are_aligned(const TensorDesc& tensor) {
  const int64_t elements = 16 / size_of(tensor.dtype);
  for (int i = 0; i < 3; ++i) {
    if (tensor.sizes[i] > 1 && tensor.strides[i] % elements != 0) return false;
  }
  return tensor.sizes[3] % elements == 0 && reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0;
}

// True if the batch and head dimensions of a mask tensor equal those of q or are broadcast.
bool has_batch_and_heads_of(const TensorDesc& list, const TensorDesc& q) {
  return (list.sizes[0] == 1 || list.sizes[0] == q.sizes[0]) && (list.sizes[1] == 1 || list.sizes[1] == q.sizes[1]);
}

// True if counts and indices are block lists in a format that the kernel reads and all rows of a KV head share them.
bool takes_lists(const DecodingCall& call, const TensorDesc& counts, const TensorDesc& indices) {
  if (counts.dim != 3 || indices.dim != 4 || counts.dtype != DType::kInt32 || indices.dtype != DType::kInt32) {
    return false;
  }
  if (counts.device != call.q.device || indices.device != call.q.device) return false;
  if (!has_batch_and_heads_of(counts, call.q) || !has_batch_and_heads_of(indices, call.q) ||
      counts.sizes[1] != indices.sizes[1]) {
    return false;
  }
  const bool shared = counts.sizes[1] == 1 || call.q.sizes[1] == call.k.sizes[1];
  return shared && counts.sizes[2] == 1 && indices.sizes[2] == 1 && (indices.sizes[3] <= 1 || indices.strides[3] == 1);
}

bool takes_mask(const DecodingCall& call) {
  if (call.mask.empty()) return true;
  const auto [q_block, kv_block, seqlen_q, seqlen_k] = call.mask_shape;
  if (q_block < 1 || kv_block < 1) return false;
  const bool any_lengths = std::min(q_block, kv_block) >= kLargestBlock;
  if (!any_lengths && (seqlen_q != call.q.sizes[2] || seqlen_k != call.k.sizes[2])) return false;
  if (call.mask.size() == 1) {
    const TensorDesc& states = call.mask[0];
    return states.dim == 4 && states.dtype == DType::kUInt8 && states.device == call.q.device &&
           has_batch_and_heads_of(states, call.q) && (states.sizes[3] <= 1 || states.strides[3] == 1);
  }
  if (kv_block % keys_of(static_cast<int>(size_of(call.q.dtype))) != 0 && kv_block < call.k.sizes[2]) return false;
  if (!takes_lists(call, call.mask[0], call.mask[1])) return false;
  return call.mask.size() == 2 || (call.mask.size() == 4 && takes_lists(call, call.mask[2], call.mask[3]));
}

void copy_strides(const TensorDesc& tensor, long long (&strides)[3]) {
  for (int i = 0; i < 3; ++i) strides[i] = tensor.sizes[i] == 1 ? 0 : tensor.strides[i];
}

BlockList block_list(const TensorDesc& counts, const TensorDesc& indices) {
  BlockList list = {};
  list.counts = static_cast<const int*>(counts.data);
  list.indices = static_cast<const int*>(indices.data);
  copy_strides(counts, list.count_strides);
  copy_strides(indices, list.index_strides);
  list.columns = static_cast<int>(indices.sizes[3]);
  return list;
}

}  // namespace

bool kernel_takes(const DecodingCall& call) {
  const TensorDesc &q = call.q, &k = call.k, &v = call.v;
  for (const TensorDesc* tensor : {&q, &k, &v}) {
    if (tensor->dim != 4 || tensor->dtype != q.dtype || tensor->device != q.device || tensor->numel() == 0 ||
        (tensor->sizes[3] > 1 && tensor->strides[3] != 1)) {
      return false;
    }
  }
  if (!is_16bit(q.dtype) && q.dtype != DType::kFloat32) return false;
  if (q.device.type != DeviceType::kCUDA || k.sizes[3] != q.sizes[3]) return false;
  for (int i = 0; i < 3; ++i) {
    if (k.sizes[i] != v.sizes[i]) return false;
  }
  if (k.sizes[0] != 1 && k.sizes[0] != q.sizes[0]) return false;
  if (q.sizes[1] % k.sizes[1] != 0 || (q.sizes[1] != k.sizes[1] && !call.enable_gqa)) return false;
  if (call.captured.size() > kMaxCaptured) return false;
  for (const TensorDesc& tensor : call.captured) {
    if (tensor.dim > CapturedTensor::kMaxDims || tensor.device != q.device) return false;
  }
  return takes_mask(call);
}

bool rows_are_aligned(const DecodingCall& call) {
  return rows_are_aligned(call.q) && rows_are_aligned(call.k) && rows_are_aligned(call.v);
}

DecodingShape shape_of(const DecodingCall& call) {
  DecodingShape shape;
  shape.batch = call.q.sizes[0];
  shape.heads_kv = call.k.sizes[1];
  shape.rows = call.q.sizes[1] / call.k.sizes[1] * call.q.sizes[2];
  shape.seqlen_k = call.k.sizes[2];
  shape.head_dim = call.q.sizes[3];
  shape.head_dim_v = call.v.sizes[3];
  shape.element_bytes = size_of(call.q.dtype);
  return shape;
}

DecodingParams params_of(const DecodingCall& call, DecodingTile tile) {
  DecodingParams p = {};
  p.q = call.q.data;
  p.k = call.k.data;
  p.v = call.v.data;
  copy_strides(call.q, p.q_strides);
  copy_strides(call.k, p.k_strides);
  copy_strides(call.v, p.v_strides);
  p.batch = static_cast<int>(call.q.sizes[0]);
  p.heads = static_cast<int>(call.q.sizes[1]);
  p.heads_kv = static_cast<int>(call.k.sizes[1]);
  p.group = p.heads / p.heads_kv;
  p.seqlen_q = static_cast<int>(call.q.sizes[2]);
  p.seqlen_k = static_cast<int>(call.k.sizes[2]);
  p.head_dim = static_cast<int>(call.q.sizes[3]);
  p.head_dim_v = static_cast<int>(call.v.sizes[3]);
  p.row_tiles = (p.group * p.seqlen_q + tile.rows - 1) / tile.rows;
  if (call.mask.size() == 1) {
    p.states = static_cast<const unsigned char*>(call.mask[0].data);
    copy_strides(call.mask[0], p.state_strides);
  }
  if (call.mask.size() >= 2) p.partial = block_list(call.mask[0], call.mask[1]);
  if (call.mask.size() == 4) p.full = block_list(call.mask[2], call.mask[3]);
  p.q_block = static_cast<int>(std::min(std::max<int64_t>(call.mask_shape[0], 1), kLargestBlock));
  p.kv_block = static_cast<int>(std::min(std::max<int64_t>(call.mask_shape[1], 1), kLargestBlock));
  for (size_t i = 0; i < call.captured.size(); ++i) {
    p.captured[i] = describe_captured(call.captured[i]);
  }
  return p;
}

}  // namespace flashbwd

#include "tensor_checks.h"

#include "../common/check.h"

namespace flashbwd {

// check() evaluates the parts of its message even if the condition holds. Where a part is an expensive string, the code
// below tests the condition itself and calls refuse(), so that valid calls do not pay for the message.

void check_shape(const char* name, const TensorDesc& tensor, std::initializer_list<int64_t> expected) {
  TensorDesc like;
  for (const int64_t size : expected) like.sizes[like.dim++] = size;
  bool same = tensor.dim == like.dim;
  for (int i = 0; same && i < like.dim; ++i) same = tensor.sizes[i] == like.sizes[i];
  if (!same) refuse(name, " has shape ", shape_of(tensor), ", expected ", shape_of(like));
}

void check_dtype(const char* name, const TensorDesc& tensor, DType expected, const char* why) {
  check(tensor.dtype == expected, name, " is ", name_of(tensor.dtype), ", expected ", name_of(expected), why);
}

void check_device(const char* name, const TensorDesc& tensor, Device expected) {
  if (tensor.device == expected) return;
  refuse(name, " is on ", name_of(tensor.device), ", expected q's ", name_of(expected));
}

void check_last_contiguous(const char* name, const TensorDesc& tensor) {
  const int last = tensor.dim - 1;
  check(tensor.sizes[last] <= 1 || tensor.strides[last] == 1 || tensor.numel() == 0, name,
        "'s last dimension has stride ", tensor.strides[last], ", expected 1 (contiguous)");
}

bool is_contiguous(const TensorDesc& tensor) {
  int64_t stride = 1;
  for (int i = tensor.dim - 1; i >= 0; --i) {
    if (tensor.sizes[i] > 1 && tensor.strides[i] != stride) return false;
    stride *= tensor.sizes[i];
  }
  return true;
}

void check_not_expanded(const char* name, const TensorDesc& tensor) {
  for (int i = 0; i < tensor.dim; ++i) {
    check(tensor.sizes[i] <= 1 || tensor.strides[i] != 0, name, " has stride 0 in dimension ", i, " of size ",
          tensor.sizes[i], ", expected memory of its own for every element");
  }
}

std::vector<int64_t> read_cu_seqlens(const char* name, const TensorDesc& tensor, int64_t total, int64_t longest) {
  std::vector<int64_t> lengths;
  if (tensor.device.type != DeviceType::kCPU) return lengths;
  const auto* values = static_cast<const int32_t*>(tensor.data);
  check(values[0] == 0, name, " starts at ", values[0], ", expected 0");
  for (int64_t i = 0; i + 1 < tensor.sizes[0]; ++i) {
    const int64_t length = int64_t{values[i + 1]} - values[i];
    check(length >= 0, name, " decreases from ", values[i], " to ", values[i + 1], " at index ", i + 1,
          ", expected values that do not decrease");
    check(length <= longest, name, " holds a sequence of length ", length, ", expected at most max_seqlen, ", longest);
    lengths.push_back(length);
  }
  const int64_t end = values[tensor.sizes[0] - 1];
  check(end <= total, name, " ends at ", end, ", expected at most the number of rows, ", total);
  return lengths;
}

bool aligned_16(const TensorDesc& t) {
  const int64_t bytes = size_of(t.dtype);
  if (reinterpret_cast<uintptr_t>(t.data) % 16 != 0) return false;
  for (int i = 0; i + 1 < t.dim; ++i) {
    if (t.sizes[i] > 1 && t.strides[i] * bytes % 16 != 0) return false;
  }
  return true;
}

}  // namespace flashbwd

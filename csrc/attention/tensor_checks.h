// Checks of one tensor argument. Each throws std::invalid_argument with a message that names the argument, what came
// and what was expected.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "../common/types.h"

namespace flashbwd {

void check_shape(const char* name, const TensorDesc& tensor, std::initializer_list<int64_t> expected);
void check_dtype(const char* name, const TensorDesc& tensor, DType expected, const char* why);
void check_device(const char* name, const TensorDesc& tensor, Device expected);
void check_last_contiguous(const char* name, const TensorDesc& tensor);
void check_not_expanded(const char* name, const TensorDesc& tensor);

// Checks the values of cu_seqlens, which end at `total` rows at most, and returns the length of each sequence. Empty if
// the tensor is not on the CPU.
std::vector<int64_t> read_cu_seqlens(const char* name, const TensorDesc& tensor, int64_t total, int64_t longest);

// True if the elements lie without gaps, in order.
bool is_contiguous(const TensorDesc& tensor);

// True if the pointer and every stride but the last are multiples of 16 bytes.
bool aligned_16(const TensorDesc& tensor);

}  // namespace flashbwd

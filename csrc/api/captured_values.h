// What a compiled score_mod reads and adds to, from the arguments of the operator.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <vector>

#include "../attention/families.h"
#include "../common/check.h"
#include "../mods/describe_captured.h"
#include "attention_call.h"

namespace flashbwd {

// Fills the slots of the tensors that a score_mod captures, and of those of its gradients.
inline void set_captured(const std::vector<Tensor>& captured, const std::vector<Tensor>& gradients,
                         const std::vector<int64_t>& slots, Device device, CompiledScoreMod* score_mod) {
  check(captured.size() <= kMaxCaptured, "captured has ", captured.size(), " tensors, expected at most ", kMaxCaptured);
  check(gradients.size() == slots.size(), "gradient_slots has ", slots.size(),
        " elements, expected one for each of the ", gradients.size(), " gradients");
  for (size_t i = 0; i < captured.size(); ++i) {
    const TensorDesc tensor = describe(captured[i]);
    check(tensor.dim <= CapturedTensor::kMaxDims && tensor.device == device, "captured tensor ", i, " has ", tensor.dim,
          " dimensions on ", name_of(tensor.device), ", expected at most ", CapturedTensor::kMaxDims, " on ",
          name_of(device));
    score_mod->captured[i] = describe_captured(tensor);
  }
  for (size_t i = 0; i < gradients.size(); ++i) {
    check(slots[i] >= 0 && slots[i] < static_cast<int64_t>(captured.size()), "gradient_slots holds ", slots[i],
          ", expected the number of one of the ", captured.size(), " captured tensors");
    const TensorDesc gradient = describe(gradients[i]);
    check(is_contiguous(gradient) && gradient.device == device && gradient.numel() == captured[slots[i]].numel(),
          "gradient ", i, " has shape ", shape_of(gradient), " on ", name_of(gradient.device),
          ", expected a contiguous tensor with the elements of its captured tensor on ", name_of(device));
    score_mod->gradients[slots[i]] = gradient.data;
  }
}

// Fills the slots of the numbers that the source of a score_mod does not contain.
inline void set_numbers(const std::vector<int64_t>& numbers, CompiledScoreMod* score_mod) {
  check(numbers.size() <= kMaxNumbers, "numbers has ", numbers.size(), " elements, expected at most ", kMaxNumbers);
  for (size_t i = 0; i < numbers.size(); ++i) {
    check(numbers[i] == static_cast<int32_t>(numbers[i]), "numbers holds ", numbers[i], ", expected 32-bit integers");
    score_mod->numbers[i] = static_cast<int32_t>(numbers[i]);
  }
}

}  // namespace flashbwd

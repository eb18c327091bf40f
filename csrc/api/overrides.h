// What the overrides of PyTorch's backward operators share: an override tries a kernel of this library, and hands the
// call on, as it came, to what the dispatcher held before. What became of each call is counted.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tensors.h"

namespace flashbwd {

using Results = std::vector<Tensor>;  // of an operator, undefined tensors where it gives none

// What became of a call: results or a reason.
struct Attempt {
  Results results;
  std::string refusal;
};

inline Attempt refused(std::string reason) { return {{}, std::move(reason)}; }

// One operator of PyTorch's that can be overridden.
struct Override {
  const char* name;      // without aten::
  const char* fallback;  // operator of this library with the same arguments that runs the kernel from before; in Python
  void (*kernel)(StableIValue*, uint64_t, uint64_t);
  std::atomic<bool> over_pytorchs{false};  // the kernel from before is PyTorch's own for CUDA
  TorchLibraryHandle library = nullptr;    // while it is registered
  std::atomic<int64_t> hits{0};
  std::mutex mutex{};                          // of the reasons
  std::map<std::string, int64_t> fallbacks{};  // calls handed on, by the reason
};

extern Override cudnn_attention_override;
extern Override flash_attention_override;
extern Override efficient_attention_override;
extern Override layer_norm_override;
extern Override rms_norm_override;

// The backend that `flashbwd.use_backend` forces, or "auto".
std::string forced_backend();

// What torch.use_deterministic_algorithms() asked for.
enum class Determinism { kNotAsked, kWarnOnly, kAsked };
Determinism deterministic_algorithms();

void count_fallback(Override& override, const std::string& reason);

inline bool is_given(const Tensor& tensor) { return tensor.defined(); }
inline bool is_given(const std::optional<Tensor>& tensor) { return tensor.has_value() && tensor->defined(); }

// A tensor that autograd may leave undefined.
template <typename MaybeTensor>
std::optional<Tensor> given(const MaybeTensor& tensor) {
  return is_given(tensor) ? std::optional<Tensor>(tensor) : std::nullopt;
}

// An output_mask, which has no more than 4 elements.
inline StableIValue boxed(const std::vector<bool>& values) {
  std::array<bool, 4> copy{};
  std::copy(values.begin(), values.end(), copy.begin());
  return torch::stable::detail::from(torch::headeronly::HeaderOnlyArrayRef<bool>(copy.data(), values.size()));
}

inline constexpr char kNoGradient[] = "the output has no gradient";

// Runs an override on an operator's stack, which `attempt` gets as C++ values. `pytorchs` is PyTorch's own kernel as a
// function, which saves the way through Python; it gives nothing where it failed, and Python then meets the error.
template <typename... Arguments>
void run_override(Override& override, Attempt (*attempt)(const Arguments&...), StableIValue* stack,
                  Results (*pytorchs)(const Arguments&...) = nullptr) {
  const std::tuple<Arguments...> arguments = torch::stable::detail::unbox_to_tuple<Arguments...>(stack);
  Attempt found = std::apply(attempt, arguments);
  if (found.refusal.empty()) {
    override.hits.fetch_add(1, std::memory_order_relaxed);
  } else {
    count_fallback(override, found.refusal);
    if (pytorchs != nullptr && override.over_pytorchs) found.results = std::apply(pytorchs, arguments);
  }
  for (size_t i = 0; i < found.results.size(); ++i) stack[i] = boxed(found.results[i]);
  if (!found.results.empty()) return;
  const auto hand_on = [](const Arguments&... values) {
    return std::array<StableIValue, sizeof...(Arguments)>{boxed(values)...};
  };
  std::array<StableIValue, sizeof...(Arguments)> handed_on = std::apply(hand_on, arguments);
  call_operator(override.fallback, handed_on.data());
  for (size_t i = 0; i < sizeof...(Arguments); ++i) stack[i] = handed_on[i];  // results lie first
}

}  // namespace flashbwd

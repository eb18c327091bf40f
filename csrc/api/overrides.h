// Shared code of the overrides of PyTorch's backward operators. An override runs a kernel of this library. If no kernel
// supports the call, it forwards the call unchanged to the implementation that was registered before. It counts both.
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

using Results = std::vector<Tensor>;  // an operator's outputs; an output that does not exist is an undefined tensor

// The outcome of a call: results, or the reason why it was refused.
struct Attempt {
  Results results;
  std::string refusal;
};

inline Attempt refused(std::string reason) { return {{}, std::move(reason)}; }

// An operator of PyTorch that can be overridden.
struct Override {
  const char* name;      // without aten::
  const char* fallback;  // operator in Python, with the same arguments, that calls the previous implementation
  void (*kernel)(StableIValue*, uint64_t, uint64_t);
  std::atomic<bool> over_pytorchs{false};  // the previous implementation is PyTorch's own CUDA kernel
  TorchLibraryHandle library = nullptr;    // not null while the override is registered
  std::atomic<int64_t> hits{0};
  std::mutex mutex{};                          // guards `fallbacks`
  std::map<std::string, int64_t> fallbacks{};  // number of forwarded calls per reason
};

extern Override cudnn_attention_override;
extern Override flash_attention_override;
extern Override efficient_attention_override;
extern Override layer_norm_override;
extern Override rms_norm_override;

// The backend that `flashbwd.use_backend` forces, or "auto".
std::string forced_backend();

// The state of torch.use_deterministic_algorithms().
enum class Determinism { kNotAsked, kWarnOnly, kAsked };
Determinism deterministic_algorithms();

void count_fallback(Override& override, const std::string& reason);

inline bool is_given(const Tensor& tensor) { return tensor.defined(); }
inline bool is_given(const std::optional<Tensor>& tensor) { return tensor.has_value() && tensor->defined(); }

// Converts a tensor that autograd may leave undefined to an optional.
template <typename MaybeTensor>
std::optional<Tensor> given(const MaybeTensor& tensor) {
  return is_given(tensor) ? std::optional<Tensor>(tensor) : std::nullopt;
}

// Boxes an output_mask, which has at most 4 elements.
inline StableIValue boxed(const std::vector<bool>& values) {
  std::array<bool, 4> copy{};
  std::copy(values.begin(), values.end(), copy.begin());
  return torch::stable::detail::from(torch::headeronly::HeaderOnlyArrayRef<bool>(copy.data(), values.size()));
}

inline constexpr char kNoGradient[] = "the output has no gradient";

// Runs an override on an operator's stack; `attempt` receives the unboxed arguments. `pytorchs` calls PyTorch's own
// kernel directly, which avoids the call through Python. If it returns no results, the fallback in Python runs and
// raises PyTorch's error.
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
  const auto box_all = [](const Arguments&... values) {
    return std::array<StableIValue, sizeof...(Arguments)>{boxed(values)...};
  };
  std::array<StableIValue, sizeof...(Arguments)> forwarded = std::apply(box_all, arguments);
  call_operator(override.fallback, forwarded.data());
  for (size_t i = 0; i < sizeof...(Arguments); ++i) stack[i] = forwarded[i];  // the results replace the first arguments
}

}  // namespace flashbwd

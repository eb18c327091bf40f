// The operator of a decoding loop. All that its calls have in common, the lists of the mask too, was registered when
// the first of them was launched; each passes the tensors that are its own.
#include "decoding_step.h"

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "../common/check.h"
#include "decoding.h"

namespace flashbwd {
namespace {

struct Kind {  // of a captured tensor: modifications are made for those
  int32_t dtype;
  int64_t dim;
};

struct Step {
  DecodingSettings settings;
  std::optional<double> scale;
  std::vector<Tensor> mask;        // empty: each call passes its own, for lengths that it has compared
  std::array<int64_t, 2> lengths;  // that the mask was made for
  std::vector<Kind> captured;
};

struct Steps {
  std::mutex mutex;
  std::unordered_map<int64_t, std::shared_ptr<const Step>> by_number;
  int64_t next = 0;
};

Steps& steps() {
  static Steps& all = *new Steps;  // never freed: PyTorch may be gone before the library's own statics are
  return all;
}

void remember(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader reader(stack);
  Step step;
  const auto settings = reader.read<int64_t>();
  step.scale = reader.read<std::optional<double>>();
  step.mask = reader.read<std::vector<Tensor>>();
  const auto lengths = reader.read<std::vector<int64_t>>();
  const auto captured = reader.read<std::vector<Tensor>>();
  step.settings = decoding_settings(settings);
  check(lengths.empty() || lengths.size() == 2, "lengths has ", lengths.size(),
        " elements, expected query's and key's, or none");
  step.lengths = lengths.empty() ? std::array<int64_t, 2>{} : std::array<int64_t, 2>{lengths[0], lengths[1]};
  for (const Tensor& tensor : captured) step.captured.push_back({dtype_number(tensor.get()), tensor.dim()});
  const std::lock_guard<std::mutex> lock(steps().mutex);
  const int64_t number = steps().next++;
  steps().by_number[number] = std::make_shared<const Step>(std::move(step));
  stack[0] = boxed(number);
}

void forget(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader reader(stack);
  const auto number = reader.read<int64_t>();
  std::shared_ptr<const Step> forgotten;  // freed without the lock
  const std::lock_guard<std::mutex> lock(steps().mutex);
  std::swap(forgotten, steps().by_number[number]);
  steps().by_number.erase(number);
}

std::shared_ptr<const Step> step_of(int64_t number) {
  const std::lock_guard<std::mutex> lock(steps().mutex);
  const auto found = steps().by_number.find(number);
  return found == steps().by_number.end() ? nullptr : found->second;
}

// What the settings ask for; nothing for a call that cannot be launched as it is. `lengths`: of a passed mask; null
// where Python has compared them.
std::vector<OwnedTensor> run_step(const AtenTensorHandle* inputs, const Step& step, const AtenTensorHandle* passed,
                                  size_t passed_count, const int64_t* lengths) {
  DecodingCall call = decoding_call(inputs[0], inputs[1], inputs[2], step.settings);
  const size_t passed_mask = step.mask.empty() ? step.settings.mask_tensors : 0;
  if (passed_count != passed_mask + step.captured.size()) return {};
  call.mask.reserve(step.settings.mask_tensors);
  for (const Tensor& tensor : step.mask) describe(tensor.get(), call.mask.emplace_back());
  for (size_t i = 0; i < passed_mask; ++i) describe(passed[i], call.mask.emplace_back());
  const std::array<int64_t, 2> compared = {call.q.sizes[2], call.k.sizes[2]};
  if (passed_mask == 0) lengths = step.lengths.data();
  if (lengths == nullptr) lengths = compared.data();
  std::copy_n(lengths, 2, call.mask_shape.begin() + 2);
  call.captured.reserve(step.captured.size());
  for (size_t i = 0; i < step.captured.size(); ++i) {
    const AtenTensorHandle tensor = passed[passed_mask + i];
    TensorDesc& desc = call.captured.emplace_back();
    describe(tensor, desc);
    if (desc.dim != step.captured[i].dim || dtype_number(tensor) != step.captured[i].dtype) return {};
  }
  return decoding_results(inputs[0], call, step.settings, step.scale);
}

// Each tensor is an argument of its own, which is read sooner than a list.
template <int kPassed>
std::vector<OwnedTensor> results_of(StableIValue* stack) {
  ArgumentReader reader(stack);
  std::array<OwnedTensor, 3 + kPassed> owned;
  for (int i = 0; i < 3; ++i) owned[i] = reader.owned_tensor();
  const auto step = step_of(reader.read<int64_t>());
  for (int i = 3; i < 3 + kPassed; ++i) owned[i] = reader.owned_tensor();
  if (step == nullptr) return {};
  std::array<AtenTensorHandle, 3 + kPassed> tensors;
  for (size_t i = 0; i < tensors.size(); ++i) tensors[i] = owned[i].get();
  return run_step(tensors.data(), *step, tensors.data() + 3, kPassed, nullptr);
}

// Nothing is answered with tensors that are none: Python has None for each.
template <int kPassed, int kResults>
void decoding_step(StableIValue* stack, uint64_t, uint64_t) {
  std::vector<OwnedTensor> results = results_of<kPassed>(stack);
  results.resize(kResults);
  for (int i = 0; i < kResults; ++i) stack[i] = results[i] != nullptr ? boxed(std::move(results[i])) : boxed(Tensor());
}

std::string step_name(int passed, int results) {
  return "decoding_step.passed_" + std::to_string(passed) + "_results_" + std::to_string(results);
}

std::string step_schema(int passed, int results) {
  std::string schema = step_name(passed, results) + "(Tensor q, Tensor k, Tensor v, int step";
  for (int i = 0; i < passed; ++i) schema += std::string(", Tensor passed_") + std::to_string(i);
  schema += results > 1 ? ") -> (Tensor" : ") -> Tensor";
  for (int i = 1; i < results; ++i) schema += i + 1 < results ? ", Tensor" : ", Tensor)";
  return schema;
}

template <int... kIndices>
void implement_steps(torch::stable::detail::StableLibrary& m, std::integer_sequence<int, kIndices...>) {
  (m.impl(step_name(kIndices / kMostResults, kIndices % kMostResults + 1).c_str(),
          decoding_step<kIndices / kMostResults, kIndices % kMostResults + 1>),
   ...);
}

}  // namespace
}  // namespace flashbwd

int flashbwd_decoding_step(int64_t number, const int64_t* lengths, const AtenTensorHandle* tensors, int passed,
                           AtenTensorHandle* results) {
  const auto step = flashbwd::step_of(number);
  if (step == nullptr) return 0;
  auto found = flashbwd::run_step(tensors, *step, tensors + 3, passed, lengths);
  const size_t count = std::min<size_t>(found.size(), flashbwd::kMostResults);
  for (size_t i = 0; i < count; ++i) results[i] = found[i].release();
  return static_cast<int>(count);
}

STABLE_TORCH_LIBRARY_FRAGMENT(flashbwd, m) {
  m.def("decoding_remember(int settings, float? scale, Tensor[] mask, int[] lengths, Tensor[] captured) -> int");
  m.def("decoding_forget(int step) -> ()");
  for (int passed = 0; passed <= flashbwd::kMostPassed; ++passed) {
    for (int results = 1; results <= flashbwd::kMostResults; ++results)
      m.def(flashbwd::step_schema(passed, results).c_str());
  }
}

STABLE_TORCH_LIBRARY_IMPL(flashbwd, CompositeExplicitAutograd, m) {
  constexpr int kForms = (flashbwd::kMostPassed + 1) * flashbwd::kMostResults;
  flashbwd::implement_steps(m, std::make_integer_sequence<int, kForms>());  // nothing but for CUDA tensors
  m.impl("decoding_remember", flashbwd::remember);
  m.impl("decoding_forget", flashbwd::forget);
}

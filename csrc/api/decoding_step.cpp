// The operator of a decoding loop. All that its calls have in common, the lists of the mask too, was registered when
// the first of them was launched; each passes the tensors that are its own.
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

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
  std::vector<Tensor> mask;
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
  step.lengths = lengths.size() == 2 ? std::array<int64_t, 2>{lengths[0], lengths[1]} : std::array<int64_t, 2>{};
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

// What the settings ask for; nothing for a call that cannot be launched as it is.
std::vector<OwnedTensor> run_step(AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v, const Step& step,
                                  const std::vector<OwnedTensor>& captured) {
  DecodingCall call = decoding_call(q, k, v, step.settings);
  call.mask.reserve(step.mask.size());
  for (const Tensor& tensor : step.mask) describe(tensor.get(), call.mask.emplace_back());
  std::copy(step.lengths.begin(), step.lengths.end(), call.mask_shape.begin() + 2);
  if (captured.size() != step.captured.size()) return {};
  call.captured.reserve(captured.size());
  for (size_t i = 0; i < captured.size(); ++i) {
    TensorDesc& desc = call.captured.emplace_back();
    describe(captured[i].get(), desc);
    if (desc.dim != step.captured[i].dim || dtype_number(captured[i].get()) != step.captured[i].dtype) return {};
  }
  return decoding_results(q, call, step.settings, step.scale);
}

// Each captured tensor is an argument of its own, which is read sooner than a list.
template <int kCaptured>
std::vector<OwnedTensor> results_of(StableIValue* stack) {
  ArgumentReader reader(stack);
  const OwnedTensor q = reader.owned_tensor(), k = reader.owned_tensor(), v = reader.owned_tensor();
  const auto step = step_of(reader.read<int64_t>());
  std::vector<OwnedTensor> captured;
  captured.reserve(kCaptured);
  for (int i = 0; i < kCaptured; ++i) captured.push_back(reader.owned_tensor());
  if (step == nullptr) return {};
  return run_step(q.get(), k.get(), v.get(), *step, captured);
}

// The output alone. Nothing is answered with a tensor that is none: Python has None for it.
template <int kCaptured>
void decoding_step(StableIValue* stack, uint64_t, uint64_t) {
  std::vector<OwnedTensor> results = results_of<kCaptured>(stack);
  stack[0] = results.empty() ? boxed(Tensor()) : boxed(std::move(results[0]));
}

// The output and the statistics.
template <int kCaptured>
void decoding_step_all(StableIValue* stack, uint64_t, uint64_t) {
  stack[0] = boxed(results_of<kCaptured>(stack));
}

}  // namespace
}  // namespace flashbwd

STABLE_TORCH_LIBRARY_FRAGMENT(flashbwd, m) {
  m.def("decoding_remember(int settings, float? scale, Tensor[] mask, int[] lengths, Tensor[] captured) -> int");
  m.def("decoding_forget(int step) -> ()");
  m.def("decoding_step(Tensor q, Tensor k, Tensor v, int step) -> Tensor");
  m.def("decoding_step.captured_1(Tensor q, Tensor k, Tensor v, int step, Tensor a) -> Tensor");
  m.def("decoding_step.captured_2(Tensor q, Tensor k, Tensor v, int step, Tensor a, Tensor b) -> Tensor");
  m.def("decoding_step.captured_3(Tensor q, Tensor k, Tensor v, int step, Tensor a, Tensor b, Tensor c) -> Tensor");
  m.def(
      "decoding_step.captured_4(Tensor q, Tensor k, Tensor v, int step, Tensor a, Tensor b, Tensor c, Tensor d) "
      "-> Tensor");
  m.def("decoding_step.all(Tensor q, Tensor k, Tensor v, int step) -> Tensor[]");
  m.def("decoding_step.all_1(Tensor q, Tensor k, Tensor v, int step, Tensor a) -> Tensor[]");
  m.def("decoding_step.all_2(Tensor q, Tensor k, Tensor v, int step, Tensor a, Tensor b) -> Tensor[]");
  m.def("decoding_step.all_3(Tensor q, Tensor k, Tensor v, int step, Tensor a, Tensor b, Tensor c) -> Tensor[]");
  m.def(
      "decoding_step.all_4(Tensor q, Tensor k, Tensor v, int step, Tensor a, Tensor b, Tensor c, Tensor d) "
      "-> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(flashbwd, CUDA, m) {
  m.impl("decoding_step", flashbwd::decoding_step<0>);
  m.impl("decoding_step.captured_1", flashbwd::decoding_step<1>);
  m.impl("decoding_step.captured_2", flashbwd::decoding_step<2>);
  m.impl("decoding_step.captured_3", flashbwd::decoding_step<3>);
  m.impl("decoding_step.captured_4", flashbwd::decoding_step<4>);
  m.impl("decoding_step.all", flashbwd::decoding_step_all<0>);
  m.impl("decoding_step.all_1", flashbwd::decoding_step_all<1>);
  m.impl("decoding_step.all_2", flashbwd::decoding_step_all<2>);
  m.impl("decoding_step.all_3", flashbwd::decoding_step_all<3>);
  m.impl("decoding_step.all_4", flashbwd::decoding_step_all<4>);
}

STABLE_TORCH_LIBRARY_IMPL(flashbwd, CompositeExplicitAutograd, m) {
  m.impl("decoding_remember", flashbwd::remember);
  m.impl("decoding_forget", flashbwd::forget);
}

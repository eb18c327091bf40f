// Registers and unregisters overrides of PyTorch's operators at run time, and reports their statistics.
#include "overrides.h"

#include <dlfcn.h>

#include <mutex>

#include "../common/check.h"

namespace flashbwd {
namespace {

std::mutex mutex;  // guards `backend` and the `library` handles of the overrides
std::string backend = "auto";

Override& find(const std::string& name) {
  for (Override* override : {&cudnn_attention_override, &flash_attention_override, &efficient_attention_override,
                             &layer_norm_override, &rms_norm_override}) {
    if (name == override->name) return *override;
  }
  refuse("there is no override of ", name);
}

// Registers an override for a dispatch key ("CUDA"). `over_pytorchs` is true if it replaces PyTorch's own
// implementation.
void register_override(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader reader(stack);
  const std::string name = reader.read<std::string>();
  const std::string key = reader.read<std::string>();
  const bool over_pytorchs = reader.read<bool>();
  const std::lock_guard<std::mutex> lock(mutex);
  Override& override = find(name);
  check(override.library == nullptr, name, " is overridden already");
  override.over_pytorchs = over_pytorchs;
  TORCH_ERROR_CODE_CHECK(aoti_torch_library_init_impl("aten", key.c_str(), __FILE__, __LINE__, &override.library));
  TORCH_ERROR_CODE_CHECK(torch_library_impl(override.library, override.name, override.kernel, TORCH_ABI_VERSION));
}

// Removes an override, which restores the previous implementation.
void unregister_override(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader reader(stack);
  const std::string name = reader.read<std::string>();
  const std::lock_guard<std::mutex> lock(mutex);
  Override& override = find(name);
  TORCH_ERROR_CODE_CHECK(aoti_torch_delete_library_object(std::exchange(override.library, nullptr)));
}

// Returns the number of calls that this library ran, then one line "CALLS REASON" per reason for forwarding calls.
void override_stats(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader reader(stack);
  const std::string name = reader.read<std::string>();
  const bool reset = reader.read<bool>();
  Override& override = find(name);
  const std::lock_guard<std::mutex> lock(override.mutex);
  std::string text = std::to_string(reset ? override.hits.exchange(0) : override.hits.load());
  for (const auto& [reason, calls] : override.fallbacks) text += "\n" + std::to_string(calls) + " " + reason;
  if (reset) override.fallbacks.clear();
  stack[0] = boxed(text);
}

void force_backend(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader reader(stack);
  std::string name = reader.read<std::string>();
  const std::lock_guard<std::mutex> lock(mutex);
  backend = std::move(name);
}

void determinism(StableIValue* stack, uint64_t, uint64_t) {
  constexpr const char* kNames[] = {"not asked", "warn only", "asked"};
  stack[0] = boxed(std::string(kNames[static_cast<int>(deterministic_algorithms())]));
}

}  // namespace

void count_fallback(Override& override, const std::string& reason) {
  const std::lock_guard<std::mutex> lock(override.mutex);
  ++override.fallbacks[reason];
}

std::string forced_backend() {
  const std::lock_guard<std::mutex> lock(mutex);
  return backend;
}

// Reads two flags of at::globalContext(), which the stable ABI does not expose, through symbols looked up once. If
// PyTorch lacks a symbol, every call is deterministic.
Determinism deterministic_algorithms() {
  using GlobalContext = const void* (*)();
  using Flag = bool (*)(const void*);
  static void* const torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  const auto find = [](const char* name) { return torch ? dlsym(torch, name) : nullptr; };
  static const auto context = reinterpret_cast<GlobalContext>(find("_ZN2at13globalContextEv"));
  static const auto asked = reinterpret_cast<Flag>(find("_ZNK2at7Context23deterministicAlgorithmsEv"));
  static const auto warn_only = reinterpret_cast<Flag>(find("_ZNK2at7Context31deterministicAlgorithmsWarnOnlyEv"));
  if (context == nullptr || asked == nullptr || warn_only == nullptr) return Determinism::kAsked;
  if (!asked(context())) return Determinism::kNotAsked;
  return warn_only(context()) ? Determinism::kWarnOnly : Determinism::kAsked;
}

}  // namespace flashbwd

STABLE_TORCH_LIBRARY_FRAGMENT(flashbwd, m) {
  m.def("register_override(str name, str key, bool over_pytorchs) -> ()");
  m.def("unregister_override(str name) -> ()");
  m.def("override_stats(str name, bool reset) -> str");
  m.def("force_backend(str name) -> ()");
  m.def("determinism() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(flashbwd, CompositeExplicitAutograd, m) {
  m.impl("register_override", flashbwd::register_override);
  m.impl("unregister_override", flashbwd::unregister_override);
  m.impl("override_stats", flashbwd::override_stats);
  m.impl("force_backend", flashbwd::force_backend);
  m.impl("determinism", flashbwd::determinism);
}

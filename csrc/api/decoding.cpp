// The operators of flex decoding: what Python has checked, as parameters of a launch.
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <mutex>
#include <utility>
#include <vector>

#include "../decoding/call.h"
#include "../decoding/launch.h"
#include "../decoding/source.h"
#include "cuda_backend.h"
#include "tensors.h"

namespace flashbwd {
namespace {

// The modifications of a call: numbers for the kernels that every build holds, or kernels compiled for them, one a
// tile, dtype and device. Python makes one, fills it, and passes its number; number 0 is no modification.
struct Modification {
  struct Kernel {
    DecodingTile tile;
    bool bfloat16;
    int64_t device;
    void* kernel;
  };
  std::vector<Kernel> kernels;
  OrdinaryMod ordinary = {};
  bool prebuilt = false;
};

std::mutex modifications_mutex;
std::deque<Modification> modifications(1);

struct ChosenKernel {
  bool found = false;  // else Python has yet to compile it
  void* compiled = nullptr;
  OrdinaryMod ordinary = {};
};

ChosenKernel find_kernel(int64_t modification, DecodingTile tile, bool bfloat16, int64_t device) {
  if (modification == 0) return {true};
  const std::lock_guard<std::mutex> lock(modifications_mutex);
  const Modification& known = modifications.at(modification);
  if (known.prebuilt) return {true, nullptr, known.ordinary};
  for (const auto& kernel : known.kernels) {
    if (kernel.tile.head_dim == tile.head_dim && kernel.tile.rows == tile.rows && kernel.bfloat16 == bfloat16 &&
        kernel.device == device) {
      return {true, kernel.kernel};
    }
  }
  return {};
}

// (B, H, Sq, head_dim) with q's dtype and order of dimensions in memory, the last innermost.
Tensor empty_output(const Tensor& q, const TensorDesc& desc, int64_t head_dim) {
  std::array<int, 3> order = {0, 1, 2};
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return desc.strides[a] > desc.strides[b]; });
  const std::array<int64_t, 4> sizes = {desc.sizes[0], desc.sizes[1], desc.sizes[2], head_dim};
  std::array<int64_t, 4> strides = {0, 0, 0, 1};
  int64_t stride = head_dim;
  for (int i = 2; i >= 0; --i) {
    strides[order[i]] = stride;
    stride *= sizes[order[i]];
  }
  return empty_strided(q, sizes, strides, desc.dtype);
}

// A decoding loop asks the same question at every step.
int32_t splits_of(int64_t units, int64_t seqlen_k, DecodingTile tile, const DeviceInfo& info) {
  using Question = std::array<int64_t, 6>;
  const Question question = {units, seqlen_k, tile.head_dim, tile.rows, info.sm_count, info.smem_per_block};
  static thread_local Question last = {};
  static thread_local int32_t answer = 1;
  if (question != last) {
    answer = decoding_splits(units, seqlen_k, tile, info.sm_count, info.smem_per_block);
    last = question;
  }
  return answer;
}

struct ForwardOptions {
  int64_t modification;
  std::optional<double> scale;
  int64_t splits;  // 0: as many as serve best
  bool need_lse, need_max_scores;
};

// out, and the statistics that are needed; nothing for a call that no kernel takes as it is.
std::vector<Tensor> forward(const Tensor& q, const DecodingCall& call, const ForwardOptions& options) {
  const CudaBackend* cuda = cuda_backend();
  if (cuda == nullptr || cuda->decoding == nullptr || !kernel_takes(call)) return {};
  const int device = call.q.device.index;
  const DeviceInfo info = cuda->device_info(device);
  if (!info.usable || info.cc_major < 8) return {};
  const DecodingTile tile =
      decoding_tile(call.q.sizes[3], call.v.sizes[3], call.q.sizes[1] / call.k.sizes[1] * call.q.sizes[2]);
  const bool bfloat16 = call.q.dtype == DType::kBFloat16;
  if (tile.head_dim == 0) return {};
  const ChosenKernel kernel = find_kernel(options.modification, tile, bfloat16, device);
  if (!kernel.found) return {};

  DecodingParams p = params_of(call, tile);
  p.ordinary = kernel.ordinary;
  p.scale = static_cast<float>(options.scale.value_or(1 / std::sqrt(static_cast<double>(p.head_dim))));
  const int64_t units = int64_t{p.batch} * p.heads_kv * p.row_tiles;
  p.splits = options.splits > 0 ? static_cast<int>(std::min<int64_t>(options.splits, 65535))
                                : splits_of(units, p.seqlen_k, tile, info);

  const torch::stable::accelerator::DeviceGuard guard(device);
  std::vector<Tensor> results = {empty_output(q, call.q, p.head_dim_v)};
  p.out = results[0].data_ptr();
  for (int i = 0; i < 3; ++i) p.out_strides[i] = results[0].stride(i);
  const int64_t rows = int64_t{p.batch} * p.heads * p.seqlen_q;
  // One piece of scratch: the splits' partial results, and the statistics that nobody asked for.
  const int64_t partial = p.splits > 1 ? p.splits * rows * (p.head_dim_v + 2) : 0;
  const int64_t unasked = (options.need_lse ? 0 : rows) + (options.need_max_scores ? 0 : rows);
  std::optional<Tensor> scratch;
  float* free = nullptr;
  if (partial + unasked > 0) {
    scratch = empty_strided<1>(q, {partial + unasked}, {1}, DType::kFloat32);
    p.partial_out = static_cast<float*>(scratch->data_ptr());
    p.partial_stats = p.partial_out + p.splits * rows * p.head_dim_v;
    free = p.partial_out + partial;
  }
  const auto statistic = [&](bool needed) {
    if (!needed) return std::exchange(free, free + rows);
    results.push_back(empty_strided<3>(q, {p.batch, p.heads, p.seqlen_q},
                                       {int64_t{p.heads} * p.seqlen_q, p.seqlen_q, 1}, DType::kFloat32));
    return static_cast<float*>(results.back().data_ptr());
  };
  p.lse = statistic(options.need_lse);
  p.max_scores = statistic(options.need_max_scores);
  const char* error = cuda->decoding(p, tile, bfloat16, kernel.compiled, info, cuda->current_stream(device));
  STD_TORCH_CHECK(error == nullptr, "flashbwd: ", error);
  return results;
}

void decoding_forward(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader reader(stack);
  const Tensor q = reader.tensor(), k = reader.tensor(), v = reader.tensor();
  const auto mask = reader.read<std::vector<Tensor>>();
  const auto mask_shape = reader.read<std::vector<int64_t>>();
  const auto captured = reader.read<std::vector<Tensor>>();
  ForwardOptions options;
  options.modification = reader.read<int64_t>();
  options.scale = reader.read<std::optional<double>>();
  DecodingCall call;
  call.enable_gqa = reader.read<bool>();
  options.splits = reader.read<int64_t>();
  options.need_lse = reader.read<bool>();
  options.need_max_scores = reader.read<bool>();

  call.q = describe(q);
  call.k = describe(k);
  call.v = describe(v);
  for (const Tensor& tensor : mask) call.mask.push_back(describe(tensor));
  std::copy_n(mask_shape.begin(), std::min<size_t>(mask_shape.size(), 4), call.mask_shape.begin());
  for (const Tensor& tensor : captured) call.captured.push_back(describe(tensor));
  stack[0] = boxed(forward(q, call, options));
}

void decoding_modification(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader reader(stack);
  const auto integers = reader.read<std::vector<int64_t>>();
  const auto floats = reader.read<std::vector<double>>();
  Modification made;
  made.prebuilt = !integers.empty();
  if (made.prebuilt) {
    constexpr size_t kFloats = 4, kIntegers = sizeof(OrdinaryMod) / 4 - kFloats;
    STD_TORCH_CHECK(integers.size() == kIntegers && floats.size() == kFloats,
                    "flashbwd: an ordinary modification has other members");
    std::array<int32_t, kIntegers> whole;
    std::copy(integers.begin(), integers.end(), whole.begin());
    std::array<float, kFloats> real;
    std::copy(floats.begin(), floats.end(), real.begin());
    std::memcpy(&made.ordinary, whole.data(), sizeof(whole));
    std::memcpy(&made.ordinary.softcap, real.data(), sizeof(real));
  }
  const std::lock_guard<std::mutex> lock(modifications_mutex);
  modifications.push_back(std::move(made));
  stack[0] = boxed<int64_t>(static_cast<int64_t>(modifications.size()) - 1);
}

void decoding_add_kernel(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader reader(stack);
  const int64_t modification = reader.read<int64_t>();
  Modification::Kernel kernel;
  kernel.tile.head_dim = static_cast<int32_t>(reader.read<int64_t>());
  kernel.tile.rows = static_cast<int32_t>(reader.read<int64_t>());
  kernel.bfloat16 = reader.read<bool>();
  kernel.device = reader.read<int64_t>();
  kernel.kernel = reinterpret_cast<void*>(reader.read<int64_t>());
  const std::lock_guard<std::mutex> lock(modifications_mutex);
  modifications.at(modification).kernels.push_back(kernel);
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

void decoding_mod_functions_operator(StableIValue* stack, uint64_t, uint64_t) {
  stack[0] = boxed(decoding_mod_functions());
}

}  // namespace
}  // namespace flashbwd

STABLE_TORCH_LIBRARY_FRAGMENT(flashbwd, m) {
  m.def(
      "decoding_forward(Tensor q, Tensor k, Tensor v, Tensor[] mask, int[] mask_shape, Tensor[] captured, "
      "int modification, float? scale, bool enable_gqa, int splits, bool need_lse, bool need_max_scores) -> Tensor[]");
  m.def("decoding_modification(int[] integers, float[] floats) -> int");
  m.def("decoding_add_kernel(int modification, int head_dim, int rows, bool bfloat16, int device, int kernel) -> ()");
  m.def("decoding_refusal(int device) -> str");
  m.def("decoding_tile(int head_dim, int head_dim_v, int rows) -> (int head_dim, int rows)");
  m.def("decoding_shared_bytes(int head_dim, int rows) -> int");
  m.def("decoding_source() -> str");
  m.def("decoding_mod_functions() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(flashbwd, CUDA, m) { m.impl("decoding_forward", flashbwd::decoding_forward); }

STABLE_TORCH_LIBRARY_IMPL(flashbwd, CompositeExplicitAutograd, m) {
  m.impl("decoding_modification", flashbwd::decoding_modification);
  m.impl("decoding_add_kernel", flashbwd::decoding_add_kernel);
  m.impl("decoding_refusal", flashbwd::decoding_refusal);
  m.impl("decoding_tile", flashbwd::decoding_tile_operator);
  m.impl("decoding_shared_bytes", flashbwd::decoding_shared_bytes);
  m.impl("decoding_source", flashbwd::decoding_source_operator);
  m.impl("decoding_mod_functions", flashbwd::decoding_mod_functions_operator);
}

// The operators of flex decoding. They convert tensors that Python has checked to launch parameters, and launch the
// kernels.
#include "decoding.h"

#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "../common/check.h"
#include "../decoding/call.h"
#include "../decoding/launch.h"
#include "cuda_backend.h"
#include "tensors.h"

namespace flashbwd {
namespace {

// The score_mod and mask_mod of a call: either a built-in modification, encoded as numbers for the prebuilt kernels, or
// kernels compiled at run time, one per tile, dtype, alignment and device. Python registers a modification, adds
// kernels to it, and passes its id with a call. Id 0 means no modification.
struct Modification {
  struct Kernel {
    DecodingTile tile;
    DType dtype;
    bool aligned;
    int64_t device;
    void* kernel;
  };
  std::vector<Kernel> kernels;
  BuiltInMod built_in = {};
  bool prebuilt = false;
};

std::mutex modifications_mutex;
std::unordered_map<int64_t, Modification> modifications;
int64_t next_modification = 1;

struct ChosenKernel {
  bool found = false;  // false: Python has not compiled the kernel yet
  void* compiled = nullptr;
  BuiltInMod built_in = {};
};

ChosenKernel find_kernel(int64_t modification, const Modification::Kernel& wanted) {
  if (modification == 0) return {true};
  const std::lock_guard<std::mutex> lock(modifications_mutex);
  const auto found = modifications.find(modification);
  if (found == modifications.end()) return {};
  const Modification& known = found->second;
  if (known.prebuilt) return {true, nullptr, known.built_in};
  for (const auto& kernel : known.kernels) {
    if (kernel.tile == wanted.tile && kernel.dtype == wanted.dtype && kernel.aligned == wanted.aligned &&
        kernel.device == wanted.device) {
      return {true, kernel.kernel};
    }
  }
  return {};
}

}  // namespace

BuiltInMod built_in_modification(int64_t modification) {
  if (modification == 0) return {};
  const std::lock_guard<std::mutex> lock(modifications_mutex);
  return modifications.at(modification).built_in;
}

namespace {

// Sizes (B, H, Sq, head_dim), and dense strides in the same dimension order as q's, with the last dimension innermost.
struct OutputShape {
  std::array<int64_t, 4> sizes, strides;
};

OutputShape output_shape(const TensorDesc& q, int64_t head_dim) {
  OutputShape shape = {{q.sizes[0], q.sizes[1], q.sizes[2], head_dim}, {0, 0, 0, 1}};
  std::array<int, 3> order = {0, 1, 2};
  std::sort(order.begin(), order.end(),
            [&](int a, int b) { return q.strides[a] != q.strides[b] ? q.strides[a] > q.strides[b] : a < b; });
  int64_t stride = head_dim;
  for (int i = 2; i >= 0; --i) {
    shape.strides[order[i]] = stride;
    stride *= shape.sizes[order[i]];
  }
  return shape;
}

// Allocates the output, then `statistics` tensors (B, H, Sq) in float32. All share one storage, because an allocation
// has more host overhead than a tensor.
std::vector<OwnedTensor> output_and_statistics(AtenTensorHandle q, const OutputShape& out, DType dtype,
                                               int statistics) {
  std::vector<OwnedTensor> results;
  results.reserve(4);
  if (statistics == 0) {
    results.push_back(empty_strided(q, out.sizes, out.strides, dtype));
    return results;
  }
  constexpr int64_t kFloat = sizeof(float);
  const int64_t rows = out.sizes[0] * out.sizes[1] * out.sizes[2];
  const int64_t out_floats = (rows * out.sizes[3] * size_of(dtype) + kFloat - 1) / kFloat;
  const OwnedTensor all = empty_strided<1>(q, {out_floats + statistics * rows}, {1}, DType::kFloat32);
  results.push_back(tensor_in(all.get(), 0, out.sizes, out.strides, dtype));
  for (int i = 0; i < statistics; ++i) {
    results.push_back(tensor_in<3>(all.get(), (out_floats + i * rows) * kFloat,
                                   {out.sizes[0], out.sizes[1], out.sizes[2]},
                                   {out.sizes[1] * out.sizes[2], out.sizes[2], 1}, DType::kFloat32));
  }
  return results;
}

void* data_of(const OwnedTensor& tensor) {
  void* data = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor.get(), &data));
  return data;
}

struct Plan {
  DecodingTile tile;  // head_dim 0: no kernel supports the shape
  DecodingSplits splits;
};

// Caches the last plan, since a decoding loop repeats the same shape for every token.
Plan plan_of(const DecodingShape& shape, const DeviceInfo& info, int64_t requested_splits) {
  const std::array<int64_t, 10> key = {shape.batch,         shape.heads_kv,   shape.rows,          shape.seqlen_k,
                                       shape.head_dim,      shape.head_dim_v, shape.element_bytes, info.sm_count,
                                       info.smem_per_block, requested_splits};
  static thread_local std::array<int64_t, 10> last_key = {};
  static thread_local Plan plan;
  if (key != last_key) {
    plan.tile = decoding_tile(shape, info);
    if (plan.tile.head_dim != 0) plan.splits = decoding_splits(shape, plan.tile, info, requested_splits);
    last_key = key;
  }
  return plan;
}

// Scratch memory from the caching allocator for the kernels of one call.
class Scratch {
 public:
  Scratch(const CudaBackend& cuda, int64_t floats)
      : cuda_(cuda), data_(floats > 0 ? cuda.allocate(floats * sizeof(float)) : nullptr) {}
  ~Scratch() {
    if (data_ != nullptr) cuda_.release(data_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  float* floats() const { return static_cast<float*>(data_); }

 private:
  const CudaBackend& cuda_;
  void* data_;
};

// True if the last CTA to arrive at a row tile should reduce its slots (last-arriver finalization). The combine kernel
// uses more CTAs but costs a launch, so it is used only for larger reductions.
bool uses_last_arriver(const DecodingParams& p, DecodingTile tile, int64_t slots) {
  constexpr int64_t kMostFloats = 1 << 15, kMostWeights = 1 << 12;
  const int64_t rows = std::min<int64_t>(tile.rows, int64_t{p.group} * p.seqlen_q);
  const int64_t tiles = int64_t{p.batch} * p.heads_kv * p.row_tiles;
  const int64_t floats = tiles * rows * slots * (p.head_dim_v + 3);
  return rows * slots <= kMostWeights && rows * slots * p.head_dim_v <= kMostFloats &&
         tiles <= StreamMemory::kArrivals && floats <= StreamMemory::kScratch;
}

struct DecodingSettings {
  int64_t modification;
  int64_t splits;  // 0: the planner chooses
  bool need_lse, need_max_scores, need_exact_out;
};

// Launches a call. Returns out, then lse and max_scores if they are requested, then the float32 out if it is requested
// and out is rounded. Returns an empty vector if no kernel supports the call as it is.
std::vector<OwnedTensor> decoding_results(AtenTensorHandle q, const DecodingCall& call,
                                          const DecodingSettings& settings, std::optional<double> scale) {
  const CudaBackend* cuda = cuda_backend();
  if (cuda == nullptr || cuda->decoding == nullptr || !kernel_takes(call)) return {};
  const int device = call.q.device.index;
  const DeviceInfo info = cuda->device_info(device);
  if (!info.usable || info.cc_major < 8) return {};
  const DecodingShape shape = shape_of(call);
  const auto [tile, splits] = plan_of(shape, info, settings.splits);
  const bool aligned = rows_are_aligned(call);
  if (tile.head_dim == 0) return {};
  const ChosenKernel kernel = find_kernel(settings.modification, {tile, call.q.dtype, aligned, device, nullptr});
  if (!kernel.found) return {};

  DecodingParams p = params_of(call, tile);
  p.built_in = kernel.built_in;
  p.scale = static_cast<float>(scale.value_or(1 / std::sqrt(static_cast<double>(p.head_dim))));
  p.splits = splits.splits;
  p.cluster = splits.cluster;

  std::optional<torch::stable::accelerator::DeviceGuard> guard;
  if (cuda->current_device() != device) guard.emplace(device);
  const OutputShape out = output_shape(call.q, p.head_dim_v);
  std::vector<OwnedTensor> results =
      output_and_statistics(q, out, call.q.dtype, settings.need_lse + settings.need_max_scores);
  p.out = data_of(results[0]);
  std::copy_n(out.strides.begin(), 3, p.out_strides);
  if (settings.need_lse) p.lse = static_cast<float*>(data_of(results[1]));
  if (settings.need_max_scores) p.max_scores = static_cast<float*>(data_of(results.back()));
  if (settings.need_exact_out && call.q.dtype != DType::kFloat32) {
    const int64_t width = p.head_dim_v;
    results.push_back(empty_strided<4>(q, {p.batch, p.heads, p.seqlen_q, width},
                                       {p.heads * p.seqlen_q * width, p.seqlen_q * width, width, 1}, DType::kFloat32));
    p.exact_out = static_cast<float*>(data_of(results.back()));
  }
  void* const stream = cuda->current_stream(device);
  const int64_t rows = int64_t{p.batch} * p.heads * p.seqlen_q;
  const int64_t slots = p.splits > p.cluster ? p.splits / p.cluster : 0;
  const int64_t columns = (p.head_dim_v + 1) / 2 * 2;
  const int64_t floats = slots * rows * (columns + 2);
  if (slots > 0 && uses_last_arriver(p, tile, slots)) {
    const StreamMemory memory = cuda->stream_memory(device, stream);
    p.arrivals = memory.arrivals;
    p.partial_out = memory.scratch;
  }
  const Scratch scratch(*cuda, p.arrivals != nullptr ? 0 : floats);
  if (p.arrivals == nullptr) p.partial_out = scratch.floats();
  p.partial_stats = p.partial_out + slots * rows * columns;
  const char* error = cuda->decoding(p, tile, call.q.dtype, aligned, kernel.compiled, info, stream);
  STD_TORCH_CHECK(error == nullptr, "flashbwd: ", error);
  return results;
}

void decoding_forward(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader reader(stack);
  const OwnedTensor q = reader.owned_tensor(), k = reader.owned_tensor(), v = reader.owned_tensor();
  const auto mask = reader.read<std::vector<Tensor>>();
  const auto mask_shape = reader.read<std::vector<int64_t>>();
  const auto captured = reader.read<std::vector<Tensor>>();
  DecodingSettings settings;
  settings.modification = reader.read<int64_t>();
  const auto scale = reader.read<std::optional<double>>();
  DecodingCall call;
  call.enable_gqa = reader.read<bool>();
  settings.splits = reader.read<int64_t>();
  settings.need_lse = reader.read<bool>();
  settings.need_max_scores = reader.read<bool>();
  settings.need_exact_out = reader.read<bool>();

  describe(q.get(), call.q);
  describe(k.get(), call.k);
  describe(v.get(), call.v);
  for (const Tensor& tensor : mask) describe(tensor.get(), call.mask.emplace_back());
  for (const Tensor& tensor : captured) describe(tensor.get(), call.captured.emplace_back());
  check(mask_shape.size() == call.mask_shape.size(), "mask_shape has ", mask_shape.size(), " elements, expected 4");
  std::copy(mask_shape.begin(), mask_shape.end(), call.mask_shape.begin());
  stack[0] = boxed(decoding_results(q.get(), call, settings, scale));
}

void decoding_modification(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader reader(stack);
  const auto integers = reader.read<std::vector<int64_t>>();
  const auto floats = reader.read<std::vector<double>>();
  Modification made;
  made.prebuilt = !integers.empty();
  if (made.prebuilt) {
    constexpr size_t kFloats = 4, kIntegers = sizeof(BuiltInMod) / 4 - kFloats;
    STD_TORCH_CHECK(integers.size() == kIntegers && floats.size() == kFloats,
                    "flashbwd: a built-in modification has the wrong number of integers or floats");
    std::array<int32_t, kIntegers> whole;
    std::copy(integers.begin(), integers.end(), whole.begin());
    std::array<float, kFloats> real;
    std::copy(floats.begin(), floats.end(), real.begin());
    std::memcpy(&made.built_in, whole.data(), sizeof(whole));
    std::memcpy(&made.built_in.softcap, real.data(), sizeof(real));
  }
  const std::lock_guard<std::mutex> lock(modifications_mutex);
  modifications.emplace(next_modification, std::move(made));
  stack[0] = boxed<int64_t>(next_modification++);
}

void decoding_forget_modification(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader reader(stack);
  const auto modification = reader.read<int64_t>();
  const std::lock_guard<std::mutex> lock(modifications_mutex);
  modifications.erase(modification);
}

// The number of registered modifications, for tests.
void decoding_modifications(StableIValue* stack, uint64_t, uint64_t) {
  const std::lock_guard<std::mutex> lock(modifications_mutex);
  stack[0] = boxed<int64_t>(static_cast<int64_t>(modifications.size()));
}

void decoding_add_kernel(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader reader(stack);
  const int64_t modification = reader.read<int64_t>();
  Modification::Kernel kernel = {};
  kernel.tile.head_dim = static_cast<int32_t>(reader.read<int64_t>());
  kernel.tile.rows = static_cast<int32_t>(reader.read<int64_t>());
  kernel.tile.warps = static_cast<int32_t>(reader.read<int64_t>());
  const auto dtype = reader.read<ScalarType>();
  for (const DType known : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
    if (scalar_type_of(known) == dtype) kernel.dtype = known;
  }
  kernel.aligned = reader.read<bool>();
  kernel.device = reader.read<int64_t>();
  kernel.kernel = reinterpret_cast<void*>(reader.read<int64_t>());
  const std::lock_guard<std::mutex> lock(modifications_mutex);
  modifications.at(modification).kernels.push_back(kernel);
}

// The reason why a device cannot run the kernels; empty if it can.
void decoding_refusal(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader reader(stack);
  const int64_t device = reader.read<int64_t>();
  std::string reason;
  if (cuda_backend() == nullptr || cuda_backend()->decoding == nullptr) {
    reason = "this installation has no decoding kernels";
  } else {
    const DeviceInfo info = cuda_backend()->device_info(static_cast<int>(device));
    if (!info.usable) reason = info.why_not;
    if (info.usable && info.cc_major < 8) reason = "the device is older than compute capability 8.0";
  }
  stack[0] = boxed(reason);
}

void decoding_tile_operator(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader reader(stack);
  DecodingCall call;
  call.q = describe(reader.tensor());
  call.k = describe(reader.tensor());
  call.v = describe(reader.tensor());
  const DecodingTile tile = decoding_tile(shape_of(call), cuda_backend()->device_info(call.q.device.index));
  stack[0] = boxed<int64_t>(tile.head_dim);
  stack[1] = boxed<int64_t>(tile.rows);
  stack[2] = boxed<int64_t>(tile.warps);
  stack[3] = boxed<bool>(rows_are_aligned(call));
}

void decoding_shared_bytes(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader reader(stack);
  const int head_dim = static_cast<int>(reader.read<int64_t>()), rows = static_cast<int>(reader.read<int64_t>());
  const int warps = static_cast<int>(reader.read<int64_t>());
  stack[0] = boxed<int64_t>(shared_bytes(head_dim, rows, warps, static_cast<int>(reader.read<int64_t>())));
}

}  // namespace
}  // namespace flashbwd

STABLE_TORCH_LIBRARY_FRAGMENT(flashbwd, m) {
  m.def(
      "decoding_forward(Tensor q, Tensor k, Tensor v, Tensor[] mask, int[] mask_shape, Tensor[] captured, "
      "int modification, float? scale, bool enable_gqa, int splits, bool need_lse, bool need_max_scores, "
      "bool need_exact_out) -> Tensor[]");
  m.def("decoding_modification(int[] integers, float[] floats) -> int");
  m.def("decoding_forget_modification(int modification) -> ()");
  m.def("decoding_modifications() -> int");
  m.def(
      "decoding_add_kernel(int modification, int head_dim, int rows, int warps, ScalarType dtype, bool aligned, "
      "int device, int kernel) -> ()");
  m.def("decoding_refusal(int device) -> str");
  m.def("decoding_tile(Tensor q, Tensor k, Tensor v) -> (int head_dim, int rows, int warps, bool aligned)");
  m.def("decoding_shared_bytes(int head_dim, int rows, int warps, int element_bytes) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(flashbwd, CUDA, m) {
  m.impl("decoding_forward", flashbwd::decoding_forward);
  m.impl("decoding_tile", flashbwd::decoding_tile_operator);
}

STABLE_TORCH_LIBRARY_IMPL(flashbwd, CompositeExplicitAutograd, m) {
  m.impl("decoding_modification", flashbwd::decoding_modification);
  m.impl("decoding_forget_modification", flashbwd::decoding_forget_modification);
  m.impl("decoding_modifications", flashbwd::decoding_modifications);
  m.impl("decoding_add_kernel", flashbwd::decoding_add_kernel);
  m.impl("decoding_refusal", flashbwd::decoding_refusal);
  m.impl("decoding_shared_bytes", flashbwd::decoding_shared_bytes);
}

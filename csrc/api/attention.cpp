// The attention operators. Each reads and checks its arguments, plans the call, allocates outputs and launches kernels.
#include <torch/csrc/stable/accelerator.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../attention/plan.h"
#include "../attention/problem.h"
#include "../attention/tensor_checks.h"
#include "../common/check.h"
#include "attention_call.h"
#include "captured_values.h"
#include "cuda_backend.h"

namespace flashbwd {
namespace {

DeviceInfo device_info(Device device) {
  DeviceInfo info;
  if (device.type != DeviceType::kCUDA) return info;
  if (cuda_backend() == nullptr) {
    info.why_not = "this installation has no CUDA kernels";
    return info;
  }
  info = cuda_backend()->device_info(device.index);
  info.has_attention_sm90 = cuda_backend()->attention_sm90 != nullptr;
  info.has_attention_sm80 = cuda_backend()->attention_sm80 != nullptr;
  info.has_attention_short = cuda_backend()->attention_short != nullptr;
  return info;
}

// `plan_device`: the index of the CUDA device for which meta tensors are planned, or -1 for the CPU.
AttentionPlan plan_for(AttentionProblem problem, int64_t plan_device) {
  if (problem.device.type == DeviceType::kMeta) {
    problem.device = plan_device < 0 ? Device{} : Device{DeviceType::kCUDA, static_cast<int32_t>(plan_device)};
  }
  return plan_attention(problem, device_info(problem.device));
}

// Returns a view of (B, H, S, D) as (B, S, H, D), or the reverse.
Tensor rows_first(const Tensor& tensor) { return torch::stable::transpose(tensor, 1, 2); }

void swap_heads_and_rows(TensorDesc* tensor) {
  std::swap(tensor->sizes[1], tensor->sizes[2]);
  std::swap(tensor->strides[1], tensor->strides[2]);
}

struct Outputs {
  Tensor dq, dk, dv;
  std::optional<Tensor> workspace, dbias, dsink;
};

void run_reference(const AttentionCall& call, const AttentionProblem& problem, const Outputs& outputs) {
  AttentionArguments checked = call.arguments;
  checked.softmax_scale = problem.softmax_scale;
  checked.window_left = problem.window_left;
  checked.window_right = problem.window_right;
  std::vector<StableIValue> stack;
  for (const Tensor* tensor : {&call.dout, &call.q, &call.k, &call.v, &call.out, &call.softmax_lse}) {
    stack.push_back(boxed(*tensor));
  }
  box_options(call, checked, stack);
  for (const int64_t longest : {problem.seqlen_q, problem.seqlen_k}) stack.push_back(boxed(longest));
  for (const Tensor* tensor : {&outputs.dq, &outputs.dk, &outputs.dv}) stack.push_back(boxed(*tensor));
  for (const auto* tensor : {&outputs.dbias, &outputs.dsink}) stack.push_back(boxed(*tensor));
  call_operator("flashbwd::attention_backward_reference", stack.data());
}

void run_kernel(const AttentionCall& call, const AttentionProblem& problem, const AttentionPlan& plan,
                const CompiledScoreMod* score_mod, const Outputs& outputs) {
  const CudaBackend& cuda = *cuda_backend();
  void* const stream = cuda.current_stream(problem.device.index);
  const AttentionLauncher launch = plan.backend == "short"  ? cuda.attention_short
                                   : plan.backend == "sm90" ? cuda.attention_sm90
                                                            : cuda.attention_sm80;
  const AttentionBackwardParams params =
      make_params(call.arguments, problem, describe(outputs.dbias), describe(outputs.dsink));
  const ScoreModLauncher launch_score_mod =
      plan.backend == "sm90" ? cuda.attention_sm90_score_mod : cuda.attention_sm80_score_mod;
  const char* error =
      score_mod == nullptr ? launch(params, plan, stream) : launch_score_mod(params, plan, *score_mod, stream);
  STD_TORCH_CHECK(error == nullptr, "flashbwd: ", error);
}

// Runs a call that has been checked and planned. outputs.dq, dk and dv must be allocated.
void run(AttentionCall& call, const AttentionProblem& problem, const AttentionPlan& plan, Outputs& outputs,
         bool heads_first = false, const CompiledScoreMod* score_mod = nullptr) {
  std::unique_ptr<torch::stable::accelerator::DeviceGuard> guard;
  if (problem.device.type == DeviceType::kCUDA) {
    guard = std::make_unique<torch::stable::accelerator::DeviceGuard>(problem.device.index);
  }
  AttentionArguments& a = call.arguments;
  const int64_t bytes = plan.workspace.bytes;
  if (outputs.workspace.has_value()) {
    check(a.workspace.numel() >= bytes, "workspace has ", a.workspace.numel(), " bytes, expected at least ", bytes);
  } else if (bytes > 0) {
    outputs.workspace = new_empty(call.q, {bytes}, DType::kUInt8);
  }
  if (problem.need_dbias && !outputs.dbias) outputs.dbias = new_like(*call.attn_bias);
  if (problem.has_sink) outputs.dsink = new_like(*call.sink);
  if (plan.backend == "reference") {
    if (!heads_first) return run_reference(call, problem, outputs);
    for (Tensor* tensor : {&call.dout, &call.q, &call.k, &call.v, &call.out}) *tensor = rows_first(*tensor);
    Outputs views = outputs;
    for (Tensor* tensor : {&views.dq, &views.dk, &views.dv}) *tensor = rows_first(*tensor);
    return run_reference(call, problem, views);
  }
  a.dq = describe(outputs.dq);
  a.dk = describe(outputs.dk);
  a.dv = describe(outputs.dv);
  if (heads_first) {
    for (TensorDesc* tensor : {&a.dq, &a.dk, &a.dv}) swap_heads_and_rows(tensor);
  }
  a.workspace = describe(outputs.workspace);
  run_kernel(call, problem, plan, score_mod, outputs);
}

// The schemas return Tensor, not Tensor?, so an output that was not requested is an empty tensor.
Tensor or_empty(const std::optional<Tensor>& tensor, const AttentionCall& call) {
  return tensor.has_value() ? *tensor : new_empty(call.q, {0}, call.arguments.q.dtype);
}

void attention_backward(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader reader(stack);
  AttentionCall call(reader);
  call.describe_tensors();
  const AttentionProblem problem = check_attention(call.arguments);
  Outputs outputs{new_like(call.q), new_like(call.k), new_like(call.v), {}, {}, {}};
  run(call, problem, plan_attention(problem, device_info(problem.device)), outputs);
  stack[0] = boxed(outputs.dq);
  stack[1] = boxed(outputs.dk);
  stack[2] = boxed(outputs.dv);
  stack[3] = boxed(or_empty(outputs.dbias, call));
  stack[4] = boxed(or_empty(outputs.dsink, call));
}

// A call with a block mask. Its tensors come before the options in the schemas.
struct BlockMaskCall {
  AttentionCall call;
  Tensor lists, entries, bits;

  explicit BlockMaskCall(ArgumentReader& reader)
      : call{reader.tensor(), reader.tensor(), reader.tensor(),
             reader.tensor(), reader.tensor(), reader.tensor()},  // braces evaluate the calls in order
        lists(reader.tensor()),
        entries(reader.tensor()),
        bits(reader.tensor()) {
    call.arguments.block_mask_covers = reader.read<bool>();
    const auto tile = reader.read<std::vector<int64_t>>();
    flashbwd::check(tile.size() == 2, "block_tile has ", tile.size(), " elements, expected queries and keys");
    call.arguments.block_m = tile[0];
    call.arguments.block_n = tile[1];
    read_options(reader, kOfBackward, call, call.arguments);
  }

  // Computes dq, dk and dv and returns them on the stack.
  void run(StableIValue* stack, const CompiledScoreMod* score_mod) {
    const AttentionProblem problem = check();
    Outputs outputs{new_like(call.q), new_like(call.k), new_like(call.v), {}, {}, {}};
    const bool empty = problem.batch == 0 || problem.heads == 0;
    if (!empty) {
      const AttentionPlan plan = plan_attention(problem, device_info(problem.device));
      flashbwd::run(call, problem, plan, outputs, false, score_mod);
    }
    stack[0] = boxed(outputs.dq);
    stack[1] = boxed(outputs.dk);
    stack[2] = boxed(outputs.dv);
  }

  AttentionProblem check() {
    call.describe_tensors();
    call.arguments.block_lists = describe(lists);
    call.arguments.block_entries = describe(entries);
    call.arguments.block_bits = describe(bits);
    return check_attention(call.arguments);
  }
};

void block_mask_attention_backward(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader reader(stack);
  BlockMaskCall(reader).run(stack, nullptr);
}

void score_mod_attention_backward(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader reader(stack);
  BlockMaskCall masked(reader);
  const auto captured = reader.read<std::vector<Tensor>>();
  const auto gradients = reader.read<std::vector<Tensor>>();
  const auto slots = reader.read<std::vector<int64_t>>();
  const auto numbers = reader.read<std::vector<int64_t>>();
  CompiledScoreMod score_mod = {};
  score_mod.kernel = reinterpret_cast<void*>(reader.read<int64_t>());
  check(score_mod.kernel != nullptr, "kernel is 0, expected the handle of a compiled kernel");
  set_captured(captured, gradients, slots, describe(masked.call.q).device, &score_mod);
  set_numbers(numbers, &score_mod);
  masked.call.arguments.has_score_mod = true;
  masked.run(stack, &score_mod);
}

template <bool kScoreMod>
void plan_block_mask_attention_backward(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader reader(stack);
  BlockMaskCall masked(reader);
  const int64_t plan_device = reader.read<int64_t>();
  masked.call.arguments.has_score_mod = kScoreMod;
  masked.call.arguments.plan_only = true;
  stack[0] = boxed(to_json(plan_for(masked.check(), plan_device)));
}

void attention_backward_out(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader reader(stack);
  AttentionCall call(reader);
  Tensor dq = reader.tensor();
  Tensor dk = reader.tensor();
  Tensor dv = reader.tensor();
  std::optional<Tensor> workspace = reader.optional_tensor();
  call.describe_tensors();
  AttentionArguments& a = call.arguments;
  a.dq = describe(dq);
  a.dk = describe(dk);
  a.dv = describe(dv);
  a.workspace = describe(workspace);
  const AttentionProblem problem = check_attention(a);
  Outputs outputs{dq, dk, dv, workspace, {}, {}};
  run(call, problem, plan_attention(problem, device_info(problem.device)), outputs);
  stack[0] = boxed(or_empty(outputs.dbias, call));
  stack[1] = boxed(or_empty(outputs.dsink, call));
}

// Allocates a bias gradient like PyTorch's memory-efficient backward: contiguous, with rows padded to 16 elements.
Tensor empty_padded_rows(const Tensor& bias) {
  constexpr int64_t kAlignment = 16;
  const int64_t last = bias.dim() - 1;
  std::vector<int64_t> sizes(bias.sizes().begin(), bias.sizes().end());
  sizes[last] = (sizes[last] + kAlignment - 1) / kAlignment * kAlignment;
  Tensor padded = new_empty(bias, {sizes.data(), sizes.size()}, bias.scalar_type());
  return torch::stable::narrow(padded, last, 0, bias.size(last));
}

std::string all_refusals(const AttentionPlan& plan) {
  std::string text;
  for (const auto& [backend, reason] : plan.refusals) {
    text += (text.empty() ? "" : "; ") + backend + ": " + reason;
  }
  return text;
}

void plan_attention_backward(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader reader(stack);
  AttentionCall call(reader);
  const std::optional<Tensor> dq = reader.optional_tensor();
  const std::optional<Tensor> dk = reader.optional_tensor();
  const std::optional<Tensor> dv = reader.optional_tensor();
  const std::optional<Tensor> workspace = reader.optional_tensor();
  const int64_t plan_device = reader.read<int64_t>();
  call.describe_tensors();
  AttentionArguments& a = call.arguments;
  a.plan_only = true;
  a.dq = describe(dq);
  a.dk = describe(dk);
  a.dv = describe(dv);
  a.workspace = describe(workspace);
  stack[0] = boxed(to_json(plan_for(check_attention(a), plan_device)));
}

// Runs the backward's checks on the inputs of a forward, before out, dout and softmax_lse exist.
void check_attention_inputs(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader reader(stack);
  const Tensor q = reader.tensor();
  const Tensor k = reader.tensor();
  const Tensor v = reader.tensor();
  AttentionTensors tensors;
  AttentionArguments a;
  read_options(reader, kOfForward, tensors, a);
  a.q = describe(q);
  a.k = describe(k);
  a.v = describe(v);
  describe_options(tensors, a);
  check_attention_forward(a);
}

}  // namespace

AttentionGradients attention_backward_or_refusal(AttentionCall& call, bool heads_first, bool contiguous_grads) {
  const auto empty = [&](const Tensor& like) {
    return contiguous_grads ? new_empty(like, like.sizes(), like.scalar_type()) : new_like(like);
  };
  AttentionArguments& a = call.arguments;
  try {
    call.describe_tensors();
    if (heads_first) {
      for (TensorDesc* tensor : {&a.dout, &a.q, &a.k, &a.v, &a.out}) {
        if (tensor->dim != 4) {
          return {{}, {}, "a tensor has shape " + shape_of(*tensor) + ", expected 4 dimensions, heads first"};
        }
        swap_heads_and_rows(tensor);
      }
    }
    const AttentionProblem problem = check_attention(a);
    const AttentionPlan plan = try_plan_attention(problem, device_info(problem.device));
    if (!plan.refusal.empty()) return {{}, {}, plan.refusal};
    if (plan.backend == "reference" && a.backend != "reference") return {{}, {}, all_refusals(plan)};
    Outputs outputs{empty(call.q), empty(call.k), empty(call.v), {}, {}, {}};
    if (problem.need_dbias && contiguous_grads) outputs.dbias = empty_padded_rows(*call.attn_bias);
    run(call, problem, plan, outputs, heads_first);
    return {{outputs.dq, outputs.dk, outputs.dv}, outputs.dbias, {}};
  } catch (const std::invalid_argument& error) {
    return {{}, {}, error.what()};
  }
}

}  // namespace flashbwd

STABLE_TORCH_LIBRARY_FRAGMENT(flashbwd, m) {
  const auto define = [&m](const std::string& schema) { m.def(schema.c_str()); };
  const std::string tensors = "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse";
  const std::string backward = tensors + flashbwd::option_schema(flashbwd::kOfBackward);
  define("attention_backward" + backward + ") -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)");
  define("attention_backward_out" + backward +
         ", *, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor(d!)? workspace=None) -> "
         "(Tensor dbias, Tensor dsink)");
  define("plan_attention_backward" + backward +
         ", Tensor? dq=None, Tensor? dk=None, Tensor? dv=None, Tensor? workspace=None, int plan_device=-1) -> str");
  // block_lists, block_entries and block_bits encode the query loops of a block mask (csrc/attention/params.h) for
  // tiles of block_tile[0] queries and block_tile[1] keys. Only kernels support them; the reference backend does not. A
  // plan of block_tile [0, 0] does not read the lists, and says which tile they must have.
  const std::string block_mask =
      tensors +
      ", Tensor block_lists, Tensor block_entries, Tensor block_bits, bool block_mask_covers, int[] block_tile" +
      flashbwd::option_schema(flashbwd::kOfBackward);
  define("block_mask_attention_backward" + block_mask + ") -> (Tensor dq, Tensor dk, Tensor dv)");
  define("plan_block_mask_attention_backward" + block_mask + ", int plan_device=-1) -> str");
  // The same with a score_mod that was compiled for the call's tile and dtype. `kernel` is its CUkernel. The kernel
  // adds to `gradients`, which belong to the captured tensors number `gradient_slots`. `numbers` are int32, or the bits
  // of a float.
  define("score_mod_attention_backward" + block_mask +
         ", *, Tensor[] captured, Tensor(a!)[] gradients, int[] gradient_slots, int[] numbers, int kernel) -> "
         "(Tensor dq, Tensor dk, Tensor dv)");
  define("plan_score_mod_attention_backward" + block_mask + ", int plan_device=-1) -> str");
  define("check_attention_inputs(Tensor q, Tensor k, Tensor v" + flashbwd::option_schema(flashbwd::kOfForward) +
         ") -> ()");
  // Implemented in Python with torch operators; the operators above call it if the plan chose the reference backend.
  define("attention_backward_reference" + tensors + flashbwd::option_schema(flashbwd::kOfReference) +
         ", SymInt max_seqlen_q, SymInt max_seqlen_k, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor(d!)? dbias, "
         "Tensor(e!)? dsink) -> ()");
}

#define FLASHBWD_IMPLEMENT(key)                                                                        \
  STABLE_TORCH_LIBRARY_IMPL(flashbwd, key, m) {                                                        \
    m.impl("attention_backward", flashbwd::attention_backward);                                        \
    m.impl("attention_backward_out", flashbwd::attention_backward_out);                                \
    m.impl("plan_attention_backward", flashbwd::plan_attention_backward);                              \
    m.impl("check_attention_inputs", flashbwd::check_attention_inputs);                                \
    m.impl("block_mask_attention_backward", flashbwd::block_mask_attention_backward);                  \
    m.impl("plan_block_mask_attention_backward", flashbwd::plan_block_mask_attention_backward<false>); \
    m.impl("score_mod_attention_backward", flashbwd::score_mod_attention_backward);                    \
    m.impl("plan_score_mod_attention_backward", flashbwd::plan_block_mask_attention_backward<true>);   \
  }

FLASHBWD_IMPLEMENT(CPU)
FLASHBWD_IMPLEMENT(CUDA)

STABLE_TORCH_LIBRARY_IMPL(flashbwd, Meta, m) {
  m.impl("plan_attention_backward", flashbwd::plan_attention_backward);
  m.impl("plan_block_mask_attention_backward", flashbwd::plan_block_mask_attention_backward<false>);
  m.impl("plan_score_mod_attention_backward", flashbwd::plan_block_mask_attention_backward<true>);
}

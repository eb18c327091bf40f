#include "attention_call.h"

#include <type_traits>
#include <utility>

namespace flashbwd {
namespace {

bool has(unsigned operators, OptionOf of) { return of == kOfBackward || (operators & of) != 0; }

// The type and the default of an option in a schema.
struct Declared {
  const char* type;
  std::string value;
};

Declared declared(bool value) { return {"bool", value ? "True" : "False"}; }
Declared declared(int64_t value) { return {"SymInt", std::to_string(value)}; }
Declared declared(double value) { return {"float", std::to_string(value)}; }
Declared declared(const std::string& value) { return {"str", "'" + value + "'"}; }
Declared declared(const std::optional<int64_t>&) { return {"SymInt?", "None"}; }

}  // namespace

std::string option_schema(OptionOf of) {
  std::string text;
  const auto add = [&](const char* name, const Declared& option) {
    text += std::string(", ") + option.type + " " + name;
    if (of == kOfBackward) text += "=" + option.value;
  };
  for_each_tensor<>([&](const char* name, unsigned operators) {
    if (has(operators, of)) add(name, {"Tensor?", "None"});
  });
  add("softmax_scale", {of == kOfBackward ? "float?" : "float", "None"});
  for_each_scalar<AttentionArguments>([&](const char* name, unsigned operators, auto scalar) {
    if (has(operators, of)) add(name, declared(AttentionArguments().*scalar));
  });
  return text;
}

void read_options(ArgumentReader& reader, OptionOf of, AttentionTensors& tensors, AttentionArguments& arguments) {
  for_each_tensor<AttentionTensors>([&](const char*, unsigned operators, auto tensor) {
    if (has(operators, of)) tensors.*tensor = reader.optional_tensor();
  });
  if (of == kOfBackward) {
    arguments.softmax_scale = reader.read<std::optional<double>>();
  } else {
    arguments.softmax_scale = reader.read<double>();
  }
  for_each_scalar<AttentionArguments>([&](const char*, unsigned operators, auto scalar) {
    auto& value = arguments.*scalar;
    if (has(operators, of)) value = reader.read<std::decay_t<decltype(value)>>();
  });
}

void describe_options(const AttentionTensors& tensors, AttentionArguments& arguments) {
  for_each_tensor<AttentionTensors, AttentionArguments>(
      [&](const char*, unsigned, auto tensor, auto desc) { describe(tensors.*tensor, arguments.*desc); });
}

void box_options(const AttentionTensors& tensors, const AttentionArguments& arguments,
                 std::vector<StableIValue>& stack) {
  for_each_tensor<AttentionTensors>([&](const char*, unsigned operators, auto tensor) {
    if (has(operators, kOfReference)) stack.push_back(boxed(tensors.*tensor));
  });
  stack.push_back(boxed(arguments.softmax_scale.value()));
  for_each_scalar<AttentionArguments>([&](const char*, unsigned operators, auto scalar) {
    if (has(operators, kOfReference)) stack.push_back(boxed(arguments.*scalar));
  });
}

AttentionCall::AttentionCall(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse)
    : dout(std::move(dout)),
      q(std::move(q)),
      k(std::move(k)),
      v(std::move(v)),
      out(std::move(out)),
      softmax_lse(std::move(softmax_lse)) {}

AttentionCall::AttentionCall(ArgumentReader& reader)
    : dout(reader.tensor()),
      q(reader.tensor()),
      k(reader.tensor()),
      v(reader.tensor()),
      out(reader.tensor()),
      softmax_lse(reader.tensor()) {
  read_options(reader, kOfBackward, *this, arguments);
}

void AttentionCall::describe_tensors() {
  AttentionArguments& a = arguments;
  dout = with_contiguous_last_dim(dout);
  describe(dout, a.dout);
  describe(q, a.q);
  describe(k, a.k);
  describe(v, a.v);
  describe(out, a.out);
  describe(softmax_lse, a.softmax_lse);
  describe_options(*this, a);
}

}  // namespace flashbwd

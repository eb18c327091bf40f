// _C_python: steps of a decoding loop past PyTorch's dispatcher, which takes longer to hand tensors over than a step
// takes to check and describe them. Tensors are laid out differently from one PyTorch to the next: this serves the one
// that it was built with. Of Python it uses the stable ABI.
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
//
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/headeronly/version.h>

#include <array>
#include <exception>
#include <memory>
#include <utility>

#include "decoding_step.h"

// As torch/csrc/autograd/python_variable.h and torch/csrc/Exceptions.h have them; with those comes pybind11, which is
// bound to one Python.
struct THPVariable {
  PyObject_HEAD at::Tensor cdata;
};
extern PyObject* THPVariableClass;
PyObject* THPVariable_Wrap(at::TensorBase&& tensor);
namespace torch {
void translate_exception_to_python(const std::exception_ptr& exception);
}

namespace {

const at::Tensor& tensor_of(PyObject* object) { return reinterpret_cast<THPVariable*>(object)->cdata; }

using c10::DispatchKey;
using c10::DispatchKeySet;

constexpr int kFixed = 2, kInputs = 3;  // arguments before the tensors; query, key and value

// Whether the dispatcher would do nothing but call a kernel: no mode, transform, autocast, tracing or profile is on.
bool nothing_else_is_on() {
  const c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  DispatchKeySet included = c10::default_included_set, excluded = c10::default_excluded_set;
  if (c10::InferenceMode::is_enabled()) {
    included = included.remove(DispatchKey::ADInplaceOrView);
    excluded = excluded | c10::autograd_dispatch_keyset;
  }
  return keys.included_ == included && keys.excluded_ == excluded && !at::impl::torch_function_mode_enabled() &&
         !at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION).has_value();
}

// Whether a tensor is nothing but numbers in memory, of which no gradient is asked for.
bool is_ordinary(const c10::TensorImpl& tensor, bool with_gradients) {
  static const uint64_t ordinary =
      DispatchKeySet({DispatchKey::CPU, DispatchKey::CUDA, DispatchKey::ADInplaceOrView, DispatchKey::AutogradCPU,
                      DispatchKey::AutogradCUDA, DispatchKey::AutocastCPU, DispatchKey::AutocastCUDA})
          .raw_repr();
  return (tensor.key_set().raw_repr() & ~ordinary) == 0 && !(with_gradients && tensor.requires_grad());
}

PyObject* wrapped(AtenTensorHandle handle) {
  const std::unique_ptr<at::Tensor> tensor(reinterpret_cast<at::Tensor*>(handle));
  return THPVariable_Wrap(std::move(*tensor));
}

PyObject* new_reference(PyObject* object) {
  Py_IncRef(object);
  return object;
}

// Without the interpreter's lock, as PyTorch's operators run: a launch may have to wait for the GPU.
class Unlocked {
 public:
  Unlocked() : thread_(PyEval_SaveThread()) {}
  ~Unlocked() { PyEval_RestoreThread(thread_); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* thread_;
};

// step(number, lengths, query, key, value, *passed): its results, None where no kernel takes the call as it is, and
// NotImplemented where the operator of that step is to be asked. lengths: those of a mask that is passed, else None.
PyObject* step(PyObject* const* arguments, Py_ssize_t count) {
  const Py_ssize_t passed = count - kFixed - kInputs;
  if (passed < 0 || passed > flashbwd::kMostPassed) return new_reference(Py_NotImplemented);
  if (!nothing_else_is_on()) return new_reference(Py_NotImplemented);
  PyObject* const* const objects = arguments + kFixed;
  for (Py_ssize_t i = 0; i < kInputs + passed; ++i) {
    if (reinterpret_cast<PyObject*>(Py_TYPE(objects[i])) != THPVariableClass) return new_reference(Py_NotImplemented);
    __builtin_prefetch(tensor_of(objects[i]).unsafeGetTensorImpl());
  }
  const bool with_gradients = c10::GradMode::is_enabled();
  std::array<AtenTensorHandle, kInputs + flashbwd::kMostPassed> tensors;
  for (Py_ssize_t i = 0; i < kInputs + passed; ++i) {
    const at::Tensor& tensor = tensor_of(objects[i]);
    if (!is_ordinary(*tensor.unsafeGetTensorImpl(), with_gradients)) return new_reference(Py_NotImplemented);
    tensors[i] = reinterpret_cast<AtenTensorHandle>(const_cast<at::Tensor*>(&tensor));
  }
  const int64_t number = PyLong_AsLongLong(arguments[0]);
  std::array<int64_t, 2> lengths = {};
  if (arguments[1] != Py_None) {
    for (int i = 0; i < 2; ++i) {
      PyObject* const length = PyTuple_GetItem(arguments[1], i);
      if (length != nullptr) lengths[i] = PyLong_AsLongLong(length);
    }
  }
  if (PyErr_Occurred() != nullptr) {  // lengths that are no two integers
    PyErr_Clear();
    return new_reference(Py_NotImplemented);
  }
  std::array<AtenTensorHandle, flashbwd::kMostResults> results;
  int found = 0;
  {
    const Unlocked unlocked;
    found = flashbwd_decoding_step(number, lengths.data(), tensors.data(), static_cast<int>(passed), results.data());
  }
  if (found == 0) return new_reference(Py_None);
  if (found == 1) return wrapped(results[0]);
  PyObject* const tuple = PyTuple_New(found);
  for (int i = 0; i < found; ++i) PyTuple_SetItem(tuple, i, wrapped(results[i]));
  return tuple;
}

PyObject* decoding_step(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  try {
    return step(arguments, count);
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

// Where a tensor is, for Python to compare before it trusts the rest.
PyObject* address(PyObject*, PyObject* tensor) { return PyLong_FromVoidPtr(tensor_of(tensor).unsafeGetTensorImpl()); }

PyMethodDef methods[] = {{"address", address, METH_O, nullptr},
                         {"decoding_step", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(decoding_step)),
                          METH_FASTCALL, nullptr},
                         {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "flashbwd._C_python", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C_python() {
  PyObject* const made = PyModule_Create(&module);
  if (made != nullptr) PyModule_AddStringConstant(made, "TORCH_VERSION", TORCH_VERSION);
  return made;
}

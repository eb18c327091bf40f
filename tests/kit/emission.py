"""Compiles emitted modifications, and the kernels' built-in ones, for the host with a C++ compiler.

The functions of csrc/mods/functions.cuh and csrc/decoding/built_in.cuh are compiled unchanged, after a prelude that
defines the few intrinsics and declarations that only nvcc and NVRTC know.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashbwd.mods.built_in import BuiltIn, encode
from flashbwd.mods.captures import Captures, Slots
from flashbwd.mods.derivative import Gradient, emit_gradient, emit_score_gradient
from flashbwd.mods.emit import emit
from flashbwd.mods.operators import literal
from flashbwd.mods.trace import trace

MODS, DECODING = (Path(__file__).parent.parent.parent / "csrc" / name for name in ("mods", "decoding"))

_PRELUDE = r"""
#include <cmath>
#include <cstddef>
#include <cstring>
#include <algorithm>
using namespace std;
#define __CUDACC__
#define __device__
#define __forceinline__ inline
#define __noinline__
#define __fdividef(a, b) ((a) / (b))
static inline float __fmul_rn(float a, float b) { return a * b; }  // the compiler is told not to contract
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline float __int_as_float(int i) { float f; memcpy(&f, &i, 4); return f; }
static inline float __uint_as_float(unsigned i) { return __int_as_float(i); }
static inline unsigned __float_as_uint(float f) { unsigned i; memcpy(&i, &f, 4); return i; }
static inline float rsqrt(float x) { return 1 / sqrt(x); }
static inline double rsqrt(double x) { return 1 / sqrt(x); }
template <typename T> static inline void atomicAdd(T* at, T x) { *at += x; }
template <typename T> static inline T __ldg(const T* from) { return *from; }
#define FLASHBWD_INFINITY __int_as_float(0x7f800000)
namespace flashbwd {
using uint32 = unsigned;
inline float exp2_approx(float x) { return exp2f(x); }
inline float float_of_half(unsigned short bits) { _Float16 h; memcpy(&h, &bits, 2); return h; }
inline float float_of_bfloat16(unsigned short bits) { return __int_as_float(bits << 16); }
template <bool kBFloat16> inline unsigned pack_16bit(float x, float) {
  unsigned bits = 0;
  if (kBFloat16) {
    memcpy(&bits, &x, 4);
    if (x != x) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
  const _Float16 h = x;
  memcpy(&bits, &h, 2);
  return bits;
}
"""

_SIZES = """
extern "C" int captured_bytes() { return sizeof(flashbwd::CapturedTensor); }
extern "C" int captured_offset() { return offsetof(flashbwd::DecodingParams, captured); }
extern "C" int built_in_offset() { return offsetof(flashbwd::DecodingParams, built_in); }
extern "C" int params_bytes() { return sizeof(flashbwd::DecodingParams); }
"""

_BODY = """
extern "C" void {name}(const flashbwd::DecodingParams* p, int n, const float* scores, const int* at, float* results) {{
  for (int i = 0; i < n; ++i) {{
    const int b = at[i], h = at[n + i], q = at[2 * n + i], k = at[3 * n + i];
    const flashbwd::{mod}::Row row(*p, b, h, q);
    bool near = true;
    const float quick = flashbwd::{mod}::score_mod(*p, row, scores[i], b, h, q, k, &near);
    results[i] = near ? quick : flashbwd::{mod}::score_mod(*p, row, scores[i], b, h, q, k);
    if ({mod_mask} && !flashbwd::{mod}::mask_mod(*p, row, b, h, q, k)) results[i] = -FLASHBWD_INFINITY;
  }}
}}
"""

_GRADIENTS = """
static void* gradients[flashbwd::kMaxCaptured];
extern "C" void set_gradient(int slot, void* to) { gradients[slot] = to; }
static float ds = 1.f;
static bool first = true;
extern "C" void set_arguments(float of_result, int whether_first) { ds = of_result, first = whether_first; }
"""

_GRADIENT = """
extern "C" void {name}(const flashbwd::DecodingParams* p, int n, const float* scores, const int* at, float* results) {{
  flashbwd::DecodingBackwardParams with_gradients = {{}};
  memcpy(with_gradients.captured, p->captured, sizeof(p->captured));
  memcpy(with_gradients.gradients, gradients, sizeof(gradients));
  for (int i = 0; i < n; ++i) {{
    results[i] = flashbwd::{mod}::score_gradient(
        with_gradients, scores[i], at[i], at[n + i], at[2 * n + i], at[3 * n + i], ds, first);
  }}
}}
"""

_TRAINING_TYPES = """
namespace flashbwd {
struct GeneratedParams : DecodingBackwardParams {
  int numbers[kMaxNumbers];
};
template <typename T>
struct GradientSum {
  void add(bool adds, T* element, T value) {
    if (adds) *element += value;
  }
  void finish() {}
};
}
"""

_TRAINING = """
extern "C" void {name}(const flashbwd::DecodingParams* p, int n, const float* scores, const int* at, float* results) {{
  flashbwd::GeneratedParams all = {{}};
  memcpy(all.captured, p->captured, sizeof(p->captured));
  memcpy(all.gradients, gradients, sizeof(gradients));
  const int numbers[flashbwd::kMaxNumbers] = {{{numbers}}};
  memcpy(all.numbers, numbers, sizeof(numbers));
  {mod}::Sums sums;
  for (int i = 0; i < n; ++i) results[i] = {mod}::{call};
}}
"""
_CALLS = {
    "score": "score_mod(all, scores[i], at[i], at[n + i], at[2 * n + i], at[3 * n + i])",
    "gradient": "score_gradient(all, scores[i], at[i], at[n + i], at[2 * n + i], at[3 * n + i], ds, first, sums)",
}

# all_scores() applies the softcap to an array of scores.
_BUILT_IN = """
template <bool kScore, bool kMask>
float built_in_score(const flashbwd::DecodingParams& p, float score, int b, int h, int q, int k) {
  using Mod = flashbwd::BuiltInKernelMod<kScore, kMask>;
  const typename Mod::Row row(p, b, h, q);
  float scores[1][1][4] = {{{score, 0, 0, 0}}};
  if (kScore) {
    Mod::all_scores(p, scores);
    score = Mod::score_mod(p, row, scores[0][0][0], b, h, q, k);
  }
  return !kMask || Mod::mask_mod(p, row, b, h, q, k) ? score : -FLASHBWD_INFINITY;
}
extern "C" void built_in(const flashbwd::DecodingParams* p, int n, const float* scores, const int* at, float* results) {
  using flashbwd::BuiltInMod;
  const int kind = p->built_in.kind;
  const auto function = kind == BuiltInMod::kScore  ? built_in_score<true, false>
                        : kind == BuiltInMod::kMask ? built_in_score<false, true>
                                                     : built_in_score<true, true>;
  for (int i = 0; i < n; ++i) results[i] = function(*p, scores[i], at[i], at[n + i], at[2 * n + i], at[3 * n + i]);
}
"""

_numbers = itertools.count()


def with_numbers(gradient: Gradient) -> str:
    """The source, with the numbers in the place of the kernel's arguments."""
    source = gradient.source
    for slot, bits in enumerate(gradient.numbers):
        (number,) = struct.unpack("f", struct.pack("i", bits))
        source = source.replace(f"__int_as_float(p.numbers[{slot}])", literal(number))
        source = source.replace(f"p.numbers[{slot}]", literal(bits))
    return source


class CapturedTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("strides", ctypes.c_longlong * 5), ("sizes", ctypes.c_int * 5)]


def compiler() -> str | None:
    return shutil.which("c++") or shutil.which("g++")


def _plain(text: str) -> str:
    """``text`` without preprocessor directives; the prelude replaces the included headers."""
    return re.sub(r"^#.*$", "", text, flags=re.MULTILINE)


def _support() -> list[str]:
    tanh = re.search(
        r"^__device__ __forceinline__ float tanh_of\(.*?^}\n",
        (MODS / "scalars.cuh").read_text(),
        re.DOTALL | re.MULTILINE,
    )
    assert tanh is not None
    names = (MODS / "captured_tensor.h", *(DECODING / name for name in ("params.h", "backward_params.h", "mod.cuh")))
    headers = [_plain(path.read_text()) for path in names]
    return [_PRELUDE, tanh.group(), "}", *headers, _plain((MODS / "functions.cuh").read_text())]


class HostMods:
    """A collection of modifications that are compiled into one library and then called by name.

    Parameters
    ----------
    folder : Path
        Folder for the source and the library.
    options : tuple of str
        Compiler options.
    """

    def __init__(self, folder: Path, options: tuple[str, ...] = ("-O1",)) -> None:
        self.folder = folder
        self.options = options
        self.parts = [*_support(), _GRADIENTS]
        self.slots: dict[str, Slots] = {}
        self.places: dict[str, dict[int, Tensor]] = {}
        self.numbers: dict[str, tuple[list[int], list[float]]] = {}
        self.library: Any = None

    def add(self, name: str, score_mod: Any = None, mask_mod: Any = None) -> None:
        """Add the code that is emitted for a score and a mask modification."""
        slots = self.slots[name] = Slots(Captures(score_mod, mask_mod), "cpu")
        score = None if score_mod is None else trace("score_mod", score_mod, True)
        mask = None if mask_mod is None else trace("mask_mod", mask_mod, False)
        self._add_struct(name, emit(score, mask, slots))
        self.parts.append(_BODY.format(name=name, mod=f"{name}_mod", mod_mask="true" if mask_mod else "false"))

    def add_gradient(self, name: str, score_mod: Any, differentiable: Sequence[Tensor] = ()) -> None:
        """Add the emitted derivative with respect to the score and to captured tensors."""
        slots = self.slots[name] = Slots(Captures(score_mod), "cpu")
        gradient = emit_gradient(trace("score_mod", score_mod, True), None, slots, list(differentiable))
        self.places[name] = {slot: differentiable[i] for i, slot in gradient.slots.items()}
        self._add_struct(name, gradient.source)
        self.parts.append(_GRADIENT.format(name=name, mod=f"{name}_mod"))

    def add_training(self, name: str, score_mod: Any, differentiable: Sequence[Tensor] = ()) -> None:
        """Add the code for FlexAttention's backward: "NAME_score", the modification, and "NAME_gradient"."""
        if _TRAINING_TYPES not in self.parts:
            self.parts.append(_TRAINING_TYPES)
        slots = Slots(Captures(score_mod), "cpu")
        gradient = emit_score_gradient(trace("score_mod", score_mod, True), None, slots, list(differentiable))
        self._add_struct(name, gradient.source)
        for what, call in _CALLS.items():
            self.slots[f"{name}_{what}"] = slots
            numbers = ", ".join(map(str, gradient.numbers))
            mod = f"flashbwd::{name}_mod"
            self.parts.append(_TRAINING.format(name=f"{name}_{what}", mod=mod, call=call, numbers=numbers))
        self.places[f"{name}_gradient"] = {slot: differentiable[i] for i, slot in gradient.slots.items()}

    def add_built_in(self, name: str, found: BuiltIn, slots: Slots) -> None:
        """Add a built-in modification with its parameters."""
        if not self.numbers:
            self.parts += [_plain((DECODING / "built_in.cuh").read_text()), _BUILT_IN]
        self.slots[name] = slots
        self.numbers[name] = encode(found, slots)

    def _add_struct(self, name: str, text: str) -> None:
        mod = text[text.rindex("namespace flashbwd {\nstruct Mod") :]
        self.parts.append(mod.replace("struct Mod", f"struct {name}_mod"))

    def compile(self) -> None:
        name = f"mods_{next(_numbers)}"  # dlopen does not reload a name
        (self.folder / f"{name}.cpp").write_text("\n".join([*self.parts, _SIZES]))
        command = [compiler() or "c++", "-std=c++17", "-w", "-ffp-contract=off", "-shared", "-fPIC", *self.options]
        subprocess.run([*command, "-o", f"{name}.so", f"{name}.cpp"], cwd=self.folder, check=True)
        self.library = ctypes.CDLL(str(self.folder / f"{name}.so"))
        assert self.library.captured_bytes() == ctypes.sizeof(CapturedTensor)

    def run(self, name: str, scores: Tensor, indices: Tensor, ds: float = 1.0, first: bool = True) -> Tensor:
        """Results for (n,) scores and (4, n) indices. A derivative also sets ``grad`` of captured float32 tensors.

        ``ds`` and ``first`` are passed to a derivative: the gradient of the result, and whether this call adds to the
        gradients of captured tensors.
        """
        self.library.set_arguments(ctypes.c_float(ds), int(first))
        for slot, tensor in self.places.get(name, {}).items():
            tensor.grad = torch.zeros_like(tensor)
            self.library.set_gradient(slot, ctypes.c_void_p(tensor.grad.data_ptr()))
        params = (ctypes.c_byte * self.library.params_bytes())()
        for place, tensor in enumerate(self.slots[name].tensors()):
            at = self.library.captured_offset() + place * self.library.captured_bytes()
            captured = CapturedTensor.from_buffer(params, at)
            captured.data = tensor.data_ptr()
            captured.strides[: tensor.dim()] = tensor.stride()
            captured.sizes[: tensor.dim()] = tensor.shape
        if name in self.numbers:
            integers, floats = self.numbers[name]
            at = self.library.built_in_offset()
            struct.pack_into(f"{len(integers)}i{len(floats)}f", params, at, *integers, *floats)
        scores, indices = scores.float().contiguous(), indices.to(torch.int32).contiguous()
        results = torch.empty_like(scores)
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (scores, indices, results)]
        function = self.library["built_in" if name in self.numbers else name]
        function(params, len(scores), *pointers)
        return results

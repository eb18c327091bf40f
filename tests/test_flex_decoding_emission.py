"""Emitted modifications compute what PyTorch computes: each operator, compiled for the host and on a GPU."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kit import decoding as kit
from kit.decoding import Shape
from kit.mods import SHAPE, Mod, all_mods, captures_in_steps
from torch import Tensor

import flashbwd
from flashbwd.mods.captures import Captures, Slots
from flashbwd.mods.emit import emit
from flashbwd.mods.trace import trace

NAMES = sorted(all_mods("cpu"))
INDICES = [torch.arange(n).view([-1 if i == d else 1 for i in range(4)]) for d, n in enumerate(SHAPE)]

# Sines are worked out in two ways, by the size of the argument.
SINES: dict[str, Mod] = {
    "sine": lambda s, b, h, q, k: torch.sin(s * 10.0 ** (k % 9) + q),
    "cosine": lambda s, b, h, q, k: torch.cos(s * 10.0 ** (k % 9) + q),
    "sine_at_zeros": lambda s, b, h, q, k: torch.sin(k * 3.14159265) * 1e6,
    "cosine_at_zeros": lambda s, b, h, q, k: torch.cos((k + 0.5) * 3.14159265) * 1e6,
}

# What the device's header and compiler give, for a compiler of the host.
HOST = r"""
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
static float __int_as_float(int i) { float f; memcpy(&f, &i, 4); return f; }
static float __uint_as_float(unsigned i) { return __int_as_float(i); }
static unsigned __float_as_uint(float f) { unsigned i; memcpy(&i, &f, 4); return i; }
static float rsqrt(float x) { return 1 / sqrt(x); }
#define FLASHBWD_INFINITY __int_as_float(0x7f800000)
namespace flashbwd {
using uint32 = unsigned;
struct DecodingParams;
struct AnyMod {
  static constexpr bool* near = nullptr;
  struct Row { Row(const DecodingParams&, int, int, int) {} };
};
inline float exp2_approx(float x) { return exp2f(x); }
inline float float_of_half(unsigned short bits) { _Float16 h; memcpy(&h, &bits, 2); return h; }
inline float float_of_bfloat16(unsigned short bits) { return __int_as_float(bits << 16); }
template <bool kBFloat16> inline unsigned pack_16bit(float x, float) {
  unsigned bits = 0;
  if (kBFloat16) {
    memcpy(&bits, &x, 4);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
  const _Float16 h = x;
  memcpy(&bits, &h, 2);
  return bits;
}
"""


def _host_source(mods: dict[str, Mod], slots: dict[str, Slots]) -> str:
    """A shared library of all ``mods``: ``void NAME(const DecodingParams*, float* scores)``."""
    root = Path(__file__).parent.parent / "csrc" / "decoding"
    tanh = re.search(r"^// Relative error.*?^}\n", (root / "ptx.cuh").read_text(), re.DOTALL | re.MULTILINE)
    assert tanh is not None
    functions = re.sub(r"^#.*$", "", torch.ops.flashbwd.decoding_mod_functions(), flags=re.MULTILINE)
    parts = [
        HOST,
        tanh.group(),
        "}",
        re.sub(r"^#.*$", "", (root / "params.h").read_text(), flags=re.MULTILINE),
        functions,
    ]
    for name, mod in mods.items():
        slots[name] = Slots(Captures(mod), "cpu")
        text = emit(trace("score_mod", mod, True), None, slots[name])
        struct = text[text.rindex("namespace flashbwd {") :].replace("struct Mod", f"struct {name}_mod")
        parts.append(struct)
        parts.append(f"""
extern "C" void mod_{name}(const flashbwd::DecodingParams* p, float* s) {{
  for (int b = 0; b < {SHAPE[0]}; ++b) for (int h = 0; h < {SHAPE[1]}; ++h)
    for (int q = 0; q < {SHAPE[2]}; ++q) {{
      const flashbwd::{name}_mod::Row row(*p, b, h, q);
      for (int k = 0; k < {SHAPE[3]}; ++k, ++s) {{
        bool near = true;
        const float quick = flashbwd::{name}_mod::score_mod(*p, row, *s, b, h, q, k, &near);
        *s = near ? quick : flashbwd::{name}_mod::score_mod(*p, row, *s, b, h, q, k);
      }}
    }}
}}""")
    parts.append("""
extern "C" int captured_bytes() { return sizeof(flashbwd::CapturedTensor); }
extern "C" int captured_offset() { return offsetof(flashbwd::DecodingParams, captured); }
extern "C" int params_bytes() { return sizeof(flashbwd::DecodingParams); }""")
    return "\n".join(parts)


class _CapturedTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("strides", ctypes.c_longlong * 5), ("sizes", ctypes.c_int * 5)]


@pytest.fixture(scope="module")
def on_host(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Tensor], Tensor]:
    """``run(name, scores)``: the emitted modification as the host's compiler builds it."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("emission")
    slots: dict[str, Slots] = {}
    (folder / "mods.cpp").write_text(_host_source(all_mods("cpu") | captures_in_steps("cpu") | SINES, slots))
    command = [compiler, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-o", "mods.so", "mods.cpp"]
    subprocess.run(command, cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "mods.so"))
    assert library.captured_bytes() == ctypes.sizeof(_CapturedTensor)

    def run(name: str, scores: Tensor) -> Tensor:
        params = (ctypes.c_byte * library.params_bytes())()
        for place, tensor in enumerate(slots[name].tensors()):
            at = library.captured_offset() + place * library.captured_bytes()
            captured = _CapturedTensor.from_buffer(params, at)
            captured.data = tensor.data_ptr()
            captured.strides[: tensor.dim()] = tensor.stride()
            captured.sizes[: tensor.dim()] = tensor.shape
        result = scores.clone()
        library[f"mod_{name}"](params, ctypes.c_void_p(result.data_ptr()))
        return result

    return run


@pytest.mark.parametrize("name", NAMES)
def test_an_emitted_modification_computes_what_pytorch_does(
    name: str, on_host: Callable[[str, Tensor], Tensor]
) -> None:
    scores = torch.rand(SHAPE, generator=torch.Generator().manual_seed(0)) * 8 - 4
    indices = [index.to(torch.int32) for index in INDICES]
    expected = all_mods("cpu")[name](scores, *indices).expand(SHAPE).float()
    torch.testing.assert_close(on_host(name, scores), expected, rtol=2e-5, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("name", SINES)
def test_sines_are_right_for_any_argument(name: str, on_host: Callable[[str, Tensor], Tensor]) -> None:
    scores = torch.rand(SHAPE, generator=torch.Generator().manual_seed(0)) * 8 - 4
    expected = SINES[name](scores, *(index.to(torch.int32) for index in INDICES)).expand(SHAPE)
    torch.testing.assert_close(on_host(name, scores), expected, rtol=3e-7, atol=3e-7)


@pytest.mark.parametrize("name", sorted(captures_in_steps("cpu")))
def test_a_captured_tensor_may_be_indexed_in_steps(name: str, on_host: Callable[[str, Tensor], Tensor]) -> None:
    mod = captures_in_steps("cpu")[name]
    zero = torch.zeros(())
    expected = [mod(zero, *index) for index in torch.cartesian_prod(*(torch.arange(n) for n in SHAPE))]
    torch.testing.assert_close(on_host(name, torch.zeros(SHAPE)), torch.stack(expected).view(SHAPE))


def test_what_no_key_changes_is_worked_out_once_a_row() -> None:
    table = torch.zeros(3)

    def emitted(mod: Mod) -> tuple[str, str]:
        text = emit(trace("score_mod", mod, True), None, Slots(Captures(mod), "cpu"))
        struct = text[text.rindex("struct Mod") :]
        row, _, score = struct.partition("float score_mod(")
        return row, score

    row, score = emitted(lambda s, b, h, q, k: s * table[h] + table[q])
    assert row.count("load_captured") == 2
    assert "load_captured" not in score
    row, score = emitted(lambda s, b, h, q, k: s * torch.exp(table[h] * 2))
    assert "exp(" in row
    assert "exp(" not in score
    row, score = emitted(lambda s, b, h, q, k: s * table[(k + h) % 3])
    assert "load_captured" not in row
    assert "load_captured" in score
    row, _ = emitted(lambda s, b, h, q, k: s * torch.exp(h * 2.0))
    assert "struct Row" not in row


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(captures_in_steps("cpu")))
def test_a_captured_tensor_may_be_indexed_in_steps_on_a_gpu(name: str) -> None:
    tensors = Shape(batch=2, heads=4, heads_kv=2, seqlen_q=5, seqlen_k=40).tensors(torch.float16, "cuda")
    mod = captures_in_steps("cuda")[name]
    out = flashbwd.flex_decoding(*tensors, mod, enable_gqa=True)
    expected = flashbwd.flex_decoding(*(t.double() for t in tensors), mod, enable_gqa=True)
    torch.testing.assert_close(out.double(), expected, rtol=0.01, atol=0.005)  # type: ignore[union-attr]


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(8))
def test_emitted_modifications_compute_what_pytorch_does_on_a_gpu(part: int) -> None:
    """Sums of modifications, to compile less often; each squashed, so that none hides the others."""
    shape = Shape(batch=2, heads=4, heads_kv=2, seqlen_q=5, seqlen_k=40)
    tensors = shape.tensors(torch.float16, "cuda")
    without_nan = {name: mod for name, mod in all_mods("cuda").items() if "nan" not in name}
    mods = [without_nan[name] for name in sorted(without_nan)][part::8]

    def mod(s: Tensor, *indices: Tensor) -> Tensor:
        return sum((torch.sin(m(s, *indices) * 1.0) for m in mods), s * 0.0)

    with torch.no_grad():
        out = flashbwd.flex_decoding(*tensors, mod, enable_gqa=True)
    expected, _ = kit.oracle(shape, *tensors, mod, dtype=torch.float32)
    assert isinstance(out, Tensor)
    torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("seqlen_q", [1, 9])
@pytest.mark.parametrize("dims", [(16, 16), (128, 128), (192, 256)], ids=str)
def test_what_is_worked_out_once_a_row_serves_every_tile(dims: tuple[int, int], seqlen_q: int) -> None:
    """Beside sines near and far, which are worked out in two ways: side by side, and one after the other."""
    shape = Shape(2, 8, 2, seqlen_q, 203, *dims)
    tensors = shape.tensors(torch.bfloat16, "cuda")
    factors, lengths = torch.rand(8, device="cuda") + 0.5, torch.tensor([200, 130], device="cuda")
    shifts, far = torch.randint(0, 9, (9, 8), device="cuda"), torch.tensor(1e3, device="cuda")

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * factors[h] + torch.sin(k * far) + torch.cos((k + shifts[q, h]) * 0.5)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k + shifts[q, 3]) % 7 < lengths[b] - k

    expected, _ = kit.oracle(shape, *tensors, mod, kit.dense_mask(mask_mod, shape, "cuda"))
    mask = kit.block_mask(mask_mod, shape, "cuda")
    with torch.no_grad():
        out = flashbwd.flex_decoding(*tensors, mod, mask, enable_gqa=True)
        torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.01)
        out = flashbwd.flex_decoding(*tensors, mod, enable_gqa=True)
    expected, _ = kit.oracle(shape, *tensors, mod)
    torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.01)

"""Emitted modifications give the results of PyTorch: each operator, compiled for the host and run on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from kit import decoding as kit
from kit.decoding import Shape
from kit.emission import HostMods, compiler
from kit.mods import SHAPE, Mod, all_mods, captures_in_steps
from torch import Tensor

import flashbwd
from flashbwd.mods.captures import Captures, Slots
from flashbwd.mods.derivative import emit_gradient
from flashbwd.mods.emit import emit
from flashbwd.mods.trace import trace

NAMES = sorted(all_mods("cpu"))
INDICES = [torch.arange(n).view([-1 if i == d else 1 for i in range(4)]) for d, n in enumerate(SHAPE)]

# Sines are computed in two ways, depending on the size of the argument.
SINES: dict[str, Mod] = {
    "sine": lambda s, b, h, q, k: torch.sin(s * 10.0 ** (k % 9) + q),
    "cosine": lambda s, b, h, q, k: torch.cos(s * 10.0 ** (k % 9) + q),
    "sine_at_zeros": lambda s, b, h, q, k: torch.sin(k * 3.14159265) * 1e6,
    "cosine_at_zeros": lambda s, b, h, q, k: torch.cos((k + 0.5) * 3.14159265) * 1e6,
}

# Modifications whose results must equal PyTorch's bit for bit.
EXACT: dict[str, Mod] = {
    "cube_in_16_bits": lambda s, b, h, q, k: (s.bfloat16() ** 3).float(),
    "integer_rounded_to_16_bits": lambda s, b, h, q, k: (s.bfloat16() * (k + 257)).float(),
    "bool_equal_to_2": lambda s, b, h, q, k: torch.where((q > 1) == 2, s, -s),
    "bool_less_than_2": lambda s, b, h, q, k: torch.where((q > 1) < 2, s, -s),
    "floor_in_16_bits": lambda s, b, h, q, k: torch.div(
        s.bfloat16(), (k + 3).bfloat16(), rounding_mode="floor"
    ).float(),
    "integer_of_62_bits": lambda s, b, h, q, k: s + (k.long() + (2**62 + 1)) % 7,
}
# PyTorch's CUDA operator rounds the quotient of 16-bit numbers to 16 bits before it truncates it.
TRUNCATED: Mod = lambda s, b, h, q, k: torch.div(s.bfloat16(), (k + 3).bfloat16(), rounding_mode="trunc").float()  # noqa: E731
EXPONENTS = (2, 3, 0.5, -1, -0.5)  # powers that PyTorch computes without pow
SPECIAL = torch.tensor([-torch.inf, torch.inf, torch.nan, 0.0, -0.0, -1.0, 1.0, 1.1, -3.3, 1e-20, 7e12])


def power(exponent: float) -> Mod:
    return lambda s, b, h, q, k: s**exponent


@pytest.fixture(scope="module")
def on_host(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Tensor], Tensor]:
    """A function of (name, scores) that runs the emitted modification, compiled with the host compiler."""
    if compiler() is None:
        pytest.skip("there is no C++ compiler")
    host = HostMods(tmp_path_factory.mktemp("emission"))
    powers = {f"power_{i}": power(exponent) for i, exponent in enumerate(EXPONENTS)}
    for name, mod in (
        all_mods("cpu") | captures_in_steps("cpu") | SINES | EXACT | powers | {"truncated": TRUNCATED}
    ).items():
        host.add(f"mod_{name}", mod)
    host.compile()
    indices = torch.cartesian_prod(*(torch.arange(n) for n in SHAPE)).T
    return lambda name, scores: host.run(f"mod_{name}", scores.flatten(), indices).view(SHAPE)


@pytest.mark.parametrize("name", NAMES)
def test_an_emitted_modification_agrees_with_pytorch(name: str, on_host: Callable[[str, Tensor], Tensor]) -> None:
    scores = torch.rand(SHAPE, generator=torch.Generator().manual_seed(0)) * 8 - 4
    indices = [index.to(torch.int32) for index in INDICES]
    expected = all_mods("cpu")[name](scores, *indices).expand(SHAPE).float()
    torch.testing.assert_close(on_host(name, scores), expected, rtol=2e-5, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("name", SINES)
def test_sines_are_right_for_any_argument(name: str, on_host: Callable[[str, Tensor], Tensor]) -> None:
    scores = torch.rand(SHAPE, generator=torch.Generator().manual_seed(0)) * 8 - 4
    expected = SINES[name](scores, *(index.to(torch.int32) for index in INDICES)).expand(SHAPE)
    torch.testing.assert_close(on_host(name, scores), expected, rtol=3e-7, atol=3e-7)


@pytest.mark.parametrize("name", EXACT)
def test_roundings_and_type_promotions_equal_those_of_pytorch(
    name: str, on_host: Callable[[str, Tensor], Tensor]
) -> None:
    scores = torch.rand(SHAPE, generator=torch.Generator().manual_seed(0)) * 8 - 4
    expected = EXACT[name](scores, *(index.to(torch.int32) for index in INDICES)).expand(SHAPE)
    assert torch.equal(on_host(name, scores), expected)


def test_a_quotient_of_16_bits_is_rounded_before_it_is_truncated(on_host: Callable[[str, Tensor], Tensor]) -> None:
    scores = torch.rand(SHAPE, generator=torch.Generator().manual_seed(0)) * 600
    a, b = scores.bfloat16(), (INDICES[3] + 3).bfloat16()
    expected = (a / b).trunc().float()
    assert not torch.equal(expected, torch.trunc(a.float() / b.float()))
    assert torch.equal(on_host("truncated", scores), expected)


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_a_power_has_pytorchs_results_also_at_zeros_and_infinities(
    exponent: float, on_host: Callable[[str, Tensor], Tensor]
) -> None:
    scores = SPECIAL.repeat(-(-math.prod(SHAPE) // len(SPECIAL)))[: math.prod(SHAPE)].view(SHAPE)
    found, expected = on_host(f"power_{EXPONENTS.index(exponent)}", scores), scores**exponent
    torch.testing.assert_close(found, expected, rtol=2e-7, atol=0, equal_nan=True)
    finite = ~expected.isnan()
    assert torch.equal(found[finite].signbit(), expected[finite].signbit())


@pytest.mark.parametrize("name", sorted(captures_in_steps("cpu")))
def test_a_captured_tensor_may_be_indexed_in_steps(name: str, on_host: Callable[[str, Tensor], Tensor]) -> None:
    mod = captures_in_steps("cpu")[name]
    zero = torch.zeros(())
    expected = [mod(zero, *index) for index in torch.cartesian_prod(*(torch.arange(n) for n in SHAPE))]
    torch.testing.assert_close(on_host(name, torch.zeros(SHAPE)), torch.stack(expected).view(SHAPE))


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("with_score", [False, True])
def test_the_kernels_of_both_passes_are_told_which_functions_there_are(with_score: bool, with_mask: bool) -> None:
    def mod(s: Tensor, *_: Tensor) -> Tensor:
        return s * 2

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k

    score = trace("score_mod", mod, True) if with_score else None
    mask = trace("mask_mod", mask_mod, False) if with_mask else None
    slots = Slots(Captures(mod, mask_mod), "cpu")
    for text in (emit(score, mask, slots), emit_gradient(score, mask, slots, []).source):
        struct = text[text.rindex("struct Mod") :]
        assert f"kHasScoreMod = {'true' if with_score else 'false'};" in struct
        assert f"kHasMask = {'true' if with_mask else 'false'};" in struct


def test_terms_that_do_not_depend_on_the_key_are_computed_once_per_row() -> None:
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
def test_emitted_modifications_on_a_gpu_agree_with_pytorch(part: int) -> None:
    """Each case sums several modifications, to compile less often. Sines bound the terms, so none hides the others."""
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
def test_terms_computed_once_per_row_are_right_in_every_tile(dims: tuple[int, int], seqlen_q: int) -> None:
    """The modification also has sines of small and large arguments, which the kernel computes in two different ways."""
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

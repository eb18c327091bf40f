"""Values in 16 bits in a modification: FlexAttention's backward does not round them, as PyTorch's forward does not.

Inductor computes such values in float32. The LSE comes from its forward, so the probabilities of the backward must too.
PyTorch writes the score itself in the dtype of the inputs: in a compiled model, ``silu(score)`` ends with a cast to it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kit.compiled import OURS, Compiled, on_the_cpu
from kit.emission import HostMods, compiler
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from flashbwd.flex.mask_bits import evaluate, unpack
from flashbwd.flex.score_change import Slopes, score_change_of
from flashbwd.flex.tile import Tile
from flashbwd.mods.in_graph import bound
from flashbwd.reference.decoding import PARTIAL, DecodingCall, decoding_forward
from flashbwd.reference.decoding_backward import decoding_backward
from flashbwd.reference.modifications import unrounded

Mod = Callable[..., Tensor]
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
SCORES = torch.linspace(-3.1, 3.3, 64)
INDICES = torch.stack([(torch.arange(len(SCORES)) * step) % 7 for step in (1, 2, 4, 5)]).int()
RATES = torch.linspace(0.11, 1.3, 7)
"""By head or key, and not exact in 16 bits."""


def silu(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.nn.functional.silu(score)


def compare(host: HostMods, name: str, exact: Mod) -> None:
    """Compare a modification and its derivative with float64. Every rounding to 16 bits fails."""
    scores = SCORES.double().requires_grad_()
    want = exact(scores, *INDICES)
    (derivative,) = torch.autograd.grad(want.sum(), [scores])
    for what, expected in (("score", want.detach()), ("gradient", derivative)):
        got = host.run(f"{name}_{what}", SCORES, INDICES).double()
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_values_in_16_bits_are_not_rounded(dtype: torch.dtype, tmp_path: Path) -> None:
    rates = RATES.to(dtype)
    mods: dict[str, tuple[Mod, Mod]] = {  # and what they compute without a rounding
        "cast": (lambda s, b, h, q, k: s.to(dtype) * 1.7, lambda s, b, h, q, k: s * 1.7),
        "activation": (lambda s, b, h, q, k: torch.sigmoid(s.to(dtype)), lambda s, b, h, q, k: torch.sigmoid(s)),
        "slopes": (
            lambda s, b, h, q, k: s - rates[h] * (q - k).abs(),
            lambda s, b, h, q, k: s - rates.double()[h] * (q - k).abs(),
        ),
        "captured": (
            lambda s, b, h, q, k: s * (rates[h] * rates[k]),
            lambda s, b, h, q, k: s * (rates.double()[h] * rates.double()[k]),
        ),
    }
    host = HostMods(tmp_path)
    for name, (mod, _) in mods.items():
        host.add_training(name, mod)
    host.compile()
    for name, (_, exact) in mods.items():
        compare(host, name, exact)


@pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_the_gradient_of_a_captured_tensor_is_not_rounded(dtype: torch.dtype, tmp_path: Path) -> None:
    rates, others = RATES.clone(), RATES.to(dtype)  # the host adds to float32 only
    host = HostMods(tmp_path)
    host.add_training("scaled", lambda s, b, h, q, k: s * (rates[h] * (others[q] * others[k])), [rates])
    host.compile()
    host.run("scaled_gradient", SCORES, INDICES)
    exact, factors = RATES.double().requires_grad_(), others.double()
    _, h, q, k = INDICES
    (want,) = torch.autograd.grad((SCORES.double() * exact[h] * factors[q] * factors[k]).sum(), [exact])
    assert rates.grad is not None
    torch.testing.assert_close(rates.grad.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_an_activation_in_a_compiled_model_is_not_rounded(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_the_cpu(monkeypatch):
        inputs = [torch.randn(1, 2, 32, 16, dtype=dtype).requires_grad_() for _ in range(3)]
        compiled = Compiled(lambda q, k, v: flex_attention(q, k, v, silu))
        torch.autograd.grad(compiled(*inputs).float().sum(), inputs)
    (text,) = (node.args[13] for module in compiled.graphs for node in module.graph.nodes if node.target is OURS)
    assert str(dtype) in text  # the cast is in the graph
    host = HostMods(tmp_path)
    host.add_training("compiled", bound(text, []))
    host.compile()
    compare(host, "compiled", silu)


# ---- evaluated by PyTorch -------------------------------------------------------------------------


def distances(positions: Tensor) -> Mod:
    """Return a mask of pairs that are near each other. In 16 bits, some distances would be rounded to the limit."""
    return lambda b, h, q, k: (positions[q] - positions[k]).abs() * (q + 300).to(positions.dtype) <= 330


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_bits_of_a_mask_are_not_rounded(dtype: torch.dtype) -> None:
    positions = torch.rand(256, generator=torch.Generator().manual_seed(3)).to(dtype) * 3
    mask = create_block_mask(distances(positions), None, None, 256, 256, device="cpu", BLOCK_SIZE=128)
    states = torch.full((1, 1, 2, 2), PARTIAL)
    tiles = torch.cartesian_prod(*[torch.arange(n) for n in states.shape])
    bits, _, _ = evaluate(mask, states, tiles, (1, 1, 256, 256), Tile(128, 128))
    got = unpack(bits).view(2, 2, 128, 128).transpose(1, 2).reshape(256, 256)
    q, k = torch.arange(256)[:, None], torch.arange(256)
    assert torch.equal(got, distances(positions.double())(0, 0, q, k))
    assert not torch.equal(got, distances(positions)(0, 0, q, k))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_the_reference_after_pytorchs_forward_does_not_round(dtype: torch.dtype) -> None:
    positions = torch.rand(40, generator=torch.Generator().manual_seed(3)).to(dtype) * 3
    rates = RATES[:4].clone().requires_grad_()

    def steep(table: Tensor, scale: Tensor) -> Mod:
        dtype = table.dtype
        return lambda s, b, h, q, k: (s.to(dtype) + scale[h].to(dtype) * (table[q] * table[k] * -3)).to(dtype)

    q, k, v, dout = (torch.randn(1, 4, 40, 8, dtype=torch.float64) for _ in range(4))
    inputs = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    exact_rates = rates.detach().double().requires_grad_()
    index = [
        torch.arange(n).view(shape) for n, shape in ((1, (1, 1, 1, 1)), (4, (4, 1, 1)), (40, (40, 1)), (40, (40,)))
    ]
    scores = steep(positions.double(), exact_rates)(inputs[0] @ inputs[1].mT, *index)
    out, lse = scores.softmax(-1) @ inputs[2], scores.logsumexp(-1)
    want = torch.autograd.grad(out, [*inputs, exact_rates], dout)

    call = DecodingCall(steep(positions, rates), None, 1.0, unrounded=True)
    q, k, v, dout, out, lse = (tensor.detach().float() for tensor in (q, k, v, dout, out, lse))
    *grads, found = decoding_backward(call, q, k, v, out, lse, dout, None, [rates])
    for got, expected in zip([*grads, *found], want, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x.half() + 1, torch.tensor([1.1, 1.2])),
        (lambda x: x.to(torch.bfloat16).exp(), torch.tensor([0.1, 0.2]).exp()),
        (lambda x: x.type(torch.half) * x.bfloat16(), torch.tensor([0.1, 0.2]) ** 2),
        (lambda x: torch.ops.aten._to_copy.default(x, dtype=torch.half), torch.tensor([0.1, 0.2])),
        (lambda x: x.double().half().double(), torch.tensor([0.1, 0.2]).double()),
        (lambda x: (x.int() + 2049).half(), torch.tensor([2049.0, 2049.0])),
        (lambda x: x.type("torch.HalfTensor"), torch.tensor([0.1, 0.2])),
        (lambda x: torch.full_like(x, 0.3, dtype=torch.half), torch.tensor([0.3, 0.3])),
        (lambda x: x + torch.ops.aten.scalar_tensor(0.3, dtype=torch.bfloat16), torch.tensor([0.4, 0.5])),
        (lambda x: torch.ops.aten.to.dtype(x, torch.half), torch.tensor([0.1, 0.2])),
        (lambda x: torch.ops.prims.convert_element_type(x, torch.half), torch.tensor([0.1, 0.2])),
    ],
)
def test_no_function_rounds(function: Callable[[Tensor], Tensor], expected: Tensor) -> None:
    assert torch.equal(unrounded(function)(torch.tensor([0.1, 0.2])), expected)


def test_what_inductor_rounds_stays_rounded() -> None:
    got = unrounded(lambda x: x + torch.tensor(0.3, dtype=torch.half))(torch.zeros(()))
    assert torch.equal(got, torch.tensor(0.3, dtype=torch.half).float())


def test_writing_to_a_cast_does_not_write_to_its_source() -> None:
    def mod(x: Tensor) -> Tensor:
        half = x.to(torch.half)
        half *= 0.5
        return x + half

    assert torch.equal(unrounded(mod)(torch.tensor([2.0])), torch.tensor([3.0]))


def test_parts_of_a_large_tensor_are_not_copied_to_float32() -> None:
    table = torch.arange(24).half().view(2, 3, 4)
    dtypes = []

    def mod(i: Tensor) -> Tensor:
        part = table[0].view(-1)
        dtypes.append(part.dtype)
        return part.take(i) * 1.1

    got = torch.vmap(unrounded(mod))(torch.arange(12))
    assert dtypes == [torch.half]
    assert torch.equal(got, torch.arange(12) * 1.1)


@pytest.mark.parametrize("name", ["cast", "product", "activation", "slopes", "scaled_slopes"])
def test_slopes_of_alibi_are_known_and_not_rounded(name: str) -> None:
    rates, exact = RATES[:4].bfloat16(), RATES[:4].bfloat16().double()
    mods: dict[str, tuple[Mod, Tensor]] = {
        "cast": (
            lambda s, b, h, q, k: s - ((h + 1) * 0.1).to(torch.bfloat16).float() * (q - k).abs(),
            torch.arange(1, 5) * 0.1,
        ),
        "product": (lambda s, b, h, q, k: s - (rates[h] * 0.3).float() * (q - k).abs(), exact * 0.3),
        "activation": (lambda s, b, h, q, k: s - rates[h].sigmoid().float() * (q - k).abs(), exact.sigmoid()),
        "slopes": (lambda s, b, h, q, k: s - rates[h] * (q - k).abs(), exact),
        "scaled_slopes": (lambda s, b, h, q, k: s - rates[h] * 0.3 * (q - k).abs(), exact * 0.3),
    }
    mod, want = mods[name]
    change = score_change_of(mod)
    assert change is not None and change.alibi is not None
    got = Slopes(change.alibi, mod, 1, 4).tensor(torch.device("cpu"))
    torch.testing.assert_close(got.double(), want.double(), rtol=1e-6, atol=0)


def test_contributions_to_the_gradient_of_a_captured_tensor_are_not_rounded() -> None:
    """In fp16 each is less than half of its smallest number, and the sum, which is rounded, is several of them."""
    table = torch.zeros(4, dtype=torch.float16, requires_grad=True)
    q, k, v, dout = (torch.randn(1, 4, 30, 8, generator=torch.Generator().manual_seed(1)) for _ in range(4))
    results = []
    for dtype in (torch.float16, torch.float32):
        leaf = table.detach().to(dtype).requires_grad_()
        call = DecodingCall(lambda s, b, h, i, j, leaf=leaf: s + leaf[j % 4], None, 1.0, unrounded=True)  # type: ignore[misc]
        out, lse, _ = decoding_forward(call, q, k, v)
        *_, (grad,) = decoding_backward(call, q, k, v, out, lse, dout * 2e-7, None, [leaf])
        results.append(grad)
    smallest = torch.finfo(torch.float16).smallest_normal * torch.finfo(torch.float16).eps
    assert results[1].abs().max() > 3 * smallest
    torch.testing.assert_close(results[0].float(), results[1], rtol=0, atol=smallest / 2)

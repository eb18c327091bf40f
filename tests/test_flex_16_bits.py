"""Values in 16 bits in a score_mod: FlexAttention's backward does not round them, as PyTorch's forward does not.

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
from torch.nn.attention.flex_attention import flex_attention

from flashbwd.mods.in_graph import bound

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

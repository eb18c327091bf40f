"""Checks an installation in seconds.

Compares the gradients of attention and LayerNorm with float64 autograd of the plain formula, and checks that PyTorch's
operators and the pass of its compiler can be replaced and restored. Needs only the package and torch, so it runs
wherever a wheel is installed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch._inductor import config

import flashbwd


def check(name: str, got: torch.Tensor | None, want: torch.Tensor | None) -> None:
    assert got is not None
    assert want is not None
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9, msg=lambda text: f"{name}: {text}")


def attention() -> None:
    shapes = {"q": (2, 5, 4, 8), "k": (2, 7, 2, 8), "v": (2, 7, 2, 6)}
    q, k, v = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes.values())
    keys, values = (x.repeat_interleave(2, dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) / 8**0.5
    hidden = torch.ones(5, 7, dtype=torch.bool).tril(2).logical_not()
    scores = scores.masked_fill(hidden, float("-inf"))
    lse = scores.logsumexp(-1)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), values)
    dout = torch.randn_like(out)
    want = torch.autograd.grad(out, (q, k, v), dout)
    inputs = [x.detach() for x in (dout, q, k, v, out, lse)]
    grads = flashbwd.attention_backward(*inputs, causal=True)
    for name, got, expected in zip(shapes, (grads.dq, grads.dk, grads.dv), want, strict=True):
        check(f"attention d{name}", got, expected)


def layer_norm() -> None:
    x = torch.randn(6, 33, dtype=torch.float64, requires_grad=True)
    gamma, beta = (torch.randn(33, dtype=torch.float64, requires_grad=True) for _ in range(2))
    mu = x.mean(-1, keepdim=True)
    rs = (x.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt()
    z = (x - mu) * rs * gamma + beta
    dz = torch.randn_like(z)
    want = torch.autograd.grad(z, (x, gamma, beta), dz)
    grads = flashbwd.layer_norm_backward(*(t.detach() for t in (dz, x, mu, rs, gamma)))
    for name, got, expected in zip(("dx", "dgamma", "dbeta"), grads, want, strict=True):
        check(f"layer_norm {name}", got, expected)


def overrides() -> None:
    operators = [name for name in flashbwd.stats() if name.startswith("aten::")]
    assert operators

    def dispatcher() -> list[str]:
        return [torch._C._dispatch_dump(name) for name in operators]

    before, passes = dispatcher(), config.post_grad_custom_pre_pass
    with flashbwd.enable():
        expected = torch.version.cuda is not None
        assert all((now != was) is expected for now, was in zip(dispatcher(), before, strict=True))
        assert config.post_grad_custom_pre_pass is not passes, "compiled models would keep PyTorch's flex_attention"
    assert dispatcher() == before, "the end of enable() did not restore PyTorch's kernels"
    assert config.post_grad_custom_pre_pass is passes, "the end of enable() left its pass in PyTorch's compiler"


def main() -> None:
    torch.manual_seed(0)
    attention()
    layer_norm()
    overrides()
    folder = Path(flashbwd.__file__).parent
    libraries = ", ".join(sorted(path.name for path in folder.glob("*.so")))
    print(f"flashbwd {flashbwd.__version__} in {folder} ({libraries})")
    print(f"right with torch {torch.__version__}, Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()

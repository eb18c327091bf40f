"""Calls can be captured in a CUDA graph: the first call of a process, calls with dropout, seeds from the host."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import flashbwd
from flashbwd import _forward, dropout_add_norm, reference
from flashbwd.options import AttentionOptions
from flashbwd.reference import norms

# ---- without a GPU: which operators reach the device ----


class RefuseTransfers(TorchDispatchMode):
    """Raises if an operator copies between the CPU and the GPU, or waits for a value on the GPU."""

    WAIT = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::unique")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        given = {t.device.type for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        if name in self.WAIT and "cuda" in given:
            raise AssertionError(f"{name} waits for the GPU")
        involved = given | {t.device.type for t in tree_leaves(result) if isinstance(t, Tensor)}
        if name in ("aten::_to_copy", "aten::copy_", "aten::_copy_from") and len(involved) > 1:
            raise AssertionError(f"{name} copies between {' and '.join(sorted(involved))}")
        return result


def cuda(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def features(name: str) -> dict[str, Any]:
    """The options of a call with q (2, 40, 4, 16) and k (2, 50, 2, 16)."""
    extras: dict[str, Callable[[], dict[str, Any]]] = {
        "plain": dict,
        "softcap": lambda: {"softcap": 3.0},
        "bias": lambda: {"attn_bias": cuda(1, 4, 40, 50)},
        "key_mask": lambda: {"key_mask": cuda(2, 50, dtype=torch.bool), "sink": cuda(4)},
        "alibi": lambda: {"alibi_slopes": cuda(2, 4)},
        "sink": lambda: {"sink": cuda(4)},
    }
    options = {"softmax_scale": 0.2, "softcap": 0.0, "attn_bias": None, "alibi_slopes": None, "sink": None}
    return options | {"causal": "bottom_right", "max_seqlen_q": 40, "max_seqlen_k": 50} | extras[name]()


FEATURES = ["plain", "softcap", "bias", "key_mask", "alibi", "sink"]
has_fake_cuda = pytest.mark.skipif(torch.version.cuda is None, reason="this PyTorch has no CUDA tensors to imitate")


@has_fake_cuda
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
@pytest.mark.parametrize("name", FEATURES)
def test_the_reference_forward_and_backward_copy_nothing_from_the_host(name: str, dropout_p: float) -> None:
    with FakeTensorMode(), RefuseTransfers():
        q, k, v = cuda(2, 40, 4, 16), cuda(2, 50, 2, 16), cuda(2, 50, 2, 16)
        options = AttentionOptions(**features(name), dropout_p=dropout_p, window_left=30, window_right=0)
        out, lse, rng = _forward.run("reference", q, k, v, options)
        if dropout_p:
            options = options._replace(rng_seed=rng[0], rng_offset=rng[1], rng_layout="efficient64")
        bias, sink = options.attn_bias, options.sink
        reference.attention_backward(
            out,
            q,
            k,
            v,
            out,
            lse,
            options,
            dq=torch.empty_like(q),
            dk=torch.empty_like(k),
            dv=torch.empty_like(v),
            dbias=None if bias is None else torch.empty_like(bias),
            dsink=None if sink is None else torch.empty_like(sink),
        )


@has_fake_cuda
def test_the_dropout_of_the_reference_norms_copies_nothing_from_the_host() -> None:
    with FakeTensorMode(), RefuseTransfers():
        x, rng = cuda(8, 16), cuda(2, dtype=torch.int64)
        assert norms._dropped(x, None, rng, 0.25).shape == x.shape


@has_fake_cuda
@pytest.mark.parametrize(
    "word", [7, torch.tensor(7), torch.tensor(7, dtype=torch.uint64)], ids=["int", "cpu", "uint64"]
)
def test_a_seed_of_the_host_reaches_the_gpu_without_a_copy(word: Any) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), RefuseTransfers():
        rng = dropout_add_norm._rng_tensor(flashbwd.RngState(word, word, "efficient64"), cuda(8, 16))
    assert rng is not None
    assert (rng.device.type, rng.dtype, rng.shape) == ("cuda", torch.int64, (2,))


def test_copies_and_waits_raise() -> None:
    """Checks RefuseTransfers, on which the tests above rely."""
    if torch.version.cuda is None:
        pytest.skip("this PyTorch has no CUDA tensors to imitate")
    with FakeTensorMode(), RefuseTransfers():
        x = cuda(4)
        calls: list[Callable[[], Tensor]] = [
            lambda: x.cpu(),
            lambda: x.copy_(torch.empty(4)),
            lambda: x.copy_(torch.empty(4), non_blocking=True),
        ]
        if not torch.cuda.is_available():  # a real copy, which no mode sees
            calls.append(lambda: torch.tensor([1, 0], device="cuda"))
        for call in calls:
            with pytest.raises(AssertionError, match="copies between cpu and cuda"):
                call()


# ---- on a GPU ----

PROGRAM = """
import torch, flashbwd
aten = torch.ops.aten
def leaf(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)
q, k, v = (leaf(2, 256, 4, 64) for _ in range(3))
q32, k32, v32 = (leaf(2, 256, 4, 64, dtype=torch.float32) for _ in range(3))
bias = torch.randn(1, 1, 256, 256, device="cuda", dtype=torch.bfloat16)
x, w = leaf(64, 512, dtype=torch.float32), torch.ones(512, device="cuda", requires_grad=True)
leaves = [q, k, v, q32, k32, v32, x, w]
{prepare}
torch.cuda.synchronize()

def step():
    out = {call}
    return out, torch.autograd.grad(out.float().square().sum(), leaves, allow_unused=True)

graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out, grads = step()
results = []
for _ in range(2):
    graph.replay()
    torch.cuda.synchronize()
    given = [g for g in grads if g is not None]
    assert given and all(bool(t.isfinite().all()) for t in (out, *given))
    results.append([t.clone() for t in (out, *given)])
replays_agree = all(torch.equal(a, b) for a, b in zip(*results))
assert replays_agree == {replays_agree}, replays_agree
if replays_agree:
    torch.cuda.synchronize()
    eager, eager_grads = step()
    torch.testing.assert_close(out, eager, rtol=2e-2, atol=1e-2)  # cuDNN's forward may follow flash's here
    for a, b in zip(grads, eager_grads):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
print("captured")
"""
# Initialisation that PyTorch does in its own first calls. "cublas": the cuBLAS handles of this thread and of autograd's
# thread, which the products of the reference need. "forwards": also every forward that flashbwd.attention may choose.
# In both cases, no function of flashbwd has run before the capture.
CUBLAS = """
for t in (q, q32):
    torch.bmm(t.flatten(1, 2), t.flatten(1, 2).mT).sum().backward()
"""
FORWARDS = """
with torch.no_grad():
    for p in (0.0, 0.1):
        aten._flash_attention_forward(q, k, v, None, None, 256, 256, p, False, False)
    if torch.cuda.get_device_capability()[0] >= 9:
        heads_first = (t.transpose(1, 2) for t in (q, k, v))
        aten._scaled_dot_product_cudnn_attention(*heads_first, None, True, 0.0, False, scale=0.125)
    for t in ((q, k, v), (q32, k32, v32)):
        aten._efficient_attention_forward(*t, None, None, None, None, None, 0.0, 0, True)
"""
PREPARED = {"cublas": CUBLAS, "forwards": CUBLAS + FORWARDS}
COLD = {
    "attention": "flashbwd.attention(q, k, v)",
    "attention_causal": "flashbwd.attention(q, k, v, causal=True, window_size=(100, 0))",
    "attention_fp32": "flashbwd.attention(q32, k32, v32)",
    "attention_dropout": "flashbwd.attention(q, k, v, dropout_p=0.1)",
    "attention_softcap": "flashbwd.attention(q, k, v, softcap=20.0)",
    "attention_softcap_dropout": "flashbwd.attention(q, k, v, softcap=20.0, dropout_p=0.1)",
    "attention_bias_dropout": "flashbwd.attention(q, k, v, attn_bias=bias, dropout_p=0.1)",
    "layer_norm": "flashbwd.layer_norm(x, w)",
    "rms_norm": "flashbwd.rms_norm(x, w)",
    "dropout_add_layer_norm": "flashbwd.dropout_add_layer_norm(x, x, w, dropout_p=0.1)[0]",
    "flex_decoding": "flashbwd.flex_decoding(*(t.transpose(1, 2) for t in (q, k, v)))",
}


@pytest.mark.gpu
@pytest.mark.parametrize("prepared", PREPARED)
@pytest.mark.parametrize("name", COLD)
def test_the_first_call_of_a_process_can_be_captured(name: str, prepared: str) -> None:
    program = PROGRAM.replace("{prepare}", PREPARED[prepared]).replace("{call}", COLD[name])
    program = program.replace("{replays_agree}", str("dropout" not in name))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and done.stdout.strip() == "captured", done.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.parametrize("softcap", [0.0, 20.0], ids=["flash_forward", "reference_forward"])
def test_each_replay_draws_a_new_mask_that_its_backward_uses(softcap: float) -> None:
    """out is linear in v, so its derivative along v equals out, but only if forward and backward used one mask."""
    q, k, v = (torch.randn(2, 128, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def step() -> tuple[Tensor, Tensor]:
        out = flashbwd.attention(q, k, v, softcap=softcap, dropout_p=0.5)
        assert isinstance(out, Tensor)
        return out.detach(), torch.autograd.grad(out, v, torch.ones_like(out))[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, dv = step()
    seen = []
    for _ in range(3):
        graph.replay()
        along, total = (dv.double() * v.detach().double()).sum(), out.double().sum()
        assert abs(float(along - total)) < 1e-2 * float(out.double().abs().sum())
        seen.append(out.clone())
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])


@pytest.mark.gpu
def test_gradients_with_a_seed_of_the_host_can_be_captured() -> None:
    x = torch.randn(64, 512, device="cuda")
    rs = torch.rand(64, device="cuda")
    state = flashbwd.RngState(12345, 0, "efficient64")

    def step() -> list[Tensor]:
        norm = flashbwd.dropout_add_layer_norm_backward(x, x, rs, rs, dropout_p=0.5, rng_state=state)
        return [grad for grad in norm if grad is not None]

    expected = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    for a, b in zip(captured, expected, strict=True):
        assert torch.equal(a, b)

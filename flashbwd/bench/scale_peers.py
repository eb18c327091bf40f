"""The peers of the suite ``scale``: PyTorch's and this library's attention over rows that are split over devices.

A peer is prepared on every device. The peers use PyTorch's private module of context parallelism to split tensors once;
its public function would split them in every timed call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import scaled_dot_product_attention

import flashbwd
from flashbwd.bench.cases import DTYPES
from flashbwd.bench.scale_cases import ONE_FLASHBWD, ONE_TORCH, OURS, RINGS, WITHOUT_EXCHANGE, ScaleCase
from flashbwd.integrations.context_parallel import context_parallel_attention
from flashbwd.integrations.context_split import ContextSplit, split_context

_ROTATE = dict(zip(RINGS, ("alltoall", "allgather"), strict=True))


@dataclass(frozen=True)
class ScaleInputs:
    """q, k, v and the gradient of the output for the whole sequence on this device, (1, S, heads, D)."""

    tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    cu_seqlens: Tensor | None


@dataclass(frozen=True)
class ScalePeer:
    """A peer whose ``step()`` runs the forward and the backward and returns dq, dk, dv of this device's rows.

    ``rows`` selects these rows of a tensor of the whole sequence, (1, S, heads, D). ``split`` says whether the work is
    split over the devices; otherwise every device does all the work.
    """

    name: str
    step: Callable[[], tuple[Tensor, ...]]
    rows: Callable[[Tensor], Tensor]
    split: bool
    checked: bool = True  # False if the peer omits the exchange, so that its gradients are wrong
    overrides: bool = False


def make_inputs(case: ScaleCase, device: torch.device, seed: int) -> ScaleInputs:
    """Return random inputs, which are equal on all devices."""
    generator = torch.Generator(device).manual_seed(seed)
    heads = (case.heads, case.heads_kv, case.heads_kv, case.heads)

    def random(count: int) -> Tensor:
        shape = (1, case.seqlen, count, case.head_dim)
        return torch.randn(shape, device=device, dtype=DTYPES[case.dtype], generator=generator)

    cu_seqlens = None
    if case.lengths:
        cu_seqlens = torch.tensor((0, *case.lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    q, k, v, dout = (random(count) for count in heads)
    return ScaleInputs((q, k, v, dout), cu_seqlens)


def prepare(case: ScaleCase, x: ScaleInputs, mesh: DeviceMesh, silent: DeviceMesh) -> Iterator[ScalePeer]:
    """Yield the peers of a case. ``silent`` is a mesh of the same size that exchanges nothing."""
    yield from _one_device(case, x)
    if mesh.device_type == "cuda" and case.lengths is None:
        for ring in RINGS:
            for name, overrides in ((f"torch {ring}", False), (f"flashbwd {ring}", True)):
                yield _torch_ring(name, x, mesh, ring, overrides)
            yield _torch_ring(f"flashbwd {ring}{WITHOUT_EXCHANGE}", x, silent, ring, True, checked=False)
    yield _ours(OURS, case, x, mesh)
    yield _with_its_own_rows(_ours(OURS + WITHOUT_EXCHANGE, case, x, mesh, checked=False))


def _step(
    attention: Callable[..., Tensor], tensors: tuple[Tensor, ...], overrides: bool
) -> Callable[[], tuple[Tensor, ...]]:
    *inputs, dout = tensors
    leaves = [t.detach().requires_grad_() for t in inputs]

    def step() -> tuple[Tensor, ...]:
        with flashbwd.enable() if overrides else contextlib.nullcontext():
            return torch.autograd.grad(attention(*leaves), leaves, dout)

    return step


def _one_device(case: ScaleCase, x: ScaleInputs) -> Iterator[ScalePeer]:
    def whole(tensor: Tensor) -> Tensor:
        return tensor

    if case.lengths is None:
        heads_first = tuple(t.transpose(1, 2) for t in x.tensors)
        for name, overrides in ((ONE_TORCH, False), (ONE_FLASHBWD, True)):
            if overrides and not x.tensors[0].is_cuda:
                yield ScalePeer(name, _step(_ours_on_one_device(case, x), x.tensors, False), whole, split=False)
                continue
            step = _step(_sdpa, heads_first, overrides)
            yield ScalePeer(name, _rows_first(step), whole, split=False)
    else:
        yield ScalePeer(ONE_FLASHBWD, _step(_ours_on_one_device(case, x), x.tensors, False), whole, split=False)


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _rows_first(step: Callable[[], tuple[Tensor, ...]]) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple(grad.transpose(1, 2) for grad in step())


def _ours_on_one_device(case: ScaleCase, x: ScaleInputs) -> Callable[..., Tensor]:
    if case.lengths is None:
        return lambda q, k, v: flashbwd.attention(q, k, v, causal=True)
    longest = max(case.lengths)
    options = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), x.cu_seqlens)
    lengths: dict[str, Any] = {**options, "max_seqlen_q": longest, "max_seqlen_k": longest}

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flashbwd.attention(q[0], k[0], v[0], causal=True, **lengths)
        assert isinstance(out, Tensor)
        return out[None]

    return attention


def _ours(name: str, case: ScaleCase, x: ScaleInputs, mesh: DeviceMesh, checked: bool = True) -> ScalePeer:
    split = split_context(mesh, seqlen=case.seqlen) if x.cu_seqlens is None else split_context(
        mesh, cu_seqlens=x.cu_seqlens
    )  # fmt: skip

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = (t[0] for t in (q, k, v)) if split.packed else (q, k, v)
        out = context_parallel_attention(*parts, split)
        assert isinstance(out, Tensor)
        return out[None] if split.packed else out

    tensors = tuple(split.take(t, 1) for t in x.tensors)
    return ScalePeer(name, _step(attention, tensors, False), _rows_of(split), True, checked)


def _copy_own_rows(arriving: Tensor, sent: Tensor, *sizes: Any, **options: Any) -> Any:
    """Fill ``arriving`` with this device's rows: an ``all_to_all_single`` without communication.

    The values matter: a GPU at its power limit multiplies zeros faster than other numbers.
    """
    target, source = arriving.view(-1), sent.reshape(-1)
    if source.numel() == 0:
        target.zero_()
        return _Done()
    for start in range(0, target.numel(), source.numel()):
        part = target[start : start + source.numel()]
        part.copy_(source[: part.numel()])
    return _Done()


class _Done:
    def wait(self) -> None:
        pass


def _with_its_own_rows(peer: ScalePeer) -> ScalePeer:
    def step() -> tuple[Tensor, ...]:
        with mock.patch.object(dist, "all_to_all_single", _copy_own_rows):
            return peer.step()

    return replace(peer, step=step)


def _rows_of(split: ContextSplit) -> Callable[[Tensor], Tensor]:
    return lambda whole: split.take(whole, 1)


def _torch_ring(
    name: str, x: ScaleInputs, mesh: DeviceMesh, ring: str, overrides: bool, checked: bool = True
) -> ScalePeer:
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    rank, size = mesh.get_local_rank(), mesh.size()

    def rows(whole: Tensor) -> Tensor:
        """Return PyTorch's balanced rows for a causal mask: one early and one late chunk per device."""
        chunks = whole.chunk(2 * size, dim=1)
        return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim=1)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Look up the function in each call, because the context manager replaces it.
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    step = _step(attention, tuple(rows(t).transpose(1, 2).contiguous() for t in x.tensors), overrides)
    unused = torch.zeros(1, 2 * size, device=x.tensors[0].device)

    def in_context() -> tuple[Tensor, ...]:
        set_rotate_method(_ROTATE[ring])
        with context_parallel(mesh, buffers=[unused], buffer_seq_dims=[1]):
            return step()

    return ScalePeer(name, _rows_first(in_context), rows, True, checked, overrides)


def silent_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh of the same size and rank whose collectives return without communicating."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers the backend

    group = dist.new_group(list(range(mesh.size())), backend="fake")
    return DeviceMesh.from_group(group, mesh.device_type)

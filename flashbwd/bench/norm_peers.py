"""The peers of LayerNorm and RMSNorm cases. To add a peer, write its ``prepare`` and a row of ``NORM_PEERS``."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import flashbwd
from flashbwd.bench.cases import COPY, DTYPES, NORM, NormCase
from flashbwd.bench.peers import Peer, Prepared, UnsupportedCaseError, refuse

aten = torch.ops.aten
EPS = 1e-5
COPY_BYTES = {"cuda": 2**29, "cpu": 2**26}  # size of one buffer, much larger than any cache


@dataclass(frozen=True)
class NormInputs:
    """x, dz (rows, N), gamma, beta (N,), and the row statistics that PyTorch's forward saves, mu, rs (rows, 1)."""

    x: Tensor
    dz: Tensor
    gamma: Tensor
    beta: Tensor
    mu: Tensor
    rs: Tensor


def make_inputs(case: NormCase, device: torch.device, seed: int) -> NormInputs:
    """Return random normal inputs; gamma is around 1."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=DTYPES[case.dtype])

    x, dz = normal(case.rows, case.columns), normal(case.rows, case.columns)
    gamma, beta = 1 + normal(case.columns) / 4, normal(case.columns)
    if case.rms:
        rs = torch.empty(case.rows, 1, device=device)
        for block, values in zip(x.split(8192), rs.split(8192), strict=True):
            values.copy_((block.float().square().mean(-1, keepdim=True) + EPS).rsqrt())
        mu = torch.zeros_like(rs)
    else:
        _, mu, rs = aten.native_layer_norm(x, [case.columns], gamma, beta, EPS)
    return NormInputs(x, dz, gamma, beta, mu, rs)


def _layer_norm(dz: Tensor, x: Tensor, mu: Tensor, rs: Tensor, gamma: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    return aten.native_layer_norm_backward(dz, x, [x.shape[1]], mu, rs, gamma, beta, [True, True, True])


def _rms_norm(dz: Tensor, x: Tensor, mu: Tensor, rs: Tensor, gamma: Tensor, beta: Tensor) -> tuple[Tensor | None, ...]:
    return (*aten._fused_rms_norm_backward(dz, x, [x.shape[1]], rs, gamma, [True, True]), None)


def _arguments(x: NormInputs) -> tuple[Tensor, ...]:
    return x.dz, x.x, x.mu, x.rs, x.gamma, x.beta


def _refuse_forms(case: NormCase) -> None:
    refuse(case.form != "", "measured only for the plain norm")


def torch_native(case: NormCase, x: NormInputs) -> Prepared:
    _refuse_forms(case)
    if case.rms and not x.x.is_cuda:  # the CPU has no fused operator, so autograd runs the composite operator
        inputs = x.x.detach().requires_grad_(), x.gamma.detach().requires_grad_()
        z = torch.nn.functional.rms_norm(inputs[0], [case.columns], inputs[1], EPS)
        return Prepared(lambda: (*torch.autograd.grad(z, inputs, x.dz, retain_graph=True), None))
    backward = _rms_norm if case.rms else _layer_norm
    return Prepared(lambda: backward(*_arguments(x)))


def inductor(case: NormCase, x: NormInputs) -> Prepared:
    _refuse_forms(case)
    compiled = torch.compile(_rms_norm if case.rms else _layer_norm, dynamic=False)  # once for all sets of inputs
    arguments = _arguments(x)
    compiled(*arguments)
    return Prepared(lambda: compiled(*arguments))


def liger(case: NormCase, x: NormInputs) -> Prepared:
    refuse(case.rms, "measured only for LayerNorm")
    _refuse_forms(case)
    try:
        from liger_kernel.ops.layer_norm import layer_norm_backward
    except ImportError:
        raise UnsupportedCaseError("liger-kernel is not installed") from None
    mu, rs = x.mu.flatten(), x.rs.flatten()
    return Prepared(lambda: layer_norm_backward(x.dz, x.x, x.gamma, x.beta, mu, rs))


@functools.lru_cache(maxsize=1)
def _copy_buffers(device: torch.device) -> tuple[Tensor, Tensor]:
    source = torch.randn(COPY_BYTES[device.type] // 4, device=device)
    return source, torch.empty_like(source)


def device_copy(case: NormCase, x: NormInputs) -> Prepared:
    """Prepare the upper bound of the rate: a large copy, whose work is bytes read plus bytes written."""
    source, target = _copy_buffers(x.x.device)

    def copy() -> tuple[Tensor | None, ...]:
        target.copy_(source)
        return ()

    return Prepared(copy, work=2.0 * COPY_BYTES[x.x.device.type])


def _ours_with_dropout(x: NormInputs) -> Prepared:
    seed, offset = torch.zeros(2, dtype=torch.int64, device=x.x.device)
    state = flashbwd.RngState(seed, offset, "efficient64")
    past_the_norm = torch.randn_like(x.x)

    def backward() -> tuple[Tensor | None, ...]:
        return flashbwd.dropout_add_layer_norm_backward(
            x.dz, x.x, x.mu, x.rs, x.gamma, dresidual=past_the_norm, dropout_p=0.1, rng_state=state
        )

    return Prepared(backward, checked=False)


def _ours_from_output(case: NormCase, x: NormInputs) -> Prepared:
    z = aten.native_layer_norm(x.x, [case.columns], x.gamma, x.beta, EPS)[0]
    return Prepared(
        lambda: flashbwd.layer_norm_backward_from_output(x.dz, z, x.rs, x.gamma, x.beta), checked=case.dtype == "fp32"
    )


def ours(case: NormCase, x: NormInputs) -> Prepared:
    if case.form == "dropout":
        return _ours_with_dropout(x)
    if case.form == "output":
        return _ours_from_output(case, x)

    def backward() -> tuple[Tensor | None, ...]:
        grads: Any
        if case.rms:
            grads = flashbwd.rms_norm_backward(x.dz, x.x, x.rs, x.gamma)
            return grads.dx, grads.dgamma, None
        grads = flashbwd.layer_norm_backward(x.dz, x.x, x.mu, x.rs, x.gamma)
        return grads.dx, grads.dgamma, grads.dbeta

    return Prepared(backward)


NORM_PEERS: tuple[Peer, ...] = (
    Peer("torch native", torch_native, devices=("cuda", "cpu")),
    Peer("Inductor", inductor, devices=("cuda", "cpu"), compiled=True, ahead=True),
    Peer("Liger", liger),
    Peer(COPY, device_copy, devices=("cuda", "cpu")),
    Peer(NORM, ours, devices=("cuda", "cpu")),
)

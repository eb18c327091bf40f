"""The plan of an attention backward: the backend, the tiles and the memory that a call would use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from flashbwd import _arguments, _ops
from flashbwd._attention_arguments import operator_options
from flashbwd._attention_backward import DEFAULTS


@dataclass(frozen=True)
class Plan:
    """The backend, tiles, schedule and memory with which an attention backward will run on a device.

    Attributes
    ----------
    backend : str
        ``"sm90"``, ``"sm80"``, ``"short"`` or ``"reference"``.
    tile : tuple of int or None
        Tile size as (queries, keys); ``None`` for the reference backend.
    schedule : str
        Human-readable description of how tiles are scheduled and how dq is accumulated.
    workspace_bytes : int
        Minimum size in bytes of a ``workspace`` tensor passed to :func:`attention_backward`.
    deterministic : bool
        True if runs on GPUs with the same model and SM count give bitwise identical gradients.
    cooperative : bool
        True if the kernel needs a cooperative launch, with all CTAs resident at once. Such a launch fails in a context
        with fewer SMs than the device (a green context). Only deterministic plans need it.
    sm_count : int
        Number of SMs of the device that the plan is for; 0 on a CPU.
    splits : int
        Number of CTAs that share a key block; 1 if every key block belongs to one CTA.
    accumulator_bytes : int
        Size in bytes of the fp32 dq accumulator, which is part of the workspace; 0 if the kernel needs none.
    reasons : Mapping[str, str]
        Name of each backend that was not chosen, and the reason.
    """

    backend: str
    tile: tuple[int, int] | None
    schedule: str
    workspace_bytes: int
    deterministic: bool
    cooperative: bool
    sm_count: int
    splits: int
    accumulator_bytes: int
    reasons: Mapping[str, str]


def plan_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    *,
    workspace: Tensor | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> Plan:
    """Describe what :func:`attention_backward` would do with the same arguments, without running it.

    Parameters
    ----------
    dout, q, k, v, out, softmax_lse, workspace, dq, dk, dv, **options
        As for :func:`attention_backward`. Meta tensors are sufficient, because the function reads no contents except
        ``cu_seqlens`` on the CPU, which it checks.
    device : torch.device or str, optional
        Device to plan for if the tensors are meta tensors. Default: the current CUDA device, or the CPU without one.

    Returns
    -------
    Plan

    Raises
    ------
    ValueError
        If :func:`attention_backward` would raise it for these arguments, or if ``device`` is not a device.
    TypeError
        If :func:`attention_backward` has no option of a given name.
    """
    unknown = sorted(set(options) - set(DEFAULTS))
    if unknown:
        raise TypeError(f"flashbwd: plan_attention_backward has no argument {unknown[0]!r}")
    described = _ops.call(
        torch.ops.flashbwd.plan_attention_backward,
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        **operator_options(q, **options),
        allow_tf32=_ops.allow_tf32(q),
        dq=dq,
        dk=dk,
        dv=dv,
        workspace=workspace,
        plan_device=_plan_device(device),
    )
    fields = json.loads(described)
    del fields["config"]
    tile = fields.pop("tile")
    reasons = MappingProxyType(fields.pop("refusals"))
    return Plan(tile=None if tile is None else (tile[0], tile[1]), reasons=reasons, **fields)


def _plan_device(device: torch.device | str | None) -> int:
    if device is None:
        return torch.cuda.current_device() if torch.cuda.is_available() else -1
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"flashbwd: device is {_arguments.came(device)}, expected a torch.device or its name"
        ) from error
    if device.type == "cpu":
        return -1
    return torch.cuda.current_device() if device.index is None else device.index

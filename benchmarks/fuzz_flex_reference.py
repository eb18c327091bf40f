"""The inputs of random FlexAttention-backward calls, their float64 gradients, and the limits of errors.

The oracle evaluates the plain formula over whole score matrices and shares no code with the library. Autograd gives the
derivative of the score_mod.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz_flex_calls import Call, draw
from fuzz_flex_masks import mask_of
from fuzz_flex_mods import DTYPES, ScoreMod, Table, score_mod_of
from fuzz_reference import ROUNDING, SMALL, SUBNORMAL, Problem, largest_ratio

import flashbwd
import flashbwd.flex.gradients as flex_gradients
import flashbwd.flex.lists as flex_lists
from flashbwd import _attention_arguments

FORCED = {"flex": "sm90", "flex_sm80": "sm80"}  # also kernels that the plan does not choose yet
_forced = contextlib.ExitStack()  # a process computes calls of one backend

__all__ = ["Problem", "build", "draw", "gradients", "refusal", "repeat", "worst"]

ADD = 2.0**-24  # relative error of one fp32 addition
DEVIATIONS = 3.0  # largest sum of independent errors, in units of the root of the sum of the squares of their bounds


class _Elements:
    """A captured tensor of which each lookup is a variable of its own, with one element per pair."""

    def __init__(self, table: Tensor, pairs: torch.Size) -> None:
        self.table, self.pairs = table.double(), pairs
        self.numbers = torch.arange(table.numel(), device=table.device).view(table.shape)
        self.lookups: list[tuple[Tensor, Tensor]] = []  # numbers of the elements, and the variable

    def __getitem__(self, index: Any) -> Tensor:
        variable = self.table[index].expand(self.pairs).clone().requires_grad_()
        self.lookups.append((self.numbers[index].expand(self.pairs), variable))
        return variable


@dataclass
class _Scores:
    """Modified scores, and their derivatives with respect to the scores and each lookup of a trained tensor."""

    raw: Tensor
    modified: Tensor
    slope: Tensor
    trained: dict[str, list[tuple[Tensor, Tensor]]]  # by name: numbers of the elements, and derivatives


def _modify(mod: ScoreMod | None, tensors: dict[str, Tensor], raw: Tensor) -> _Scores:
    if mod is None:
        return _Scores(raw, raw, torch.ones_like(raw), {})
    index = [
        torch.arange(n, device=raw.device).view([-1 if a == at else 1 for a in range(4)])
        for at, n in enumerate(raw.shape)
    ]
    seen: dict[str, Any] = {}
    for table in mod.tables:
        found = tensors[table.name].detach()
        seen[table.name] = _Elements(found, raw.shape) if table.trained else found.double() if table.is_float else found
    s = raw.detach().requires_grad_()
    t = mod.function(seen)(s, *index).double().expand(raw.shape)
    lookups = [(table.name, *lookup) for table in mod.tables if table.trained for lookup in seen[table.name].lookups]
    slope, *derivatives = torch.autograd.grad(t.sum(), [s, *(variable for *_, variable in lookups)])
    trained: dict[str, list[tuple[Tensor, Tensor]]] = {table.name: [] for table in mod.tables if table.trained}
    for (name, numbers, _), derivative in zip(lookups, derivatives, strict=True):
        trained[name].append((numbers, derivative))
    return _Scores(raw, t.detach(), slope, trained)


# ---- inputs ---------------------------------------------------------------------------------------


def _in_memory(values: Tensor, layout: str) -> Tensor:
    """Return a tensor (B, H, S, D) with these values and a layout of the memory."""
    if layout == "rows first":
        return values.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "padded":
        return torch.nn.functional.pad(values, (0, 8))[..., : values.shape[3]]
    return values.contiguous()


def build(call: Call, device: torch.device) -> Problem:
    """Draw the inputs from the call's number; compute the float64 gradients and the error limits."""
    generator = torch.Generator(device).manual_seed(call.number)
    b, h, hk, i, j = call.batch, call.heads, call.heads_kv, call.length_q, call.length_k
    sizes = {"b": b, "h": h, "i": i, "j": j}

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator).to(DTYPES[call.dtype])

    batch_kv = 1 if call.broadcast else b
    x = {"query": normal(b, h, i, call.head_dim), "key": normal(batch_kv, hk, j, call.head_dim)}
    x |= {"value": normal(batch_kv, hk, j, call.head_dim_v), "dout": normal(b, h, i, call.head_dim_v)}
    if not call.dout:
        x["dout"].zero_()
    dlse = torch.randn(b, h, i, device=device, generator=generator) if call.dlse else None
    mod, mask = score_mod_of(call), mask_of(call, device)
    tables = () if mod is None else mod.tables
    tensors = {table.name: table.values(sizes, generator, device) for table in tables}
    oracle = _Oracle(call, x, dlse, mask.visible, mod, tensors)
    arguments: dict[str, Any] = {**x, "out": oracle.out}
    if call.poisoned:
        for name in ("query", "dout", "out"):
            arguments[name] = arguments[name].masked_fill(mask.hidden_queries[..., None], torch.nan)
        for name in ("key", "value"):
            arguments[name] = arguments[name].masked_fill(mask.hidden_keys[..., None], torch.nan)
    names = ("query", "key", "value", "dout", "out")
    arguments |= {n: _in_memory(arguments[n], layout) for n, layout in zip(names, call.layouts, strict=True)}
    if not call.dout:
        arguments["dout"] = None
    for table in tables:
        tensors[table.name].requires_grad_(table.trained)
    arguments |= {"lse": oracle.lse, "dlse": dlse, "block_mask": mask.block_mask, "scale": call.scale}
    arguments |= {"score_mod": None if mod is None else mod.function(tensors), "enable_gqa": h != hk}
    arguments["deterministic"] = call.deterministic
    return Problem(call, arguments, oracle.expected, oracle.limits())


# ---- the oracle -----------------------------------------------------------------------------------


class _Oracle:
    """The forward of a call, its float64 gradients, and the limits of their errors."""

    def __init__(
        self,
        call: Call,
        x: dict[str, Tensor],
        dlse: Tensor | None,
        visible: Tensor,
        mod: ScoreMod | None,
        tensors: dict[str, Tensor],
    ) -> None:
        self.call = call
        self.tables: dict[str, Table] = {} if mod is None else {t.name: t for t in mod.tables if t.trained}
        group = call.heads // call.heads_kv
        self.q, self.dout = x["query"].double(), x["dout"].double()
        self.k, self.v = (x[name].double().repeat_interleave(group, 1) for name in ("key", "value"))
        self.scale = 1 / math.sqrt(call.head_dim) if call.scale is None else call.scale
        self.scores = _modify(mod, tensors, self.scale * (self.q @ self.k.mT))
        self.visible = visible & (self.scores.modified > -torch.inf)
        t = self.scores.modified.masked_fill(~self.visible, -torch.inf)
        lse = torch.logsumexp(t, -1)
        self.out = (self._probabilities(lse) @ self.v).to(x["value"].dtype)
        self.lse = lse.float()
        self.expected: dict[str, Tensor] = {}
        self.spread: dict[str, Tensor] = {}  # sums of error magnitudes
        self.of_batches: dict[str, Tensor] = {}  # magnitudes of what a kernel rounds before it sums the batches
        self._backward(dlse, {name: tensors[name].shape for name in self.tables})

    def _probabilities(self, lse: Tensor) -> Tensor:
        finite = lse.masked_fill(lse == -torch.inf, 0.0)
        return torch.exp(self.scores.modified - finite[..., None]).masked_fill(~self.visible, 0.0)

    def _backward(self, dlse: Tensor | None, shapes: dict[str, torch.Size]) -> None:
        """Compute the gradients and the bounds of their errors.

        The call gets out and lse rounded to their dtypes, so the formulas use the rounded values. The error bounds
        allow for fp32 sums, and for one rounding of P and dS to the dtype of the inputs. A kernel may also round the
        derivative of a softcap.
        """
        eps, hidden, scores = ROUNDING[self.call.dtype], ~self.visible, self.scores
        lse = self.lse.double()
        p = self._probabilities(lse)
        products = self.dout * self.out.double()
        of_lse = torch.zeros_like(lse) if dlse is None else dlse.double()
        dp = self.dout @ self.v.mT
        dt = p * (dp - (products.sum(-1) - of_lse)[..., None])
        slope = scores.slope.masked_fill(hidden, 0.0)
        largest = scores.modified.abs() + scores.raw.abs() * (1 + slope.abs()) + lse.abs()[..., None]
        noise = SMALL * (1 + largest).masked_fill(hidden, 0.0)
        size = p * (dp.abs() + products.abs().sum(-1)[..., None] + of_lse.abs()[..., None])
        tiny = SUBNORMAL[self.call.dtype] * self.visible
        ds = dt * slope
        dt_error = noise * size
        roundings = 2 if self.call.score in ("softcap", "alibi", "pair") else 1
        ds_error = roundings * eps * ds.abs() + dt_error * slope.abs() + noise * dt.abs() + tiny
        self._add(self.expected, ds, self.q, self.k, p, self.dout)
        self._add(self.spread, ds_error, self.q.abs(), self.k.abs(), (eps + noise) * p + tiny, self.dout.abs())
        for name, lookups in scores.trained.items():
            zeros = torch.zeros(shapes[name].numel(), dtype=torch.float64, device=p.device)
            total, spread, squares = zeros.clone(), zeros.clone(), zeros.clone()
            dtype = self.tables[name].dtype
            rounding = SMALL + ADD * math.sqrt(p.numel())  # of a sum of all pairs
            for numbers, derivative in lookups:
                derivative = derivative.masked_fill(hidden, 0.0)
                error = (dt_error + (rounding + noise) * dt.abs()) * derivative.abs() + noise * dt.abs()
                total.index_add_(0, numbers.flatten(), (dt * derivative).flatten())
                spread.index_add_(0, numbers.flatten(), error.flatten())
                if dtype != "fp32":  # autograd rounds the gradient of each lookup, in either direction
                    rounded = ROUNDING[dtype] * (dt * derivative).abs() + SUBNORMAL[dtype] * self.visible
                    squares.index_add_(0, numbers.flatten(), rounded.square().flatten())
            spread += DEVIATIONS * squares.sqrt()
            self.expected[name], self.spread[name] = total.view(shapes[name]), spread.view(shapes[name])

    def _add(self, sums: dict[str, Tensor], ds: Tensor, q: Tensor, k: Tensor, p: Tensor, dout: Tensor) -> None:
        """Write the products that give dq, dk and dv."""
        of_query_heads = {"dk": self.scale * (ds.mT @ q), "dv": p.mT @ dout}
        sums["dq"] = self.scale * (ds @ k)
        for name, gradient in of_query_heads.items():
            by_batch = gradient.unflatten(1, (self.call.heads_kv, -1)).sum(2)
            sums[name] = by_batch.sum(0, keepdim=True) if self.call.broadcast else by_batch
            if sums is self.expected and self.call.broadcast:
                self.of_batches[name] = by_batch.abs().sum(0, keepdim=True)

    def limits(self) -> dict[str, Tensor]:
        """Return the largest allowed error of each element of the gradients."""
        limits = {}
        for name, error in self.spread.items():
            dtype = self.tables[name].dtype if name in self.tables else self.call.dtype
            last = ROUNDING[dtype] if dtype != "fp32" else SMALL
            size = self.expected[name].abs() + self.of_batches.get(name, 0.0)
            limits[name] = 1.5 * error + last * size + 1e-6 + SMALL * size + SUBNORMAL[dtype]
        return limits


# ---- the library ----------------------------------------------------------------------------------


def _limit_of_bits(problem: Problem) -> contextlib.AbstractContextManager[Any]:
    """Allow no bits of a mask if the call is without them. The lists of a mask are computed at its first use."""
    if problem.call.without_bits:
        return mock.patch.object(flex_lists, "LIMIT", -1)
    return contextlib.nullcontext()


def refusal(problem: Problem, backend: str) -> str | None:
    """Return why no kernel computes a call, or None if one does or if the backend is the reference."""
    if backend in FORCED and _attention_arguments.backend() != FORCED[backend]:
        _forced.enter_context(flashbwd.use_backend(FORCED[backend]))
    with _limit_of_bits(problem):
        plan = flashbwd.plan_flex_attention_backward(**problem.arguments)
    if backend == "flex_reference":
        return None
    if plan.backend == "reference":
        return plan.reasons[FORCED[backend]]
    assert plan.compiled or not problem.call.without_bits, "a kernel without mask_mod computes a call without bits"
    return None


def gradients(problem: Problem, backend: str) -> Any:
    """Compute a call. Raises AssertionError if a kernel was planned, but the reference computes the call."""
    if backend == "flex_reference":
        return flashbwd.flex_attention_backward(**problem.arguments)
    unexpected = AssertionError("the reference ran, but the plan named a kernel")
    with mock.patch.object(flex_gradients, "decoding_backward", side_effect=unexpected), _limit_of_bits(problem):
        return flashbwd.flex_attention_backward(**problem.arguments)


def repeat(problem: Problem, backend: str) -> Callable[[], Any]:
    """Return a function that computes the call again."""
    return functools.partial(flashbwd.flex_attention_backward, **problem.arguments)


def worst(problem: Problem, gradients: Any) -> dict[str, float]:
    """Return the largest ratio of error to limit of each gradient; inf if an element is NaN or missing.

    The gradients of captured tensors have one entry together.
    """
    given = {"dq": "query", "dk": "key", "dv": "value"}
    found: dict[str, float] = {}
    for name, expected in problem.expected.items():
        got = getattr(gradients, name) if name in given else gradients.captured.get(name)
        dtype = None if name not in given else problem.arguments[given[name]].dtype
        if got is None or got.shape != expected.shape or (dtype is not None and got.dtype != dtype):
            ratio = math.inf
        else:
            ratio = largest_ratio(got.double(), expected, problem.limits[name])
        kind = name if name in given else "captured"
        found[kind] = max(found.get(kind, 0.0), ratio)
    return found

"""The inputs of random attention-backward calls, their float64 gradients, and the limits of errors.

The reference evaluates the formulas of docs/numerics.md over whole score matrices and shares no code with the library.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from fuzz_calls import DTYPES, Call, draw  # noqa: E402
from kit import dropout as masks  # noqa: E402

import flashbwd  # noqa: E402

__all__ = ["Problem", "build", "draw", "gradients", "refusal", "repeat", "visible", "worst"]

# Relative error of one rounding. fp32 has the error of TF32, because products of fp32 may use TF32.
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-11}
SMALL = 2.0**-18  # relative error of an fp32 sum
SUBNORMAL = {"bf16": 0.0, "fp16": 2.0**-24, "fp32": 0.0}  # absolute error of rounding a subnormal number


@dataclass
class Problem:
    """Arguments of a call, its float64 gradients, and the largest allowed error of each element."""

    call: Any  # of fuzz_calls or fuzz_flex_calls
    arguments: dict[str, Any]
    expected: dict[str, Tensor]
    limits: dict[str, Tensor]


def _sequences(call: Call) -> Iterator[tuple[int, slice, slice, int]]:
    """Yield (index, rows of q, rows of k, number of keys in use) of each sequence."""
    first_q = first_k = 0
    for b, (rows_q, rows_k) in enumerate(zip(call.lengths_q, call.lengths_k, strict=True)):
        used = rows_k if call.used_k is None else call.used_k[b]
        yield b, slice(first_q, first_q + rows_q), slice(first_k, first_k + rows_k), used
        first_q, first_k = first_q + rows_q, first_k + rows_k


def visible(call: Call, rows: int, keys: int, device: torch.device) -> Tensor:
    """Return the visible pairs, (rows, keys) bool."""
    offset = 0 if call.causal == "top_left" else keys - rows
    distance = torch.arange(keys, device=device) - torch.arange(rows, device=device)[:, None] - offset
    left, right = call.window
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        seen &= distance >= -left
    if call.causal or right >= 0:
        seen &= distance <= (0 if call.causal else right)
    return seen


def build(call: Call, device: torch.device) -> Problem:
    """Draw the inputs from the call's number; compute the float64 gradients and the error limits."""
    generator = torch.Generator(device).manual_seed(call.number)
    dtype, batch = DTYPES[call.dtype], len(call.lengths_q)
    total_q, total_k = sum(call.lengths_q), sum(call.lengths_k)
    longest_q, longest_k = max(call.lengths_q), max(call.lengths_k)

    def normal(*shape: int, to: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device=device, generator=generator).to(to)

    x: dict[str, Any] = {}
    if call.interleaved and total_q == total_k and call.heads == call.heads_kv and call.head_dim == call.head_dim_v:
        x["q"], x["k"], x["v"] = normal(total_q, 3, call.heads, call.head_dim).unbind(1)
    else:
        x["q"] = normal(total_q, call.heads, call.head_dim)
        x["k"] = normal(total_k, call.heads_kv, call.head_dim)
        x["v"] = normal(total_k, call.heads_kv, call.head_dim_v)
    x["dout"] = normal(total_q, call.heads, call.head_dim_v)
    if call.bias is not None:
        sizes = {"b": batch, "h": call.heads, "q": longest_q, "k": longest_k}
        shape = [n if letter in call.bias else 1 for letter, n in sizes.items()]
        x["bias"] = normal(*shape, to=torch.float32 if call.bias_float32 else dtype)
        if call.hides_rows:
            x["bias"].masked_fill_(torch.rand(*shape[:3], 1, device=device, generator=generator) < 0.1, -torch.inf)
    if call.alibi:
        x["slopes"] = torch.rand(call.heads, device=device, generator=generator)
    if call.sink:
        x["sink"] = normal(call.heads, to=torch.float32)
    if call.key_mask:  # one sequence in five sees no key
        shown = torch.rand(batch, longest_k, device=device, generator=generator) < 0.7
        x["key_mask"] = shown & (torch.rand(batch, 1, device=device, generator=generator) < 0.8)
    if call.dlse:
        x["dlse"] = normal(call.heads, total_q, to=torch.float32)
    return _with_reference(call, x)


@dataclass(frozen=True)
class _Sequence:
    """One sequence of a call. Its tensors are float64; k and v are repeated for the query heads of each KV head."""

    index: int
    rows: slice  # rows of q
    keys: slice  # rows of k in use
    q: Tensor  # (H, n, D)
    k: Tensor  # (H, used, D)
    v: Tensor  # (H, used, Dv)
    dout: Tensor  # (H, n, Dv)
    scores: Tensor  # (H, n, used); -inf where masked
    tanh: Tensor | None  # (H, n, used); None without softcap
    blind: Tensor  # (H, n) bool; True for rows that see no key


def _sequence(call: Call, x: dict[str, Any], index: int, rows: slice, keys: slice) -> _Sequence:
    q, dout = (x[name][rows].double().transpose(0, 1) for name in ("q", "dout"))
    group = call.heads // call.heads_kv
    k, v = (x[name][keys].double().transpose(0, 1).repeat_interleave(group, 0) for name in ("k", "v"))
    n, used = q.shape[1], k.shape[1]
    scores = call.head_dim**-0.5 * (q @ k.mT)
    tanh = torch.tanh(scores / call.softcap) if call.softcap else None
    if tanh is not None:
        scores = call.softcap * tanh
    if call.alibi:
        offset = 0 if call.causal == "top_left" else used - n
        line = torch.arange(n, device=q.device)[:, None] + offset - torch.arange(used, device=q.device)
        scores = scores - x["slopes"].double()[:, None, None] * line.abs()
    if "bias" in x:
        bias = x["bias"][index if x["bias"].shape[0] > 1 else 0].double()
        scores = scores + bias[:, : n if bias.shape[1] > 1 else 1, : used if bias.shape[2] > 1 else 1]
    scores = scores.masked_fill(~visible(call, n, used, q.device), -torch.inf)
    if call.key_mask:
        scores = scores.masked_fill(~x["key_mask"][index, :used], -torch.inf)
    blind = ~(scores > -torch.inf).any(-1)
    return _Sequence(index, rows, keys, q, k, v, dout, scores, tanh, blind)


class _Reference:
    """The forward of a call, its float64 gradients, and the limits of their errors."""

    def __init__(self, call: Call, x: dict[str, Any]) -> None:
        self.call, self.x = call, x
        self.keep: list[Tensor] | None = None
        if call.dropout:
            self.keep = masks.keep_masks(
                call.dropout, call.number, 4, 0.3, heads=call.heads, seqlens_q=call.lengths_q,
                seqlens_k=call.used_k or call.lengths_k, max_seqlen_q=max(call.lengths_q),
                max_seqlen_k=max(call.lengths_k),
            )  # fmt: skip
        names = [name for name in ("q", "k", "v", "bias", "sink") if name in x]
        self.expected: dict[str, Tensor] = {n: torch.zeros_like(x[n], dtype=torch.float64) for n in names}
        self.spread = {n: torch.zeros_like(t) for n, t in self.expected.items()}  # sums of error magnitudes
        self.out = torch.zeros_like(x["dout"])
        self.lse = torch.full((call.heads, x["q"].shape[0]), torch.inf, device=x["q"].device)
        self.generator = random.Random(call.number)

    def add(self, s: _Sequence) -> None:
        """Compute out, lse and the gradients of one sequence."""
        z = torch.ones_like(s.scores)
        if self.keep is not None:
            kept = self.keep[s.index].to(z.device)[:, : z.shape[1], : z.shape[2]]
            z = kept.double() * masks.keep_scale(self.call.dropout, 0.3, DTYPES[self.call.dtype])
        self._forward(s, z)
        self._backward(s, z)

    def _probabilities(self, s: _Sequence, lse: Tensor) -> Tensor:
        lse = lse.masked_fill(s.blind, 0.0)
        return torch.exp(s.scores - lse[..., None]).masked_fill(s.blind[..., None], 0.0)

    def _forward(self, s: _Sequence, z: Tensor) -> None:
        if s.k.shape[1]:
            lse = torch.logsumexp(s.scores, -1)
        else:
            lse = torch.full(s.blind.shape, -torch.inf, dtype=torch.float64, device=z.device)
        if self.call.sink:
            lse = torch.logaddexp(lse, self.x["sink"].double()[:, None])
        self.out[s.rows] = ((self._probabilities(s, lse) * z) @ s.v).transpose(0, 1).to(self.out.dtype)
        unseen = self.generator.choice([0.0, torch.inf, -torch.inf])
        self.lse[:, s.rows] = lse.float().masked_fill(s.blind, unseen)

    def _backward(self, s: _Sequence, z: Tensor) -> None:
        """Add the gradients of a sequence, and their error bounds.

        The call gets out and lse rounded to their dtypes, so the formulas use the rounded values. The error bounds
        allow for fp32 sums, and for one rounding of P and dS to the dtype of the inputs.
        """
        eps, small = ROUNDING[self.call.dtype], SMALL
        lse = self.lse[:, s.rows].double().masked_fill(s.blind, 0.0)
        p = self._probabilities(s, lse)
        dlse = self.x["dlse"][:, s.rows].double() if self.call.dlse else torch.zeros_like(lse)
        products = s.dout * self.out[s.rows].double().transpose(0, 1)
        delta = (products.sum(-1) - dlse).masked_fill(s.blind, 0.0)
        dp = (s.dout @ s.v.mT) * z
        ds = p * (dp - delta[..., None])
        scores = s.scores.abs().masked_fill(s.scores == -torch.inf, 0.0) + lse.abs()[..., None]
        size = p * (dp.abs() + products.abs().sum(-1)[..., None] + dlse.abs()[..., None])
        tiny = SUBNORMAL[self.call.dtype] * visible(self.call, p.shape[1], p.shape[2], p.device)
        ds_error = eps * ds.abs() + small * (1.0 + scores) * size + tiny
        p_error = (eps + small * (1.0 + scores)) * p * z + tiny
        if "bias" in self.x:
            _add_bias(self.expected["bias"], s.index, ds)
            _add_bias(self.spread["bias"], s.index, ds_error)
        if self.call.sink:
            share = torch.exp(self.x["sink"].double()[:, None] - lse)
            self.expected["sink"] += torch.where(s.blind, dlse, -share * delta).sum(-1)
            size = share * (products.abs().sum(-1) + dlse.abs()) + dlse.abs()
            self.spread["sink"] += (small * size).sum(-1)
        if s.tanh is not None:
            # A kernel may keep the derivative of the softcap in 16 bits, which costs one more rounding.
            slope = 1 - s.tanh * s.tanh
            ds, ds_error = ds * slope, (ds_error + eps * ds.abs()) * slope + small * ds.abs()
        self._add(self.expected, s, ds, s.q, s.k, p * z, s.dout)
        self._add(self.spread, s, ds_error, s.q.abs(), s.k.abs(), p_error, s.dout.abs())

    def _add(
        self, sums: dict[str, Tensor], s: _Sequence, ds: Tensor, q: Tensor, k: Tensor, p: Tensor, dout: Tensor
    ) -> None:
        """Write the products that give dq, dk and dv."""

        def of_keys(gradient: Tensor) -> Tensor:  # (H, used, dim) -> (used, Hkv, dim)
            return gradient.unflatten(0, (self.call.heads_kv, -1)).sum(1).transpose(0, 1)

        scale = self.call.head_dim**-0.5
        sums["q"][s.rows] = scale * (ds @ k).transpose(0, 1)
        sums["k"][s.keys] = scale * of_keys(ds.mT @ q)
        sums["v"][s.keys] = of_keys(p.mT @ dout)

    def limits(self) -> dict[str, Tensor]:
        """Return the largest allowed error of each element of the gradients."""
        limits = {}
        for name, error in self.spread.items():
            in_fp32 = name == "sink" or (name == "bias" and self.call.bias_float32)
            last = ROUNDING["fp32" if in_fp32 else self.call.dtype]
            size = self.expected[name].abs()
            limits[name] = 1.5 * error + last * size + 1e-6 + SMALL * size
        return limits


def _with_reference(call: Call, x: dict[str, Any]) -> Problem:
    reference = _Reference(call, x)
    for index, rows, keys, used in _sequences(call):
        reference.add(_sequence(call, x, index, rows, slice(keys.start, keys.start + used)))
    x["out"], x["lse"] = reference.out, reference.lse
    if call.key_mask:
        for name in "kv":
            x[name][~x["key_mask"].flatten()] = torch.nan
    return Problem(call, _arguments(call, x), reference.expected, reference.limits())


def _add_bias(total: Tensor, b: int, ds: Tensor) -> None:
    """Add ds (H, n, keys) to a gradient of shape (B or 1, H or 1, Sq or 1, Sk or 1)."""
    target = total[b if total.shape[0] > 1 else 0]
    for dim in range(3):
        if target.shape[dim] == 1:
            ds = ds.sum(dim, keepdim=True)
    target[:, : ds.shape[1], : ds.shape[2]] += ds


def _arguments(call: Call, x: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of attention_backward. The output tensors are filled with NaN."""
    device, batch = x["q"].device, len(call.lengths_q)
    dense = {name: x[name] for name in ("dout", "q", "k", "v", "out")}
    lse, dlse = x["lse"], x.get("dlse")
    arguments: dict[str, Any] = {}

    def int32(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    if call.packed:
        for letter, lengths in (("q", call.lengths_q), ("k", call.lengths_k)):
            arguments[f"cu_seqlens_{letter}"] = int32([sum(lengths[:b]) for b in range(batch + 1)])
            arguments[f"max_seqlen_{letter}"] = max(lengths)
    else:
        dense = {name: t.unflatten(0, (batch, t.shape[0] // batch)) for name, t in dense.items()}
        rows = (call.heads, batch, call.lengths_q[0])
        lse = lse.view(rows).transpose(0, 1)
        dlse = None if dlse is None else dlse.view(rows).transpose(0, 1)
    arguments |= {**dense, "softmax_lse": lse, "dlse": dlse, "causal": call.causal, "window_size": call.window}
    arguments |= {"softcap": call.softcap, "deterministic": call.deterministic, "attn_bias": x.get("bias")}
    arguments |= {"alibi_slopes": x.get("slopes"), "sink": x.get("sink"), "key_mask": x.get("key_mask")}
    if call.used_k is not None:
        arguments["seqused_k"] = int32(list(call.used_k))
    if call.dropout:
        seed, offset = (torch.tensor(n, dtype=torch.int64, device=device) for n in (call.number, 4))
        arguments |= {"dropout_p": 0.3, "rng_state": flashbwd.RngState(seed, offset, call.dropout)}
    for name in "qkv":
        to = torch.float32 if name == "q" and call.wide_dq else DTYPES[call.dtype]
        arguments[f"d{name}"] = torch.full(dense[name].shape, torch.nan, dtype=to, device=device)
    return arguments


def _without_outputs(problem: Problem) -> dict[str, Any]:
    return {name: value for name, value in problem.arguments.items() if name not in ("dq", "dk", "dv")}


def refusal(problem: Problem, backend: str) -> str | None:
    """Return why the backend does not compute a call, or None if it does."""
    try:
        with flashbwd.use_backend(backend):
            flashbwd.plan_attention_backward(**_without_outputs(problem))
    except ValueError as error:
        return str(error)
    return None


def gradients(problem: Problem, backend: str) -> Any:
    with flashbwd.use_backend(backend):
        return flashbwd.attention_backward(**problem.arguments)


def repeat(problem: Problem, backend: str) -> Callable[[], Any]:
    """Return a function that computes the call again, with other outputs."""
    arguments = _without_outputs(problem)

    def run() -> Any:
        with flashbwd.use_backend(backend):
            return flashbwd.attention_backward(**arguments)

    return run


def worst(problem: Problem, gradients: Any) -> dict[str, float]:
    """Return the largest ratio of error to limit of each gradient; inf if an element is NaN."""
    results = {"q": gradients.dq, "k": gradients.dk, "v": gradients.dv, "bias": gradients.dbias}
    results["sink"] = gradients.dsink
    found = {}
    for name, expected in problem.expected.items():
        got = results[name].double().reshape(expected.shape)
        if got.numel() == 0:
            continue
        found[f"d{name}"] = largest_ratio(got, expected, problem.limits[name])
    return found


def largest_ratio(got: Tensor, expected: Tensor, limits: Tensor) -> float:
    """Return the largest ratio of error to limit; inf if an element is NaN."""
    ratio = (got.detach() - expected).abs() / limits
    return float(torch.where(ratio.isnan(), torch.inf, ratio).max())

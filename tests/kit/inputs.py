"""Tensors of a case: values, reference results, memory layouts, and NaN in all memory that must not be read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from . import dropout, oracle, tolerance
from .cases import Case

_DLSE_OF_ONE_SIGN = 64.0  # larger than |dp - delta|
_A_HANDFUL = 1024  # different values


def forward_arguments(canonical: dict[str, Any]) -> dict[str, Any]:
    """The arguments of oracle.attention except q, k, v and dout."""
    return {name: x for name, x in canonical.items() if name not in ("q", "k", "v", "dout", "out", "lse")}


@dataclass(frozen=True)
class Draw:
    """The values of a case, independent of its layout, and the reference results. See Inputs."""

    canonical: dict[str, Any]
    reference: oracle.AttentionResult

    @cached_property
    def rounded(self) -> tuple[oracle.AttentionResult, ...]:
        """Gradients by plain PyTorch in the inputs' precision: from autograd, and from the written-out formulas."""
        main = [self.canonical[name] for name in ("q", "k", "v", "dout")]
        dtype = self.canonical["q"].dtype
        by_autograd = oracle.attention(*main, **forward_arguments(self.canonical), dtype=dtype)
        return (by_autograd, self._written_out(dtype))

    @cached_property
    def naive(self) -> tuple[oracle.AttentionResult, ...]:
        """``rounded``, and the written-out formulas in float64, whose error comes only from the rounded out and LSE."""
        return (*self.rounded, self._written_out(torch.float64))

    @cached_property
    def reordered(self) -> tuple[oracle.AttentionResult, ...]:
        """``naive``, and plain PyTorch with the head dimensions in other orders, whose sums round differently."""
        others = []
        for seed in range(4):
            generator = torch.Generator().manual_seed(seed)
            order = {name: torch.randperm(self.canonical[name].shape[-1], generator=generator) for name in ("q", "v")}
            of = {"q": order["q"], "k": order["q"], "v": order["v"], "dout": order["v"], "out": order["v"]}
            shuffled = Draw({n: x[..., of[n]] if n in of else x for n, x in self.canonical.items()}, self.reference)
            for result in shuffled.rounded:
                back = {f"d{n}": getattr(result, f"d{n}")[..., of[n].argsort()] for n in ("q", "k", "v")}
                others.append(replace(result, **back))
        return (*self.naive, *others)

    @cached_property
    def limits(self) -> dict[tuple[str, str], Tensor]:
        """The limits of the blocks of a gradient, as far as they are known. See Inputs.limits."""
        return {}

    def _written_out(self, dtype: torch.dtype) -> oracle.AttentionResult:
        given = [self.canonical[name] for name in ("q", "k", "v", "dout", "out", "lse")]
        return oracle.attention_from_lse(*given, **forward_arguments(self.canonical), dtype=dtype)


@dataclass(frozen=True)
class Inputs:
    """The arguments of one call. ``softmax_lse`` and ``dlse`` have the form that the case requests.

    ``reference`` holds the float64 results, on the CPU. ``canonical`` holds the values of the arguments for the oracle:
    on the CPU, contiguous, with lse and dlse as (B, H, Sq) or (H, total_q).
    """

    case: Case
    dtype: torch.dtype
    seed: int
    arguments: dict[str, Any]
    draw: Draw

    @property
    def canonical(self) -> dict[str, Any]:
        return self.draw.canonical

    @property
    def reference(self) -> oracle.AttentionResult:
        return self.draw.reference

    def tensors(self) -> dict[str, Tensor]:
        """The tensor arguments by name."""
        return {name: x for name, x in self.arguments.items() if isinstance(x, Tensor)}

    def rng_state(self) -> tuple[int, int, str] | None:
        """(seed, offset, layout) for flashbwd.RngState, or None."""
        case = self.case
        return (case.rng_seed, case.rng_offset, case.rng_layout) if case.dropout_p > 0 else None

    def check(self, dq: Tensor, dk: Tensor, dv: Tensor, dbias: Tensor | None, dsink: Tensor | None) -> None:
        """Assert that the gradients obey the tolerance rule, and that they are None exactly where the reference is."""
        for name, actual in {"dq": dq, "dk": dk, "dv": dv, "dbias": dbias, "dsink": dsink}.items():
            expected = getattr(self.reference, name)
            if expected is None:
                assert actual is None, f"{name} was not asked for"
                continue
            assert actual is not None, f"{name} is missing"
            assert actual.shape == expected.shape, (
                f"{name} has shape {tuple(actual.shape)}, the reference {tuple(expected.shape)}"
            )
            if expected.numel() > 0:
                self._check_blocks(name, actual.detach().double().cpu())

    def blocks(self, name: str) -> tolerance.Blocks:
        """The tolerance rule for one gradient."""
        return tolerance.Blocks(name, getattr(self.reference, name), self.dtype, self.case.softcap > 0)

    def limits(self, name: str, of: str) -> Tensor:
        """The limits of the blocks of one gradient, from the results of plain PyTorch that ``of`` names in Draw.

        In float64 the rule uses no such results, so they are not computed.
        """
        known, key = self.draw.limits, (name, of)
        if key not in known:
            blocks = self.blocks(name)
            naive = () if self.dtype == torch.float64 else getattr(self.draw, of)
            known[key] = blocks.limits(blocks.errors(getattr(result, name) for result in naive))
        return known[key]

    def _check_blocks(self, name: str, actual: Tensor) -> None:
        blocks = self.blocks(name)
        for of in ("rounded", "naive", "reordered"):  # fewer results give a smaller limit, and take less time
            limits = self.limits(name, of)
            exceeded = blocks.exceeded(actual, limits)
            if not bool(exceeded.any()):
                break
        exceeded = exceeded & (blocks.distinct() <= _A_HANDFUL)
        if bool(exceeded.any()):
            limits = torch.where(exceeded, self._usual_limits(blocks), limits)
        blocks.check(actual, limits)

    def _usual_limits(self, blocks: tolerance.Blocks) -> Tensor:
        """Limits of blocks with few different values, from other random draws of the case.

        In such a block the plain computations can be accurate by chance, and hypothesis finds such cases. Other draws
        show their usual error. No limit exceeds the limit of the whole tensor.
        """
        name = blocks.gradient
        usual = torch.zeros((), dtype=torch.float64)
        for n in range(1, 13):
            other = build(self.case, self.dtype, seed=self.seed + n)
            usual = usual.maximum(other.blocks(name).errors(getattr(result, name) for result in other.draw.naive))
        rounding = torch.finfo(self.dtype).eps * blocks.largest()
        limits = 2 * blocks.limits(usual) + rounding
        if int(blocks.expected.unique().numel()) <= _A_HANDFUL:
            return limits
        reached = tolerance.largest_error(blocks.expected, (getattr(result, name) for result in self.draw.naive))
        return limits.clamp(max=tolerance.bound(blocks.expected, reached, self.dtype, softcap=blocks.softcap))


def roundup(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def build(case: Case, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
    """Draw the values of a case, compute its reference, and lay out the arguments on ``device`` as requested."""
    drawn = _draw(replace(case, name="", layout="contiguous", lse_form="rows", deterministic=False), dtype, seed)
    return Inputs(case, dtype, seed, _arguments(case, drawn.canonical, torch.device(device)), drawn)


def arguments_to_plan(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """The arguments of a case in its layout, on the CPU, with zeros for out and LSE, so that nothing is computed."""
    canonical = _values(replace(case, dropout_p=0.0), dtype, 0)
    canonical["out"] = torch.zeros_like(canonical["dout"])
    lead = canonical["q"].shape[:-2]
    rows = (case.heads, *lead) if case.varlen else (lead[0], case.heads, lead[1])
    canonical["lse"] = torch.zeros(rows, dtype=lse_dtype(dtype))
    return _arguments(case, canonical, torch.device("cpu"))


@lru_cache(maxsize=4)  # consecutive tests often differ only in backend, layout or determinism
def _draw(case: Case, dtype: torch.dtype, seed: int) -> Draw:
    canonical = _values(case, dtype, seed)
    reference = oracle.attention(*(canonical[name] for name in ("q", "k", "v", "dout")), **forward_arguments(canonical))
    canonical["out"] = reference.out.to(dtype)
    canonical["lse"] = torch.where(reference.empty, case.empty_lse, reference.lse).to(lse_dtype(dtype))
    if canonical["dlse"] is not None:
        # dlse is NaN in rows in which no gradient depends on it. With a sink, the LSE of a row without keys is the
        # sink, so dlse matters in that row.
        canonical["dlse"] = torch.where(reference.lse == -torch.inf, torch.nan, canonical["dlse"])
    _poison(case, canonical)
    return Draw(canonical, reference)


@lru_cache(maxsize=2)  # consecutive tests often differ only in precision
def _numbers(case: Case, seed: int) -> dict[str, Any]:
    """The random numbers of a case in float64, and its dropout masks. All precisions share them: see _values."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lead_q = (sum(case.physical_q) + case.trailing,) if case.varlen else (case.batch, case.seqlen_q)
    lead_k = (sum(case.physical_k) + case.trailing,) if case.varlen else (case.batch, case.seqlen_k)
    dout = normal(*lead_q, case.heads, case.head_dim_v)
    if case.dout_layout == "expanded_row":
        dout = normal(case.head_dim_v).expand_as(dout)
    statistics = (case.heads, *lead_q) if case.varlen else (case.batch, case.heads, case.seqlen_q)
    slopes = {None: None, "heads": (case.heads,), "batch": (case.batch_size, case.heads)}[case.alibi]
    sink = None if case.sink is None else normal(case.heads)
    if case.sink == "minus_inf" and sink is not None:
        sink[0] = -torch.inf
    keep = None
    if case.dropout_p > 0:
        keep = dropout.keep_masks(
            case.rng_layout,
            case.rng_seed,
            case.rng_offset,
            case.dropout_p,
            heads=case.heads,
            seqlens_q=case.logical_q,
            seqlens_k=case.logical_k,
            max_seqlen_q=case.max_seqlen_q,
            max_seqlen_k=case.max_seqlen_k,
        )
    return {
        "q": normal(*lead_q, case.heads, case.head_dim),
        "k": normal(*lead_k, case.heads_kv, case.head_dim),
        "v": normal(*lead_k, case.heads_kv, case.head_dim_v),
        "dout": dout,
        "attn_bias": _bias(case, generator),
        "alibi_slopes": None if slopes is None else normal(*slopes),
        "sink": sink,
        "dlse": normal(*statistics) if case.dlse else None,
        "keep": keep,
        "key_mask": _key_mask(case, generator),
    }


def _values(case: Case, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    drawn = _numbers(case, seed)

    def rounded(name: str, to: torch.dtype = dtype) -> Any:
        x = drawn[name]
        return None if x is None else x.to(to, copy=True)

    def int32(values: tuple[int, ...] | None) -> Tensor | None:
        return None if values is None else torch.tensor(values, dtype=torch.int32)

    def cumulative(physical: tuple[int, ...]) -> Tensor | None:
        return torch.tensor([sum(physical[:n]) for n in range(len(physical) + 1)], dtype=torch.int32)

    slopes = rounded("alibi_slopes", torch.float32)
    found: dict[str, Any] = {
        "q": rounded("q"),
        "k": rounded("k"),
        "v": rounded("v"),
        "dout": rounded("dout"),
        "softmax_scale": case.softmax_scale,
        "causal": case.causal,
        "window_size": case.window_size,
        "softcap": case.softcap,
        "attn_bias": rounded("attn_bias", torch.float32 if case.bias_float32 and dtype != torch.float64 else dtype),
        "key_mask": drawn["key_mask"],
        "alibi_slopes": None if slopes is None else slopes.abs() * 0.1,
        "sink": rounded("sink", lse_dtype(dtype)),
        "dlse": rounded("dlse", lse_dtype(dtype)),
        "keep": drawn["keep"],
        "keep_scale": dropout.keep_scale(case.rng_layout, case.dropout_p, dtype),
        "cu_seqlens_q": cumulative(case.physical_q) if case.varlen else None,
        "cu_seqlens_k": cumulative(case.physical_k) if case.varlen else None,
        "seqused_q": int32(case.seqused_q),
        "seqused_k": int32(case.seqused_k),
    }
    if case.dout_layout == "expanded_scalar":
        found["dout"].fill_(0.75)
    if case.one_sign:
        found |= {name: found[name].abs() for name in ("q", "k", "dout")}
        found["dlse"] = torch.full_like(found["dlse"], _DLSE_OF_ONE_SIGN)
    return found


def _bias(case: Case, generator: torch.Generator) -> Tensor | None:
    if case.bias is None:
        return None
    full = (case.batch_size, case.heads, case.max_seqlen_q, case.max_seqlen_k)
    shape = [size if letter != "1" else 1 for letter, size in zip(case.bias, full, strict=True)]
    bias = torch.randn(shape, generator=generator, dtype=torch.float64)
    if case.bias_hides_rows:
        bias[:, :, 1::3] = -torch.inf  # whole rows
        if bias.shape[0] > 1 == bias.shape[2]:
            bias[0] = -torch.inf
        bias.view(-1)[::11] = -torch.inf
    if case.bias_layout == "expanded":
        bias = bias[:1].expand(shape).clone()
    return bias


def _key_mask(case: Case, generator: torch.Generator) -> Tensor | None:
    """(B, Sk) bool; with the layout "expanded", all sequences have the mask of the first."""
    if case.key_mask is None:
        return None
    keys = torch.arange(case.seqlen_k)
    if case.key_mask == "padding":
        used = torch.randint(case.seqlen_k + 1, (case.batch, 1), generator=generator)
        mask = keys < used
    else:
        mask = torch.rand(case.batch, case.seqlen_k, generator=generator) < 0.5
        if case.key_mask == "empty":
            mask[:1] = False
    return mask[:1].expand_as(mask).clone() if case.key_mask_layout == "expanded" else mask


def _poison(case: Case, canonical: dict[str, Any]) -> None:
    """NaN outside the logical lengths: rows of q, k, v, dout, out, lse, dlse, and entries of the bias.

    Also NaN at the keys that the key mask hides: rows of k and v, and entries of the bias if they are hidden in all
    sequences that share it.
    """
    spans = {"q": (case.physical_q, case.logical_q), "k": (case.physical_k, case.logical_k)}
    of_q = ["q", "out", "lse", "dlse"] + (["dout"] if case.dout_layout == "same" else [])
    for names, (physical, logical) in ((of_q, spans["q"]), (["k", "v"], spans["k"])):
        for name in names:
            if (x := canonical[name]) is None:
                continue
            rows = x.transpose(-1, -2) if name in ("lse", "dlse") else x  # (rows, H) or (B, Sq, H)
            start = 0
            for b, (n, used) in enumerate(zip(physical, logical, strict=True)):
                if case.varlen:
                    rows[start + used : start + n] = torch.nan
                else:
                    rows[b, used:] = torch.nan
                start += n
            if case.varlen:
                rows[start:] = torch.nan  # the rows after the last sequence
    bias, mask = canonical["attn_bias"], canonical["key_mask"]
    if mask is not None:
        for name in ("k", "v"):
            canonical[name][~mask] = torch.nan
    if bias is None:
        return
    if mask is not None and bias.shape[3] > 1:
        shared = bias.shape[0] == 1 or case.bias_layout == "expanded"
        shown = mask.any(0, keepdim=True).expand(bias.shape[0], -1) if shared else mask
        bias.masked_fill_(~shown[:, None, None], torch.nan)
    logical_pairs = list(zip(case.logical_q, case.logical_k, strict=True))
    if bias.shape[0] == 1 < case.batch_size or case.bias_layout == "expanded":
        logical_pairs = [(max(case.logical_q), max(case.logical_k))] * bias.shape[0]
    for b, (used_q, used_k) in enumerate(logical_pairs):
        if bias.shape[2] > 1:
            bias[b, :, used_q:] = torch.nan
        if bias.shape[3] > 1:
            bias[b, :, :, used_k:] = torch.nan


def _arguments(case: Case, canonical: dict[str, Any], device: torch.device) -> dict[str, Any]:
    def moved(x: Any) -> Any:
        return x.to(device, copy=True) if isinstance(x, Tensor) else x

    names = ("softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "sink")
    arguments: dict[str, Any] = {"dropout_p": case.dropout_p}
    arguments |= {name: moved(canonical[name]) for name in names}
    arguments |= {name: moved(canonical[name]) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")}
    q, k, v, dout, out = (moved(canonical[name]) for name in ("q", "k", "v", "dout", "out"))
    arguments |= dict(zip(("q", "k", "v"), _lay_out_qkv(case.layout, q, k, v), strict=True))
    arguments["out"] = lay_out(case.layout, out)
    if case.dout_layout == "expanded_scalar" and dout.numel() > 0:
        arguments["dout"] = dout.flatten()[0].clone().expand_as(dout)
    elif case.dout_layout == "expanded_row" and dout.numel() > 0:
        row = lay_out("offset" if case.layout == "offset" else "contiguous", dout[(0,) * (dout.dim() - 1)].clone())
        arguments["dout"] = row.expand_as(dout)
    else:
        arguments["dout"] = lay_out(case.layout, dout.contiguous())
    bias = canonical["attn_bias"]
    if bias is not None:
        bias = moved(bias.where(bias != -torch.inf, case.bias_floor))
    arguments["attn_bias"] = None if bias is None else lay_out_bias(case.bias_layout, bias)
    mask = moved(canonical["key_mask"])
    arguments["key_mask"] = None if mask is None else lay_out_mask(case.key_mask_layout, mask)
    for name, argument in (("lse", "softmax_lse"), ("dlse", "dlse")):
        x = canonical[name]
        arguments[argument] = None if x is None else moved(lse_in_form(case, x))
    if case.varlen:
        arguments["max_seqlen_q"], arguments["max_seqlen_k"] = case.max_seqlen_q, case.max_seqlen_k
    arguments["deterministic"] = case.deterministic
    return arguments


def lse_in_form(case: Case, rows: Tensor) -> Tensor:
    """The LSE or dlse, (B, H, Sq) or (H, total_q), in the form that the case requests; padding is NaN."""
    if case.lse_form == "rows":
        return rows
    if case.lse_form == "rows1":
        return rows.unsqueeze(-1)
    width = roundup(case.max_seqlen_q, 32)
    padded = torch.full((case.batch_size, case.heads, width), torch.nan, dtype=rows.dtype)
    start = 0
    for b, n in enumerate(case.physical_q):
        padded[b, :, :n] = rows[:, start : start + n] if case.varlen else rows[b]
        start += n
    return padded


def lay_out(layout: str, x: Tensor) -> Tensor:
    """The values of x, (B, S, H, D) or (total, H, D) or one row, as a view of memory with NaN in the gaps."""

    def buffer(*shape: int) -> Tensor:
        return torch.full(shape, torch.nan, dtype=x.dtype, device=x.device)

    if layout == "bhsd":
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "odd_strides":
        return buffer(*x.shape[:-1], x.shape[-1] + 3)[..., : x.shape[-1]].copy_(x)
    if layout == "offset":
        return buffer(x.numel() + 1)[1:].view(x.shape).copy_(x)
    if layout == "every_other_row":
        rows = x.dim() - 3
        doubled = list(x.shape)
        doubled[rows] *= 2
        index = (slice(None),) * rows + (slice(None, None, 2),)
        return buffer(*doubled)[index].copy_(x)
    assert layout in ("contiguous", "packed_qkv"), layout
    return x


def lay_out_bias(layout: str, x: Tensor) -> Tensor:
    """The values of x, (B, H, Sq, Sk), as a view of memory with NaN in the gaps."""
    if layout == "padded":
        columns = x.shape[-1]
        wide = torch.full((*x.shape[:-1], roundup(columns + 1, 16)), torch.nan, dtype=x.dtype, device=x.device)
        return wide[..., :columns].copy_(x)
    if layout == "expanded":
        return x[:1].clone().expand_as(x)
    assert layout == "contiguous", layout
    return x


def lay_out_mask(layout: str, x: Tensor) -> Tensor:
    """The values of x, (B, Sk), as a view of memory. Unused bytes are True."""
    if layout == "strided":
        memory = torch.ones(x.shape[1], 2 * x.shape[0], dtype=torch.bool, device=x.device)
        return memory[:, ::2].T.copy_(x)
    if layout == "expanded":
        return x[:1].clone().expand_as(x)
    assert layout == "contiguous", layout
    return x


def _lay_out_qkv(layout: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if layout != "packed_qkv" or k.shape != v.shape:
        return lay_out(layout, q), lay_out(layout, k), lay_out(layout, v)
    parts = [q, k, v] if q.shape[:-2] == k.shape[:-2] else [k, v]
    packed = torch.cat(parts, dim=-2).split([x.shape[-2] for x in parts], dim=-2)
    return packed if len(parts) == 3 else (q, *packed)

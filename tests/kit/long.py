"""Long sequences: values with which the loss of any tile is visible, and a reference that needs no S^2 memory.

With random values under a causal mask, the loss of a tile can be invisible: row i spreads its weight over i + 1 keys,
so late rows add less to the first keys than the rounding error of early rows. With "levelled" values dout grows with
the row, so all tiles contribute about equally to the gradients. With "one_sign" values, a large gradient of the LSE
makes all terms of dq, dk and dv positive, so sums only grow and rounding them between tiles becomes visible.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from . import tolerance
from .oracle import product

_ELEMENTS = 2**23  # scores in memory at a time
LEVEL = 64.0  # dout of row i is multiplied by (i + 1) / LEVEL
DLSE = 64.0
BLOCK_M, BLOCK_N = 64, 128


@dataclass(frozen=True)
class LongCase:
    """One square problem of batch 1."""

    seqlen: int
    head_dim: int = 128
    heads: int = 1
    heads_kv: int = 1
    causal: bool = True
    values: str = "levelled"  # or "one_sign", or "normal"

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"{self.values}-{mask}-{self.seqlen}-d{self.head_dim}-{self.heads}to{self.heads_kv}"


@dataclass(frozen=True)
class Gradients:
    """``out`` and gradients (1, S, H, D), ``lse`` (1, H, S)."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


@dataclass(frozen=True)
class Scores:
    """Results of a block of rows of one head: ``p`` and ``ds`` are (rows, keys), for the first ``keys`` keys."""

    head: int
    rows: slice
    keys: int
    p: Tensor
    ds: Tensor
    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class LongInputs:
    case: LongCase
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor | None  # (1, H, S)

    def scores(self, dtype: torch.dtype, rows_at_once: int = 0) -> Iterator[Scores]:
        """Yields blocks of rows of each head, with matrices in ``dtype``, and the LSE and delta at least in fp32."""
        case = self.case
        step = rows_at_once or max(BLOCK_M, _ELEMENTS // case.seqlen)
        scale, wide = case.head_dim**-0.5, torch.promote_types(dtype, torch.float32)
        for head in range(case.heads):
            kv = head * case.heads_kv // case.heads
            for start in range(0, case.seqlen, step):
                rows = slice(start, min(start + step, case.seqlen))
                keys = rows.stop if case.causal else case.seqlen
                q, dout = (x[0, rows, head].to(dtype) for x in (self.q, self.dout))
                k, v = (x[0, :keys, kv].to(dtype) for x in (self.k, self.v))
                s = scale * product(q, k.T)
                if case.causal:
                    later = (
                        torch.arange(keys, device=q.device) > torch.arange(start, rows.stop, device=q.device)[:, None]
                    )
                    s = s.masked_fill(later, -torch.inf)
                p = s.softmax(-1)
                out = product(p, v)
                delta = (dout.to(wide) * out).sum(-1)
                if self.dlse is not None:
                    delta = delta - self.dlse[0, head, rows]
                ds = (p * (product(dout, v.T) - delta[:, None])).to(dtype)
                yield Scores(head, rows, keys, p, ds, out, s.logsumexp(-1))

    def gradients(self, dtype: torch.dtype) -> Gradients:
        """Gradients from products in ``dtype``, whose sums over blocks of rows are at least fp32."""
        wide = torch.promote_types(dtype, torch.float32)
        out, dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (self.q, self.q, self.k, self.v))
        lse = torch.zeros(1, self.case.heads, self.case.seqlen, dtype=wide, device=out.device)
        scale = self.case.head_dim**-0.5
        for part in self.scores(dtype):
            kv = part.head * self.case.heads_kv // self.case.heads
            q, dout = (x[0, part.rows, part.head].to(dtype) for x in (self.q, self.dout))
            out[0, part.rows, part.head], lse[0, part.head, part.rows] = part.out.to(wide), part.lse.to(wide)
            dq[0, part.rows, part.head] = scale * product(part.ds, self.k[0, : part.keys, kv].to(dtype)).to(wide)
            dk[0, : part.keys, kv] += scale * product(part.ds.T, q)
            dv[0, : part.keys, kv] += product(part.p.T, dout)
        return Gradients(out, lse, dq.to(dtype), dk.to(dtype), dv.to(dtype))

    @cached_property
    def reference(self) -> Gradients:
        return self.gradients(torch.float64)

    @cached_property
    def plain(self) -> Gradients:
        """The results of the formulas in PyTorch in the precision of the inputs."""
        return self.gradients(self.q.dtype)

    def blocks(self, name: str) -> tolerance.Blocks:
        return tolerance.Blocks(name, getattr(self.reference, name), self.q.dtype)

    def limits(self, name: str) -> Tensor:
        blocks = self.blocks(name)
        return blocks.limits(blocks.errors([getattr(self.plain, name)]))

    def check(self, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        for name, actual in (("dq", dq), ("dk", dk), ("dv", dv)):
            self.blocks(name).check(actual.detach().double(), self.limits(name))

    def arguments(self) -> dict[str, object]:
        """Arguments of attention_backward, with out and LSE rounded as a forward rounds them."""
        found: dict[str, object] = {"dout": self.dout, "q": self.q, "k": self.k, "v": self.v}
        found |= {"out": self.reference.out.to(self.q.dtype), "softmax_lse": self.reference.lse.float()}
        found["causal"] = self.case.causal
        return found | ({} if self.dlse is None else {"dlse": self.dlse})


@lru_cache(maxsize=2)  # consecutive tests often differ only in backend and precision
def build(case: LongCase, dtype: torch.dtype, device: str = "cpu") -> LongInputs:
    generator = torch.Generator(device).manual_seed(0)

    def normal(heads: int) -> Tensor:
        return torch.randn(1, case.seqlen, heads, case.head_dim, generator=generator, device=device)

    q, k, v, dout = (normal(heads) for heads in (case.heads, case.heads_kv, case.heads_kv, case.heads))
    dlse = None
    if case.values == "one_sign":
        q, k, dout = q.abs(), k.abs(), dout.abs()
        dlse = torch.full((1, case.heads, case.seqlen), DLSE, device=device)
    elif case.values == "levelled" and case.causal:
        dout = dout * (torch.arange(1, case.seqlen + 1, device=device) / LEVEL)[:, None, None]
    q, k, v, dout = (x.to(dtype) for x in (q, k, v, dout))
    return LongInputs(case, q, k, v, dout, dlse)


def as_a_kernel(x: LongInputs, sums: torch.dtype = torch.float32, of: str = "dq") -> Gradients:
    """The gradients with a kernel's rounding: P and dS are rounded once to the inputs' dtype; sums over tiles are fp32.

    Between tiles, sums of the gradient ``of`` are rounded to ``sums``; any dtype except float32 simulates a fault.
    """
    dtype, scale = x.q.dtype, x.case.head_dim**-0.5
    dq, dk, dv = (torch.zeros_like(t, dtype=torch.float32) for t in (x.q, x.k, x.v))

    def rounded(name: str, tensor: Tensor) -> Tensor:
        return tensor.to(sums).float() if name == of else tensor

    for part in x.scores(torch.float32, BLOCK_M):
        kv = part.head * x.case.heads_kv // x.case.heads
        p, ds = (t.to(dtype).float() for t in (part.p, part.ds))
        q, dout = (t[0, part.rows, part.head].float() for t in (x.q, x.dout))
        for start in range(0, part.keys, BLOCK_N):
            keys = slice(start, min(start + BLOCK_N, part.keys))
            of_q = dq[0, part.rows, part.head] + scale * (ds[:, keys] @ x.k[0, keys, kv].float())
            dq[0, part.rows, part.head] = rounded("dq", of_q)
        seen = slice(0, part.keys)
        dk[0, seen, kv] = rounded("dk", dk[0, seen, kv] + scale * (ds.T @ q))
        dv[0, seen, kv] = rounded("dv", dv[0, seen, kv] + p.T @ dout)
    return Gradients(x.reference.out, x.reference.lse, dq.to(dtype), dk.to(dtype), dv.to(dtype))

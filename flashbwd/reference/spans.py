"""Spans: dense batches and packed sequences, both as groups of sequences of equal lengths."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flashbwd.options import AttentionOptions


class Span(NamedTuple):
    """`batches` sequences, beginning with sequence `batch0`, that each have `sq` queries and `sk` keys in use."""

    batch0: int
    batches: int
    sq: int
    sk: int
    packed: bool
    q0: int = 0  # first row in packed tensors
    k0: int = 0

    def queries(self, tensor: Tensor) -> Tensor:
        """Return the span's (batches, sq, heads, dim) of a dense or packed tensor of query rows."""
        return self._take(tensor, self.q0, self.sq)

    def keys(self, tensor: Tensor) -> Tensor:
        """Return the span's (batches, sk, heads, dim) of a dense or packed tensor of key rows."""
        return self._take(tensor, self.k0, self.sk)

    def _take(self, tensor: Tensor, first: int, length: int) -> Tensor:
        if self.packed:
            return narrow(tensor, 0, first, length).unsqueeze(0)
        return narrow(narrow(tensor, 0, self.batch0, self.batches), 1, 0, length)

    def statistics(self, tensor: Tensor) -> Tensor:
        """Return the span's (batches, heads, sq) of an LSE-like tensor in any accepted shape.

        Dense: (B, H, Sq), (B, H, Sq, 1) or (B, H, roundup(Sq, 32)). Packed: (H, total_q) or
        (B, H, roundup(max_seqlen_q, 32)).
        """
        if tensor.dim() == 2:
            return narrow(tensor, 1, self.q0, self.sq).unsqueeze(0)
        if tensor.dim() == 4:
            tensor = tensor.squeeze(3)
        return narrow(narrow(tensor, 0, self.batch0, self.batches), 2, 0, self.sq)

    def plane(self, tensor: Tensor) -> Tensor:
        """Return the span's part of a tensor that broadcasts to (B, heads, queries, keys); dimensions of 1 are kept."""
        return narrow_broadcast(tensor, ((self.batch0, self.batches), (0, tensor.shape[1]), (0, self.sq), (0, self.sk)))

    def batch_rows(self, tensor: Tensor) -> Tensor:
        """Return the span's (batches or 1, H) of a tensor of shape (H,) or (B, H)."""
        return tensor.unsqueeze(0) if tensor.dim() == 1 else narrow(tensor, 0, self.batch0, self.batches)


def narrow(tensor: Tensor, dim: int, first: int, length: int) -> Tensor:
    """Call ``tensor.narrow``, unless the range is the whole dimension: an operator takes 1-2 us."""
    return tensor if tensor.shape[dim] == length else tensor.narrow(dim, first, length)


def narrow_broadcast(tensor: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """Narrow every dimension to its (first, length), except dimensions of size 1, which broadcast."""
    for dim, (first, length) in enumerate(ranges):
        if tensor.shape[dim] != 1:
            tensor = narrow(tensor, dim, first, length)
    return tensor


def split_spans(q: Tensor, k: Tensor, options: AttentionOptions) -> list[Span]:
    """Return the spans of a call: one for a dense batch, or one per sequence with cu_seqlens or seqused."""
    cu_seqlens_q, cu_seqlens_k = options.cu_seqlens_q, options.cu_seqlens_k
    seqused_q, seqused_k = options.seqused_q, options.seqused_k
    if cu_seqlens_q is None or cu_seqlens_k is None:
        batch, sq, sk = q.shape[0], q.shape[1], k.shape[1]
        if seqused_q is None and seqused_k is None:
            return [Span(0, batch, sq, sk, packed=False)]
        used_q = _on_host(seqused_q, "seqused_q", [sq] * batch)
        used_k = _on_host(seqused_k, "seqused_k", [sk] * batch)
        return [Span(b, 1, used_q[b], used_k[b], packed=False) for b in range(batch)]
    first_q, first_k = _on_host(cu_seqlens_q, "cu_seqlens_q"), _on_host(cu_seqlens_k, "cu_seqlens_k")
    used_q = _on_host(seqused_q, "seqused_q", [b - a for a, b in itertools.pairwise(first_q)])
    used_k = _on_host(seqused_k, "seqused_k", [b - a for a, b in itertools.pairwise(first_k)])
    return [
        Span(b, 1, used_q[b], used_k[b], packed=True, q0=first_q[b], k0=first_k[b]) for b in range(len(first_q) - 1)
    ]


def _on_host(tensor: Tensor | None, name: str, default: Sequence[int] = ()) -> list[int]:
    if tensor is None:
        return list(default)
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"flashbwd: {name} is on the GPU and the reference backend must read it on the host, "
            "which a CUDA graph capture does not allow"
        )
    return [int(length) for length in tensor.tolist()]

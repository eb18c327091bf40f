"""Splits the rows of a long sequence over the devices of a mesh, and gathers them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flashbwd import _arguments
from flashbwd.integrations.context_plan import Range, balanced_chunks


@dataclass(frozen=True)
class RowSplit:
    """The rows of a sequence that each device of a mesh dimension holds.

    Attributes
    ----------
    mesh : DeviceMesh
        One-dimensional.
    chunks : tuple of tuple of (int, int)
        For each device, the ranges of rows that it holds, in the order of the sequence.
    """

    mesh: DeviceMesh
    chunks: tuple[tuple[Range, ...], ...]

    @property
    def rank(self) -> int:
        """This device's position in the mesh."""
        return self.mesh.get_local_rank()

    @property
    def total(self) -> int:
        """Number of rows of the whole sequence."""
        return sum(self.length(rank) for rank in range(len(self.chunks)))

    def length(self, rank: int | None = None) -> int:
        """Return the number of rows of a device, by default of this one."""
        return sum(stop - start for start, stop in self.chunks[self.rank if rank is None else rank])

    def rows(self, device: torch.device | str | None = None) -> Tensor:
        """Return the index in the whole sequence of each row that this device holds, (rows,) int64."""
        return self.take(torch.arange(self.total, device=device))

    def take(self, whole: Tensor, dim: int = 0) -> Tensor:
        """Return this device's rows of a tensor that holds the rows of the whole sequence along ``dim``.

        Differentiable with respect to ``whole``.
        """
        check_rows("whole", whole, dim, self.total)
        rows = [whole.narrow(dim, start, stop - start) for start, stop in self.chunks[self.rank]]
        return torch.cat(rows, dim) if rows else whole.narrow(dim, 0, 0)

    @torch.no_grad()
    def gather(self, part: Tensor, dim: int = 0) -> Tensor:
        """Return the rows of all devices, in the order of the sequence; every device of the mesh must call it.

        The result has no gradient.
        """
        check_rows("part", part, dim, self.length())
        longest = max(self.length(rank) for rank in range(len(self.chunks)))
        rows_first = part.movedim(dim, 0).contiguous()
        padded = rows_first.new_zeros(longest, *rows_first.shape[1:])
        padded[: len(rows_first)] = rows_first
        gathered = [torch.empty_like(padded) for _ in self.chunks]
        dist.all_gather(gathered, padded, group=self.mesh.get_group())
        whole = rows_first.new_empty(self.total, *rows_first.shape[1:])
        for rows, chunks in zip(gathered, self.chunks, strict=True):
            first = 0
            for start, stop in chunks:
                whole[start:stop] = rows[first : first + stop - start]
                first += stop - start
        return whole.movedim(0, dim)


@dataclass(frozen=True)
class ContextSplit(RowSplit):
    """The rows of a sequence, or of packed documents, that each device holds; made by :func:`split_context`.

    Attributes
    ----------
    bounds : tuple of int
        Cumulative lengths of the documents, from 0 to the number of rows.
    packed : bool
        True if the rows are packed documents, and q, k and v have no batch dimension.
    window : (int, int)
        Number of visible keys to the left and right of the diagonal; -1 is unbounded.
    """

    bounds: tuple[int, ...]
    packed: bool
    window: tuple[int, int]

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """Return the position in its document of each row of this device, (rows,) int64, for rotary embeddings."""
        bounds = torch.tensor(self.bounds, device=device)
        starts = bounds[:-1].repeat_interleave(bounds.diff(), output_size=self.total)
        return self.rows(device) - self.take(starts)


def split_context(
    mesh: DeviceMesh,
    *,
    seqlen: int | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
) -> ContextSplit:
    """Split the rows of a sequence, or of packed documents, over the devices of a mesh dimension.

    All devices get almost equally many rows (the numbers differ by at most 16) and almost equal attention work. A
    document may span several devices. Make one split per batch and use it for all layers.

    Parameters
    ----------
    mesh : DeviceMesh
        One-dimensional, for example ``mesh["context"]`` of a larger mesh.
    seqlen : int, optional
        Number of rows of each sequence, for q, k and v of shape (B, rows, H, D). Pass either this or ``cu_seqlens``.
    cu_seqlens : Tensor or sequence of int, (documents + 1,), optional
        Cumulative lengths of the packed documents of the whole sequence, starting with 0, for q, k and v of shape
        (rows, H, D). They must be equal on all devices. The host reads the lengths, so it waits for the GPU if the
        tensor is on the GPU. Documents may be empty.
    causal : bool
        True hides the keys after each query's own position.
    window_size : (int, int)
        Number of visible keys to the left and right of the diagonal; -1 is unbounded. Causal masking sets right to 0.

    Returns
    -------
    ContextSplit

    Raises
    ------
    ValueError
        If an argument is invalid. The message names the argument, its value and what was expected.
    """
    check_mesh(mesh)
    if (seqlen is None) == (cu_seqlens is None):
        both = "both are given" if seqlen is not None else "neither is given"
        raise ValueError(f"flashbwd: seqlen and cu_seqlens: {both}, expected one of them")
    bounds = _bounds_of(cu_seqlens) if cu_seqlens is not None else (0, _length("seqlen", seqlen))
    left, right = _window(window_size)
    window = (left, 0 if _arguments.flag("causal", causal) else right)
    chunks = balanced_chunks(bounds, window, mesh.size())
    return ContextSplit(mesh, chunks, bounds, cu_seqlens is not None, window)


def check_mesh(mesh: Any) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"flashbwd: mesh is {_arguments.came(mesh)}, expected a DeviceMesh")
    if mesh.ndim != 1:
        raise ValueError(f"flashbwd: mesh has {mesh.ndim} dimensions, expected 1: select one, such as mesh['context']")


def _length(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"flashbwd: {name} is {_arguments.came(value)}, expected an integer of at least 0")
    return value


def _bounds_of(cu_seqlens: Any) -> tuple[int, ...]:
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1:
            dtype = str(cu_seqlens.dtype).removeprefix("torch.")
            shape = tuple(cu_seqlens.shape)
            raise ValueError(
                f"flashbwd: cu_seqlens is {dtype} of shape {shape}, expected int32 or int64, (documents + 1,)"
            )
        cu_seqlens = cu_seqlens.tolist()
    elif not isinstance(cu_seqlens, (list, tuple)):
        raise ValueError(
            f"flashbwd: cu_seqlens is {_arguments.came(cu_seqlens)}, expected a tensor or a list of lengths"
        )
    bounds = tuple(_length(f"cu_seqlens[{i}]", bound) for i, bound in enumerate(cu_seqlens))
    if len(bounds) < 2 or bounds[0] != 0:
        first = f"starts with {bounds[0]}" if bounds and bounds[0] != 0 else f"has {len(bounds)} elements"
        raise ValueError(f"flashbwd: cu_seqlens {first}, expected at least 2 elements of which the first is 0")
    for i, (before, after) in enumerate(itertools.pairwise(bounds)):
        if after < before:
            raise ValueError(f"flashbwd: cu_seqlens[{i + 1}] is {after}, expected at least cu_seqlens[{i}], {before}")
    return bounds


def _window(window_size: Any) -> tuple[int, int]:
    sizes = window_size if isinstance(window_size, (list, tuple)) else ()
    if len(sizes) != 2 or any(not isinstance(w, int) or isinstance(w, bool) or w < -1 for w in sizes):
        raise ValueError(f"flashbwd: window_size is {window_size!r}, expected 2 integers of at least -1")
    return sizes[0], sizes[1]


def check_rows(name: str, tensor: Tensor, dim: int, length: int) -> None:
    _arguments.tensor(name, tensor)
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"flashbwd: dim is {dim}, expected a dimension of {name}, which has {tensor.dim()} dimensions")
    if tensor.shape[dim] != length:
        raise ValueError(f"flashbwd: {name} has {tensor.shape[dim]} rows in dimension {dim}, expected {length}")

"""The gradient of attn_bias."""

from __future__ import annotations

import torch
from torch import Tensor

from flashbwd.reference.blocks import Chunk
from flashbwd.reference.scores import bias_tile
from flashbwd.reference.spans import Span


class BiasGradient:
    """Sums score gradients into the shape of the bias.

    If one tile has the complete sum of each element of dbias, the tile writes it in dbias's dtype. Otherwise the tiles
    are summed in the accumulation dtype. For a dense bias that broadcasts only over batch or heads, ``one_chunk``
    requests all heads in one chunk, so that each tile has the complete sums.
    """

    def __init__(self, dbias: Tensor, full: tuple[int, int, int, int], spans: list[Span], dtype: torch.dtype) -> None:
        self._dbias = dbias
        summed = [size != all_of for size, all_of in zip(dbias.shape, full, strict=True)]
        self.one_chunk = (summed[0] or summed[1]) and not (summed[2] or summed[3]) and len(spans) == 1
        self.shared = any(summed[:3])  # several sequences, heads or queries contribute to one element
        self._once = self.one_chunk or not any(summed)
        dbias.zero_()
        self._total = dbias if self._once or dbias.dtype == dtype else torch.zeros_like(dbias, dtype=dtype)

    def add(self, ds: Tensor, span: Span, chunk: Chunk, rows: tuple[int, int], cols: tuple[int, int]) -> None:
        target = bias_tile(chunk.of_plane(span.plane(self._total)), rows, cols)
        summed = [dim for dim in range(4) if target.shape[dim] == 1 and ds.shape[dim] != 1]
        part = ds.sum(summed, keepdim=True) if summed else ds
        if self._once:
            target.copy_(part)
        else:
            target.add_(part)

    def finish(self) -> None:
        if self._total is not self._dbias:
            self._dbias.copy_(self._total)

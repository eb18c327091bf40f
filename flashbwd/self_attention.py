"""The self-attention layer of a transformer as a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flashbwd import _arguments
from flashbwd.attention import attention

__all__ = ["SelfAttention"]


class SelfAttention(nn.Module):
    """Multi-head self-attention with its projections: ``proj(attention(qkv(x)))``.

    Parameters
    ----------
    embed_dim : int
        Width of the input and of the output.
    num_heads : int
        Number of query heads H; the head dimension is ``embed_dim // num_heads``.
    num_kv_heads : int, optional
        Number of KV heads, which must divide ``num_heads`` (grouped-query attention). Default: ``num_heads``.
    bias : bool
        Whether both projections have a bias.
    causal : bool
        Whether a query sees only the keys up to its own position.
    window_size : (int, int)
        Number of visible keys to the left and right of a query; -1 is unbounded.
    dropout_p : float
        Probability of dropping an attention weight in training mode, in [0, 1).
    device : torch.device or str, optional
        Device of the parameters.
    dtype : torch.dtype, optional
        Dtype of the parameters.

    Raises
    ------
    ValueError
        If ``num_heads`` does not divide ``embed_dim``, or ``num_kv_heads`` does not divide ``num_heads``.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        bias: bool = True,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        dropout_p: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"flashbwd: num_heads is {num_heads}, expected a divisor of embed_dim, {embed_dim}")
        if kv_heads < 1 or num_heads % kv_heads:
            raise ValueError(f"flashbwd: num_kv_heads is {kv_heads}, expected a divisor of num_heads, {num_heads}")
        if not 0.0 <= _arguments.number("dropout_p", dropout_p) < 1.0:
            raise ValueError(f"flashbwd: dropout_p is {dropout_p}, expected a number in [0, 1)")
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, kv_heads
        self.head_dim = embed_dim // num_heads
        self.causal, self.window_size, self.dropout_p = causal, window_size, dropout_p
        width = (num_heads + 2 * kv_heads) * self.head_dim
        self.qkv = nn.Linear(embed_dim, width, bias=bias, device=device, dtype=dtype)
        self.proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor, *, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
        """Attend within each sequence.

        Parameters
        ----------
        x : Tensor, (B, S, embed_dim), or packed (total, embed_dim)
        cu_seqlens : Tensor, (B + 1,), int32, optional
            Cumulative lengths of the packed sequences, starting with 0. Required for a packed x.
        max_seqlen : int, optional
            Upper bound of these lengths. Required with ``cu_seqlens``.

        Returns
        -------
        Tensor
            x's shape.

        Raises
        ------
        ValueError
            If x does not have the shape or the dtype of this layer.
        """
        self._check_input(x, packed=cu_seqlens is not None)
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=-2)
        out = attention(
            q,
            k,
            v,
            causal=self.causal,
            window_size=self.window_size,
            dropout_p=self.dropout_p if self.training else 0.0,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=max_seqlen,
            max_seqlen_k=max_seqlen,
        )
        return self.proj(out.flatten(-2))

    def _check_input(self, x: Tensor, packed: bool) -> None:
        shape = _arguments.tensor("x", x).shape
        if len(shape) != (2 if packed else 3) or shape[-1] != self.embed_dim:
            layout = "(total, {}) with cu_seqlens" if packed else "(batch, seqlen, {}), or cu_seqlens for a packed x"
            raise ValueError(f"flashbwd: x has shape {tuple(shape)}, expected {layout.format(self.embed_dim)}")
        # A subclass or a replacement of nn.Linear, for example by FSDP or a quantizer, may convert x itself.
        if type(self.qkv) is not nn.Linear or x.dtype == self.qkv.weight.dtype:
            return
        if x.device.type == "meta" or not torch.is_autocast_enabled(x.device.type):
            came, expected = (str(dtype).removeprefix("torch.") for dtype in (x.dtype, self.qkv.weight.dtype))
            raise ValueError(f"flashbwd: x is {came}, expected the parameters' {expected}")

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, "
            f"causal={self.causal}, window_size={self.window_size}, dropout_p={self.dropout_p}"
        )

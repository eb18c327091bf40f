"""Integration with Hugging Face Transformers: attention implementations, and norms with this library's gradients.

Importing this module does not import transformers; :func:`register` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flashbwd.attention import attention
from flashbwd.integrations import transformers_flex
from flashbwd.integrations.transformers_shared import FLEX_NAME, NAME, OncePerTensor
from flashbwd.layer_norm import LayerNorm, RMSNorm, rms_norm

__all__ = ["FLEX_NAME", "NAME", "attention_forward", "register", "swap_norms"]


def register() -> None:
    """Register both attention implementations with Transformers; a second call has no effect.

    With ``attn_implementation="flashbwd"``, models create padding masks as for FlashAttention: no mask if nothing is
    padded, else (batch, keys) booleans. With ``"flex_attention_bwd"``, they create a BlockMask.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, modeling_utils
    from transformers.masking_utils import flash_attention_mask

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, flash_attention_mask)
    AttentionInterface.register(FLEX_NAME, transformers_flex.attention_forward)
    AttentionMaskInterface.register(FLEX_NAME, transformers_flex.block_mask)
    # Transformers 5 treats every name that contains "flash" as a kernel that it has to download.
    lookup = getattr(modeling_utils, "lazy_import_flash_attention", None)
    if lookup is not None and not isinstance(lookup, _LookupOfOthers):
        modeling_utils.lazy_import_flash_attention = _LookupOfOthers(lookup)


class _LookupOfOthers:
    """Replaces Transformers' search for a FlashAttention package, and finds none for this implementation."""

    def __init__(self, lookup: Callable[..., Any]) -> None:
        self._lookup = lookup

    def __call__(self, implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        return None if implementation == NAME else self._lookup(implementation, *args, **kwargs)


class _Packing(NamedTuple):
    """The positions of packed sequences in the rows of a flattened batch."""

    rows: Tensor | None  # indices of the rows without padding; None means all rows
    cu_seqlens: Tensor
    max_seqlen: int


def _packing(starts: Tensor, rows: Tensor | None) -> _Packing:
    """Build a ``_Packing`` from ``starts``: the first row of each sequence, then the total number of rows."""
    cu_seqlens = starts.to(torch.int32)
    return _Packing(rows, cu_seqlens, int(cu_seqlens.diff().max()))


@OncePerTensor
def _unpadded(mask: Tensor, length: int) -> _Packing:
    """Return the packing of the rows without padding, from the last ``length`` columns of a (batch, keys) mask."""
    kept = mask[:, -length:]
    return _packing(nn.functional.pad(kept.sum(1).cumsum(0), (1, 0)), kept.flatten().nonzero().squeeze(1))


@OncePerTensor
def _packed(position_ids: Tensor, batch: int) -> _Packing | None:
    """Return the packing of the sequences in (batch, queries) positions; None if every row is one sequence."""
    positions = position_ids.expand(batch, -1)
    follows = positions[:, 1:] - positions[:, :-1] == 1
    if bool(follows.all()):
        return None
    starts = nn.functional.pad(~follows, (1, 0), value=True).flatten().nonzero().squeeze(1)
    return _packing(nn.functional.pad(starts, (0, 1), value=positions.numel()), None)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Call :func:`flashbwd.attention` with the arguments that Transformers passes to attention implementations.

    Parameters
    ----------
    module : nn.Module
        The attention layer; ``module.is_causal`` is used if ``is_causal`` is not given.
    query, key, value : Tensor, (B, H, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, Dv)
        The last query is aligned with the last key; earlier keys may come from a cache.
    attention_mask : Tensor, optional
        (B, Sk): false or 0 for padding, on either side. (B or 1, H or 1, Sq, Sk): booleans or a bias, which replaces
        the causal mask and the window.
    dropout, scaling, sliding_window, softcap
        The values that models pass. The size of a window includes the query's own key.
    s_aux : Tensor, (H,), optional
        Attention sinks.
    position_ids : Tensor, (B or 1, Sq), optional
        A new sequence begins wherever the positions do not increase by one.
    cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k
        Packed sequences in a batch of one; ``position_ids`` is then ignored.

    Returns
    -------
    (Tensor, None)
        The output, (B, Sq, H, Dv), which is 0 in padded rows. Attention weights are not returned.
    """
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    batch, seqlen_q = query.shape[0], query.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    options: dict[str, Any] = {
        "softmax_scale": scaling,
        "causal": causal,
        "softcap": softcap or 0.0,
        "sink": s_aux,
        "dropout_p": dropout,
    }
    if sliding_window is not None:
        options["window_size"] = (sliding_window - 1, sliding_window - 1)
    if attention_mask is not None and attention_mask.dim() == 4:
        options |= {"causal": False, "window_size": (-1, -1), "attn_bias": _as_bias(attention_mask, q, k.shape[1])}
        return _out(attention(q, k, v, **options)), None

    if attention_mask is not None:
        k, v = k[:, : attention_mask.shape[1]], v[:, : attention_mask.shape[1]]  # a static cache is longer
        of_q = _unpadded(attention_mask, seqlen_q)
        of_k = of_q if k.shape[1] == seqlen_q else _unpadded(attention_mask, k.shape[1])
    elif cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        of_q = _given(cu_seq_lens_q, max_length_q)
        of_k = _given(cu_seq_lens_k, max_length_k)
    elif position_ids is not None and 1 < seqlen_q == k.shape[1] == position_ids.shape[-1] and position_ids.dim() == 2:
        of_q = of_k = _packed(position_ids, batch)
    else:
        of_q = of_k = None
    if of_q is None or of_k is None:
        return _out(attention(q, k, v, **options)), None

    result = attention(
        _flat(q, of_q),
        _flat(k, of_k),
        _flat(v, of_k),
        cu_seqlens_q=of_q.cu_seqlens,
        cu_seqlens_k=of_k.cu_seqlens,
        max_seqlen_q=of_q.max_seqlen,
        max_seqlen_k=of_k.max_seqlen,
        **options,
    )
    out = _out(result)
    if of_q.rows is not None:
        out = out.new_zeros(batch * seqlen_q, *out.shape[1:]).index_copy(0, of_q.rows, out)
    return out.view(batch, seqlen_q, *out.shape[1:]), None


def _out(result: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


def _given(cu_seqlens: Tensor, max_seqlen: int | None) -> _Packing:
    return _packing(cu_seqlens, None) if max_seqlen is None else _Packing(None, cu_seqlens.int(), int(max_seqlen))


def _flat(x: Tensor, packing: _Packing) -> Tensor:
    """Return the rows of (B, S, H, D) without padding, one sequence after another."""
    x = x.flatten(0, 1)
    return x if packing.rows is None else x.index_select(0, packing.rows)


def _as_bias(mask: Tensor, q: Tensor, seqlen_k: int) -> Tensor:
    mask = mask[..., :seqlen_k]
    if mask.dtype == torch.bool:
        return torch.zeros((), dtype=q.dtype, device=q.device).where(mask, -torch.inf)
    return mask.to(q.dtype)


# ---- norms ----


def swap_norms(model: nn.Module) -> int:
    """Make a model's LayerNorm and RMSNorm modules use the gradients of this library, in place.

    Swaps ``nn.LayerNorm``, ``nn.RMSNorm``, and modules of Transformers whose class is called ``...RMSNorm``. The latter
    are swapped only if :func:`flashbwd.rms_norm` gives the same result on random rows, with ``weight`` or
    ``1 + weight``. Swapped modules stay instances of their classes and keep their parameters and hooks. All other
    modules stay unchanged.

    Returns
    -------
    int
        Number of swapped modules.
    """
    swapped = 0
    for module in model.modules():
        replacement = _replacement(module)
        if replacement is not None:
            module.__class__ = replacement
            swapped += 1
    return swapped


def _replacement(module: nn.Module) -> type[nn.Module] | None:
    kind = type(module)
    if kind is nn.LayerNorm:
        return LayerNorm
    if kind is nn.RMSNorm:
        return RMSNorm
    if not kind.__name__.endswith("RMSNorm") or isinstance(module, nn.RMSNorm) or issubclass(kind, _LikeRMSNorm):
        return None
    for zero_centered_gamma in (False, True):
        candidate = _like_rms_norm(kind, zero_centered_gamma)
        if _agree(module, candidate):
            return candidate
    return None


class _LikeRMSNorm(nn.Module):
    """Base class that precedes a model's own RMSNorm class in the method resolution order."""

    zero_centered_gamma: bool
    weight: Tensor

    def forward(self, x: Tensor) -> Tensor:
        eps = getattr(self, "variance_epsilon", None) or getattr(self, "eps", None)
        weight = self.weight.to(x.dtype) if x.dtype == torch.float64 else self.weight
        return rms_norm(x, weight, eps=eps, zero_centered_gamma=self.zero_centered_gamma)


_like: dict[tuple[Any, bool], type[nn.Module]] = {}


def _like_rms_norm(kind: type[nn.Module], zero_centered_gamma: bool) -> type[nn.Module]:
    """Return the subclass of ``kind`` that computes with the operators of this library; created once per class."""
    key = (kind, zero_centered_gamma)
    if key not in _like:
        _like[key] = type(kind.__name__, (_LikeRMSNorm, kind), {"zero_centered_gamma": zero_centered_gamma})
    return _like[key]


@torch.no_grad()
def _agree(module: nn.Module, candidate: type[nn.Module]) -> bool:
    """Return whether ``candidate`` computes the same as the module up to rounding, with the module's parameters."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or weight.is_meta:
        return False
    generator = torch.Generator().manual_seed(0)
    x = 1e-2 * torch.randn(4, weight.numel(), generator=generator)  # small enough that another eps changes the result
    x = x.to(weight.device, weight.dtype)
    own_class = type(module)
    try:
        expected = own_class.forward(module, x)
        actual = candidate.forward(_with_class(module, candidate), x)
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return False
    finally:
        module.__class__ = own_class
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return False
    rounding = 4 * torch.finfo(x.dtype).eps
    return torch.allclose(
        actual.double(), expected.double(), rtol=rounding, atol=rounding * float(expected.abs().max())
    )


def _with_class(module: nn.Module, kind: type[nn.Module]) -> nn.Module:
    module.__class__ = kind
    return module

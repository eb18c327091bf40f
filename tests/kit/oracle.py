"""Reference values: float64 autograd of the naive formulas. Shares no code with the library.

Attention is computed one sequence at a time with the whole score matrix in memory, in any dtype. float64 gives the
reference values. The dtype of the inputs gives the error of a plain PyTorch computation (tolerance.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Causal = bool | str


def product(a: Tensor, b: Tensor) -> Tensor:
    """The product of matrices in their dtype: 16-bit products are summed in fp32, and the sum is rounded once.

    PyTorch does the same on the CPU, but multiplies float16 matrices element by element.
    """
    wide = torch.promote_types(a.dtype, torch.float32)
    return (a.to(wide) @ b.to(wide)).to(a.dtype)


@dataclass(frozen=True)
class AttentionResult:
    """Forward values and gradients, in the shapes of the inputs.

    ``out`` is (B, Sq, H, Dv) or (total_q, H, Dv). ``lse`` is (B, H, Sq) or (H, total_q), and -inf in rows that see no
    key if there is no sink. ``empty`` is true in rows that see no key and in rows outside the logical lengths.
    Gradients of rows outside the logical lengths are zero. ``dbias`` and ``dsink`` are None without a bias or sink.
    """

    out: Tensor
    lse: Tensor
    empty: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None
    dsink: Tensor | None


@dataclass(frozen=True)
class _Sequence:
    """The row ranges of the logical part of one sequence in the queries and in the keys."""

    index: int
    q: slice
    k: slice


def _sequences(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
) -> Iterator[_Sequence]:
    batch = len(cu_seqlens_q) - 1 if cu_seqlens_q is not None else q.shape[0]

    def rows(x: Tensor, cu_seqlens: Tensor | None, seqused: Tensor | None, b: int) -> slice:
        start, end = (int(cu_seqlens[b]), int(cu_seqlens[b + 1])) if cu_seqlens is not None else (0, x.shape[1])
        return slice(start, end if seqused is None else start + int(seqused[b]))

    for b in range(batch):
        yield _Sequence(b, rows(q, cu_seqlens_q, seqused_q, b), rows(k, cu_seqlens_k, seqused_k, b))


def _shown(key_mask: Tensor | None, b: int, seqlen_k: int, device: torch.device) -> Tensor:
    """The keys of sequence b that the mask shows. The formulas are computed as if there were no other keys."""
    keys = torch.arange(seqlen_k, device=device)
    return keys if key_mask is None else keys[key_mask[b, :seqlen_k]]


def visible_pairs(
    seqlen_q: int, seqlen_k: int, causal: Causal, window_size: tuple[int, int], device: torch.device | str = "cpu"
) -> Tensor:
    """(seqlen_q, seqlen_k) bool: i + off - left <= j <= i + off + right."""
    left, right = window_size
    if causal:
        right = 0
    offset = 0 if causal == "top_left" else seqlen_k - seqlen_q
    i = torch.arange(seqlen_q, device=device)[:, None] + offset
    j = torch.arange(seqlen_k, device=device)[None, :]
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if left >= 0:
        seen &= j >= i - left
    if right >= 0:
        seen &= j <= i + right
    return seen


def alibi_bias(slopes: Tensor, seqlen_q: int, seqlen_k: int, causal: Causal) -> Tensor:
    """(H, seqlen_q, seqlen_k): -slope * |i + off - j|."""
    offset = 0 if causal == "top_left" else seqlen_k - seqlen_q
    i = torch.arange(seqlen_q, device=slopes.device)[:, None] + offset
    j = torch.arange(seqlen_k, device=slopes.device)[None, :]
    return -slopes[:, None, None] * (i - j).abs()


def _bias_of(attn_bias: Tensor, b: int, seqlen_q: int, seqlen_k: int, heads: int) -> Tensor:
    """The part of a bias that belongs to sequence b, expanded to (H, seqlen_q, seqlen_k)."""
    part = attn_bias[b if attn_bias.shape[0] > 1 else 0]
    part = part[:, : min(part.shape[1], seqlen_q) if part.shape[1] > 1 else 1]
    part = part[:, :, : min(part.shape[2], seqlen_k) if part.shape[2] > 1 else 1]
    return part.expand(heads, seqlen_q, seqlen_k)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: Causal = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    attn_bias: Tensor | None = None,
    key_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    dlse: Tensor | None = None,
    keep: Sequence[Tensor] | None = None,
    keep_scale: float = 1.0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> AttentionResult:
    """Forward and autograd gradients of the naive formula, all arithmetic in ``dtype``.

    ``keep`` holds one (H, seqlen_q, seqlen_k) bool tensor per sequence (logical lengths), e.g. from dropout.keep_masks.
    Kept weights are multiplied by ``keep_scale``. ``dlse`` has the shape of AttentionResult.lse. All values outside the
    logical lengths, and those of keys that ``key_mask`` (B, Sk) hides, may be NaN.
    """
    varlen = cu_seqlens_q is not None
    heads, heads_kv = q.shape[-2], k.shape[-2]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale

    def leaf(x: Tensor) -> Tensor:
        return x.detach().to(dtype).clone().requires_grad_()

    ql, kl, vl = leaf(q), leaf(k), leaf(v)
    bias_leaves: list[tuple[int, Tensor]] = []  # one per sequence, so that their gradients are summed at least in fp32
    logit = None if sink is None else leaf(sink)
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=dtype, device=q.device)
    rows = (q.shape[-2], q.shape[0]) if varlen else (q.shape[0], q.shape[2], q.shape[1])
    lse = torch.full(rows, -torch.inf, dtype=dtype, device=q.device)
    empty = torch.ones(rows, dtype=torch.bool, device=q.device)
    outputs: list[Tensor] = []
    grad_outputs: list[Tensor] = []

    for sequence in _sequences(q, k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k):
        b = sequence.index
        seqlen_q, seqlen_k = sequence.q.stop - sequence.q.start, sequence.k.stop - sequence.k.start
        at_q = (sequence.q,) if varlen else (b, sequence.q)
        cols = _shown(key_mask, b, seqlen_k, q.device)
        at_k = (sequence.k,) if varlen else (b, sequence.k) if key_mask is None else (b, cols)
        at_rows = (slice(None), sequence.q) if varlen else (b, slice(None), sequence.q)
        if logit is not None:
            lse[at_rows] = logit.detach()[:, None]
        if seqlen_q == 0 or len(cols) == 0:
            if logit is not None and dlse is not None:
                outputs.append(logit[:, None].expand(heads, seqlen_q))
                grad_outputs.append(dlse[at_rows].to(dtype).masked_fill((logit.detach() == -torch.inf)[:, None], 0.0))
            continue
        qs = ql[at_q].transpose(0, 1)  # (H, seqlen_q, D)
        ks = kl[at_k].transpose(0, 1).repeat_interleave(heads // heads_kv, dim=0)  # (H, seqlen_k, D)
        vs = vl[at_k].transpose(0, 1).repeat_interleave(heads // heads_kv, dim=0)  # (H, seqlen_k, Dv)
        s = scale * product(qs, ks.transpose(1, 2))
        if softcap > 0:
            s = softcap * torch.tanh(s / softcap)
        seen = visible_pairs(seqlen_q, seqlen_k, causal, window_size, q.device)[:, cols].expand(heads, -1, -1)
        if attn_bias is not None:
            at = b if attn_bias.shape[0] > 1 else 0
            bias_leaves.append((at, leaf(attn_bias[at : at + 1])))
            mine = _bias_of(bias_leaves[-1][1], 0, seqlen_q, seqlen_k, heads)[..., cols]
            s = s + mine
            seen = seen & (mine.detach() != -torch.inf)
        if alibi_slopes is not None:
            slopes = alibi_slopes if alibi_slopes.dim() == 1 else alibi_slopes[b]
            s = s + alibi_bias(slopes.to(dtype), seqlen_q, seqlen_k, causal)[..., cols]
        blind = ~seen.any(dim=-1)  # (H, seqlen_q): rows that see no key
        if not bool(seen.all()):
            s = s.masked_fill(~seen, -torch.inf)
        dead = blind  # rows without a finite score, which must not pass on a gradient
        if logit is not None:
            s = torch.cat([s, logit[:, None, None].expand(heads, seqlen_q, 1)], dim=-1)
            dead = blind & (logit.detach() == -torch.inf)[:, None]
        if bool(dead.any()):
            s = s.masked_fill(dead[..., None], 0.0)
        p = torch.softmax(s, dim=-1)[..., : len(cols)]
        if bool(blind.any()):
            p = p.masked_fill(blind[..., None], 0.0)
        if keep is not None:
            p = p * (keep[b].to(q.device)[..., cols].to(dtype) * keep_scale)
        o = product(p, vs).transpose(0, 1)  # (seqlen_q, H, Dv)
        row_lse = torch.logsumexp(s, dim=-1)  # (H, seqlen_q)
        outputs.append(o)
        grad_outputs.append(dout[at_q].to(dtype))
        if dlse is not None:
            outputs.append(row_lse)
            grad_outputs.append(dlse[at_rows].to(dtype).masked_fill(dead, 0.0))
        out[at_q] = o.detach()
        lse[at_rows] = torch.where(blind, lse[at_rows], row_lse.detach())
        empty[at_rows] = blind

    wanted = [x for x in (ql, kl, vl, logit) if x is not None] + [x for _, x in bias_leaves]
    grads = torch.autograd.grad(outputs, wanted, grad_outputs, allow_unused=True) if outputs else [None] * len(wanted)
    found = [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads, strict=True)]
    dq, dk, dv, *rest = found
    dsink = None if logit is None else rest.pop(0)
    dbias = None if attn_bias is None else torch.zeros(attn_bias.shape, dtype=_wide(dtype), device=q.device)
    if dbias is not None:
        for (at, _), grad in zip(bias_leaves, rest, strict=True):
            dbias[at] += grad[0]
        dbias = dbias.to(dtype)
    return AttentionResult(out, lse, empty, dq, dk, dv, dbias, dsink)


def attention_from_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: Causal = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    attn_bias: Tensor | None = None,
    key_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    dlse: Tensor | None = None,
    keep: Sequence[Tensor] | None = None,
    keep_scale: float = 1.0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    operands: torch.dtype | None = None,
) -> AttentionResult:
    """The gradients from written-out formulas and a given ``out`` and ``lse`` (rounded, or of more keys than k has).

    Shapes as in attention(). The sink is used only for dsink, because ``lse`` already includes it. P and dS are rounded
    to ``operands`` before the products that give dq, dk and dv, as kernels do.
    """
    varlen = cu_seqlens_q is not None
    heads, heads_kv = q.shape[-2], k.shape[-2]
    group = heads // heads_kv
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=q.device) for x in (q, k, v))
    dbias = None if attn_bias is None else torch.zeros(attn_bias.shape, dtype=_wide(dtype), device=q.device)
    dsink = None if sink is None else torch.zeros(heads, dtype=dtype, device=q.device)
    empty = torch.ones(lse.shape, dtype=torch.bool, device=q.device)

    for sequence in _sequences(q, k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k):
        b = sequence.index
        seqlen_q, seqlen_k = sequence.q.stop - sequence.q.start, sequence.k.stop - sequence.k.start
        at_q = (sequence.q,) if varlen else (b, sequence.q)
        cols = _shown(key_mask, b, seqlen_k, q.device)
        at_k = (sequence.k,) if varlen else (b, sequence.k) if key_mask is None else (b, cols)
        at_rows = (slice(None), sequence.q) if varlen else (b, slice(None), sequence.q)
        if seqlen_q == 0 or len(cols) == 0:
            if dsink is not None and sink is not None and dlse is not None:
                dsink += dlse[at_rows].to(dtype).sum(dim=-1).masked_fill(sink == -torch.inf, 0.0)
            continue
        qs, dos, os_ = (x[at_q].transpose(0, 1).to(dtype) for x in (q, dout, out))  # (H, seqlen_q, .)
        ks, vs = (x[at_k].transpose(0, 1).repeat_interleave(group, dim=0).to(dtype) for x in (k, v))
        s = scale * product(qs, ks.transpose(1, 2))
        t = torch.tanh(s / softcap) if softcap > 0 else None
        if t is not None:
            s = softcap * t
        seen = visible_pairs(seqlen_q, seqlen_k, causal, window_size, q.device)[:, cols].expand(heads, -1, -1)
        if attn_bias is not None:
            mine = _bias_of(attn_bias.detach().to(dtype), b, seqlen_q, seqlen_k, heads)[..., cols]
            s = s + mine
            seen = seen & (mine != -torch.inf)
        if alibi_slopes is not None:
            slopes = alibi_slopes if alibi_slopes.dim() == 1 else alibi_slopes[b]
            s = s + alibi_bias(slopes.to(dtype), seqlen_q, seqlen_k, causal)[..., cols]
        blind = ~seen.any(dim=-1)
        stat = lse[at_rows].masked_fill(blind, 0.0)  # (H, seqlen_q), in its own dtype
        p = torch.exp(s - stat[..., None].to(torch.promote_types(dtype, stat.dtype))).to(dtype).masked_fill(~seen, 0.0)
        z = None if keep is None else keep[b].to(q.device)[..., cols].to(dtype) * keep_scale
        delta = (dos * os_).sum(dim=-1)
        if dlse is not None:
            delta = delta - dlse[at_rows].to(dtype)
        delta = delta.masked_fill(blind, 0.0)
        dp = product(dos, vs.transpose(1, 2))
        ds = p * ((dp if z is None else dp * z) - delta[..., None])
        if dbias is not None:
            ds_of_all = torch.zeros(heads, seqlen_q, seqlen_k, dtype=ds.dtype, device=ds.device)
            ds_of_all[..., cols] = ds
            _add_reduced(dbias[b if dbias.shape[0] > 1 else 0], ds_of_all)
        if dsink is not None and sink is not None:
            share = torch.exp(sink[:, None].to(dtype) - stat.to(dtype)).masked_fill(blind, 0.0)
            dsink -= (share * delta).sum(dim=-1)
            if dlse is not None:  # the LSE of a row without keys is the sink
                keyless = dlse[at_rows].to(dtype).masked_fill(~blind, 0.0).sum(dim=-1)
                dsink += keyless.masked_fill(sink == -torch.inf, 0.0)
        ds, pz = ds if t is None else ds * (1 - t * t), p if z is None else p * z
        if operands is not None:
            ds, pz = ds.to(operands).to(dtype), pz.to(operands).to(dtype)
        dvs = product(pz.transpose(1, 2), dos)  # (H, seqlen_k, Dv)
        dq[at_q] = product(scale * ds, ks).transpose(0, 1)
        dks = product(scale * ds.transpose(1, 2), qs)
        dk[at_k] = dks.reshape(heads_kv, group, len(cols), -1).sum(dim=1).transpose(0, 1)
        dv[at_k] = dvs.reshape(heads_kv, group, len(cols), -1).sum(dim=1).transpose(0, 1)
        empty[at_rows] = blind
    return AttentionResult(out, lse, empty, dq, dk, dv, None if dbias is None else dbias.to(dtype), dsink)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _add_reduced(into: Tensor, ds: Tensor) -> None:
    """Add ds (H, seqlen_q, seqlen_k) to the leading part of ``into``, summed where ``into`` has size 1."""
    for dim in range(3):
        if into.shape[dim] == 1:
            ds = ds.sum(dim=dim, keepdim=True)
    into[: ds.shape[0], : ds.shape[1], : ds.shape[2]] += ds


@dataclass(frozen=True)
class NormResult:
    """``z``, ``dx`` (..., N); ``mu``, ``rs`` (rows,), mu None for RMSNorm; ``dgamma``, ``dbeta`` (N,) or None."""

    z: Tensor
    mu: Tensor | None
    rs: Tensor
    dx: Tensor
    dgamma: Tensor | None
    dbeta: Tensor | None


def layer_norm(
    x: Tensor,
    dz: Tensor,
    gamma: Tensor | None = None,
    *,
    eps: float = 1e-5,
    rms: bool = False,
    dresidual: Tensor | None = None,
    zero_centered_gamma: bool = False,
    dtype: torch.dtype = torch.float64,
) -> NormResult:
    """LayerNorm (or RMSNorm) forward and autograd gradients, all arithmetic in ``dtype``.

    dbeta is the gradient of a bias of zeros; it is None for RMSNorm.
    """
    columns = x.shape[-1]
    xl = x.detach().to(dtype).clone().requires_grad_()
    gl = None if gamma is None else gamma.detach().to(dtype).clone().requires_grad_()
    bl = torch.zeros(columns, dtype=dtype, device=x.device, requires_grad=True)
    mu = torch.zeros_like(xl[..., :1]) if rms else xl.mean(dim=-1, keepdim=True)
    rs = ((xl - mu).square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    xhat = (xl - mu) * rs
    weight = 1.0 if gl is None else (1 + gl if zero_centered_gamma else gl)
    z = xhat * weight + bl
    wanted = [xl, bl] + ([] if gl is None else [gl])
    dx, dbeta, *rest = torch.autograd.grad(z, wanted, dz.to(dtype))
    if dresidual is not None:
        dx = dx + dresidual.to(dtype)
    return NormResult(
        z=z.detach(),
        mu=None if rms else mu.detach().reshape(-1),
        rs=rs.detach().reshape(-1),
        dx=dx,
        dgamma=rest[0] if rest else None,
        dbeta=None if rms else dbeta,
    )


def rms_norm(
    x: Tensor,
    dz: Tensor,
    gamma: Tensor | None = None,
    *,
    eps: float = 1e-5,
    dresidual: Tensor | None = None,
    zero_centered_gamma: bool = False,
    dtype: torch.dtype = torch.float64,
) -> NormResult:
    """RMSNorm: layer_norm() without the mean and without a bias."""
    return layer_norm(
        x,
        dz,
        gamma,
        eps=eps,
        rms=True,
        dresidual=dresidual,
        zero_centered_gamma=zero_centered_gamma,
        dtype=dtype,
    )

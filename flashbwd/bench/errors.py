"""Compares a peer's gradients with float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashbwd.bench import attention_inputs, block_peers, decoding_peers, norm_peers, oracle
from flashbwd.bench.cases import AttentionCase, DecodingCase, NormCase
from flashbwd.bench.peers import Prepared

NORM_ROWS_CHECKED = 256


def _attention_slices(case: AttentionCase) -> list[tuple[int, int]]:
    """Return the (sequence, KV head) pairs whose gradients are compared, with all their rows.

    For dense inputs these are the first, the middle and the last sequence. For packed inputs they are the longest, the
    shortest and the last sequence. If sequences share the gradient of a bias, all sequences are compared.
    """
    first, middle, last = 0, case.heads_kv // 2, case.heads_kv - 1
    if case.lengths:
        longest = max(range(case.batch), key=lambda b: case.lengths[b])  # type: ignore[index]
        shortest = min(range(case.batch), key=lambda b: case.lengths[b])  # type: ignore[index]
        pairs = [(longest, last), (shortest, first), (case.batch - 1, middle)]
    elif case.bias_batch and case.bias_batch < case.batch:  # the bias gradient sums over all sequences
        pairs = [(b, kv) for kv in (first, last) for b in range(case.batch)]
    else:
        pairs = [(0, first), (case.batch // 2, middle), (case.batch - 1, last)]
    return list(dict.fromkeys(pairs))


def _slice_of(case: AttentionCase, b: int) -> Any:
    """Return the index that selects the rows of sequence ``b``."""
    if not case.lengths:
        return b
    start = sum(case.lengths[:b])
    return slice(start, start + case.lengths[b])


@dataclass(frozen=True)
class AttentionReference:
    """Float64 gradients of an attention case. They depend on a peer only if the case has dropout.

    ``slices`` has (sequence, KV head, dq, dk, dv) of each checked slice. ``bias_sums`` is dbias by the batch index of
    the bias and the KV head.
    """

    slices: list[tuple[int, int, Tensor, Tensor, Tensor]]
    bias_sums: dict[tuple[int, int], Tensor]


def attention_reference(
    case: AttentionCase,
    x: attention_inputs.AttentionInputs,
    prepared: Prepared,
    visible: Tensor | None = None,
    relative: Tensor | None = None,
) -> AttentionReference:
    """Return the float64 gradients of the checked slices. ``prepared`` is used only for its dropout mask.

    ``visible`` (S, S) replaces the mask of the case. ``relative`` (H, 2 S - 1) is added by distance.
    """
    found = AttentionReference([], {})
    group = case.heads // case.heads_kv
    masks: dict[int, Tensor] = {}
    for b, kv in _attention_slices(case):
        where = _slice_of(case, b)
        heads = slice(kv * group, (kv + 1) * group)
        bias_b = 0 if x.bias is None else min(b, x.bias.shape[0] - 1)
        if case.dropout_p > 0 and prepared.forward is not None and b not in masks:
            with prepared.scope():
                masks = {b: attention_inputs.dropout_mask(case, x, prepared.forward, b)}
        dq, dk, dv, dbias = oracle.attention_slice(
            x.q[where][:, heads],
            x.k[where][:, kv],
            x.v[where][:, kv],
            x.dout[where][:, heads],
            causal=case.causal,
            window=case.window,
            visible=visible,
            softcap=case.softcap,
            slopes=None if x.alibi_slopes is None else x.alibi_slopes[heads],
            relative=None if relative is None else relative[heads],
            bias=None if x.bias is None else x.bias[bias_b, heads],
            keep=masks[b][:, heads].transpose(0, 1) if b in masks else None,
            dropout_p=case.dropout_p,
        )
        found.slices.append((b, kv, dq, dk, dv))
        if dbias is not None:
            earlier = found.bias_sums.get((bias_b, kv))
            found.bias_sums[bias_b, kv] = dbias if earlier is None else earlier + dbias
    return found


def attention_errors(
    case: AttentionCase,
    x: attention_inputs.AttentionInputs,
    prepared: Prepared,
    grads: Sequence[Tensor | None],
    reference: AttentionReference | None = None,
) -> dict[str, float]:
    """Return the relative errors of dq, dk, dv (and dbias) against float64 on slices: the largest over row blocks.

    The error is NaN if any element of a gradient is not finite, also outside of the slices. By default, the reference
    is computed.
    """
    reference = reference or attention_reference(case, x, prepared)
    names = ["dq", "dk", "dv", "dbias"][: len(grads)]
    expected: dict[str, list[Tensor]] = {name: [] for name in names}
    actual: dict[str, list[Tensor]] = {name: [] for name in names}
    group = case.heads // case.heads_kv
    for b, kv, dq, dk, dv in reference.slices:
        where = _slice_of(case, b)
        for name, gradient in (("dq", dq), ("dk", dk), ("dv", dv)):
            grad = grads[names.index(name)]
            assert grad is not None
            expected[name].append(gradient)
            actual[name].append(grad[where][:, slice(kv * group, (kv + 1) * group) if name == "dq" else kv])
    for (bias_b, kv), bias_sum in reference.bias_sums.items():
        dbias = grads[3]
        assert dbias is not None
        expected["dbias"].append(bias_sum.transpose(0, 1))
        actual["dbias"].append(dbias[bias_b, kv * group : (kv + 1) * group].transpose(0, 1))
    return _worst_errors(names, expected, actual, grads, oracle.CHECKED_ROWS)


def norm_errors(case: NormCase, x: norm_peers.NormInputs, grads: Sequence[Tensor | None]) -> dict[str, float]:
    """Return the relative errors of dx (on evenly spaced rows), dgamma and dbeta against float64."""
    rows = torch.linspace(0, case.rows - 1, min(case.rows, NORM_ROWS_CHECKED), device=x.x.device).long()
    references = oracle.norm_gradients(x.dz, x.x, x.gamma, eps=norm_peers.EPS, rms=case.rms, rows=rows)
    names = ["dx", "dgamma"] + ([] if case.rms else ["dbeta"])
    expected = {name: [ref] for name, ref in zip(names, references, strict=False) if ref is not None}
    actual = {name: [g[rows] if name == "dx" else g] for name, g in zip(names, grads, strict=False) if g is not None}
    return _worst_errors(names, expected, actual, grads)


def decoding_errors(
    case: DecodingCase, x: decoding_peers.DecodingInputs, outputs: Sequence[Tensor | None]
) -> dict[str, float]:
    """Return the relative errors of the output of the last batch element, or of its gradients, against float64."""
    names = ["dq", "dk", "dv"] if case.backward else ["out"]
    expected = {name: [tensor] for name, tensor in zip(names, decoding_peers.expected(case, x), strict=True)}
    actual = {name: [tensor[-1]] for name, tensor in zip(names, outputs, strict=True) if tensor is not None}
    return _worst_errors(names, expected, actual, outputs)


def block_errors(x: block_peers.BlockInputs, grads: Sequence[Tensor | None]) -> dict[str, float]:
    """Return the relative errors of dx and of every parameter's gradient against float32."""
    names = ["dx", *(name for name, _ in x.block.named_parameters())]
    return _worst_errors(
        names,
        {name: [expected] for name, expected in zip(names, x.expected, strict=True)},
        {name: [grad] for name, grad in zip(names, grads, strict=True) if grad is not None},
        grads,
    )


def _worst_errors(
    names: Sequence[str],
    expected: dict[str, list[Tensor]],
    actual: dict[str, list[Tensor]],
    grads: Sequence[Tensor | None],
    rows: int | None = None,
) -> dict[str, float]:
    finite = {name: bool(torch.isfinite(g).all()) for name, g in zip(names, grads, strict=False) if g is not None}
    return {
        name: max(oracle.relative_error(a, e, rows) for a, e in zip(actual[name], expected[name], strict=True))
        if finite[name]
        else float("nan")
        for name in names
    }

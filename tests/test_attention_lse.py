"""out, LSE and dlse of other forwards: other shapes, LSEs of more keys, sinks that the forward did not have."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
import torch
from kit import cases, inputs, oracle
from support import TARGETS, Target, run, skip_where_refused, with_nan_outputs

import flashbwd


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("form", cases.LSE_FORMS)
def test_every_form_of_the_lse_gives_the_same_gradients(form: str, target: Target) -> None:
    device, backend, dtype = target
    case = cases.Case("lse", dlse=True, causal=True, seqlen_q=40, deterministic=True)
    plain = inputs.build(case, dtype, device)
    skip_where_refused(plain, backend)
    other = inputs.build(dataclasses.replace(case, lse_form=form), dtype, device)
    for name in ("dq", "dk", "dv"):
        assert torch.equal(getattr(run(plain, backend), name), getattr(run(other, backend), name)), name


@pytest.mark.parametrize("target", TARGETS)
def test_lse_and_dlse_may_have_different_forms(target: Target) -> None:
    device, backend, dtype = target
    x = inputs.build(cases.Case("lse", dlse=True, lse_form="padded"), dtype, device)
    skip_where_refused(x, backend)
    x.check(*run(x, backend, dlse=x.canonical["dlse"].to(device)))


@pytest.mark.parametrize("target", TARGETS)
def test_lse_and_dlse_may_be_strided(target: Target) -> None:
    device, backend, dtype = target
    x = inputs.build(cases.Case("lse", dlse=True), dtype, device)
    skip_where_refused(x, backend)
    lse, dlse = x.arguments["softmax_lse"], x.arguments["dlse"]
    interleaved = torch.stack([lse, dlse], dim=-1)  # (B, H, Sq, 2)
    by_row = dlse.transpose(1, 2).contiguous().transpose(1, 2)  # (B, Sq, H) memory
    x.check(*run(x, backend, softmax_lse=interleaved[..., 0], dlse=by_row))


@pytest.mark.parametrize("target", TARGETS)
def test_the_given_lse_is_used_and_not_recomputed(target: Target) -> None:
    """An LSE that is larger by log 2 halves p, while out stays the same."""
    device, backend, dtype = target
    x = inputs.build(cases.Case("lse", seqlen_q=30, seqlen_k=50), dtype, device)
    skip_where_refused(x, backend)
    lse = x.canonical["lse"] + torch.log(torch.tensor(2.0, dtype=x.canonical["lse"].dtype))
    main = [x.canonical[name] for name in ("q", "k", "v", "dout", "out")]
    expected = oracle.attention_from_lse(*main, lse)
    shifted = dataclasses.replace(x, draw=inputs.Draw(x.canonical | {"lse": lse}, expected))
    shifted.check(*run(x, backend, softmax_lse=lse.to(device)))
    dv = run(x, backend, softmax_lse=lse.to(device)).dv.double().cpu()
    torch.testing.assert_close(dv, x.reference.dv / 2, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("with_sink", [False, True])
def test_gradients_of_key_parts_add_up(with_sink: bool, target: Target) -> None:
    """Ring attention: each call gets a part of the keys, and out, LSE and dlse of all keys; dq is summed in fp32."""
    device, backend, dtype = target
    case = cases.Case("ring", heads=4, heads_kv=2, seqlen_q=37, seqlen_k=96, dlse=True)
    x = inputs.build(dataclasses.replace(case, sink="finite" if with_sink else None), dtype, device)
    skip_where_refused(x, backend)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    dq = torch.zeros(x.arguments["q"].shape, dtype=wide, device=device)
    dks, dvs, dsinks = [], [], []
    for n, (start, end) in enumerate(pairwise([0, 31, 32, 80, 96])):
        part_dq = torch.full_like(dq, torch.nan)
        part = run(
            x,
            backend,
            k=x.arguments["k"][:, start:end],
            v=x.arguments["v"][:, start:end],
            sink=x.arguments["sink"] if n == 2 else None,
            dq=part_dq,
        )
        dq += part_dq
        dks.append(part.dk)
        dvs.append(part.dv)
        dsinks.append(part.dsink)
    assert [dsink is not None for dsink in dsinks] == [False, False, with_sink, False]
    x.check(dq, torch.cat(dks, 1), torch.cat(dvs, 1), None, dsinks[2])


def test_causal_ring_steps_add_up() -> None:
    """The second half of a causal sequence sees its own keys through a causal mask, and all earlier keys."""
    x = inputs.build(cases.Case("ring", seqlen_q=64, seqlen_k=64, causal=True), torch.float64)
    a = x.arguments
    own, earlier = slice(32, 64), slice(0, 32)

    def step(keys: slice, causal: bool) -> flashbwd.AttentionGrads:
        rows = {name: a[name][:, own] for name in ("dout", "q", "out")}
        main = {"k": a["k"][:, keys], "v": a["v"][:, keys], "softmax_lse": a["softmax_lse"][..., own]}
        return flashbwd.attention_backward(**with_nan_outputs(rows | main), causal=causal)

    dq = step(own, True).dq + step(earlier, False).dq
    torch.testing.assert_close(dq, x.reference.dq[:, own], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(step(own, True).dk, x.reference.dk[:, own], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("target", TARGETS)
def test_sinks_can_be_added_to_a_forward_without_them(target: Target) -> None:
    """docs/numerics.md gives the rule: lse' = logaddexp(lse, sink), out' = out * exp(lse - lse')."""
    device, backend, dtype = target
    with_sink = inputs.build(cases.Case("sink", sink="finite", causal=True), dtype, device)
    skip_where_refused(with_sink, backend)
    main = [with_sink.canonical[name] for name in ("q", "k", "v", "dout")]
    plain = oracle.attention(*main, causal=True)
    lse = torch.logaddexp(plain.lse, with_sink.canonical["sink"].double()[:, None])
    out = plain.out * torch.exp(plain.lse - lse).transpose(1, 2)[..., None]
    adapted = {"out": out.to(dtype).to(device), "softmax_lse": lse.to(inputs.lse_dtype(dtype)).to(device)}
    with_sink.check(*run(with_sink, backend, **adapted))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype_of_sink", [torch.float32, torch.bfloat16, torch.float64])
def test_dsink_has_the_dtype_of_sink(dtype_of_sink: torch.dtype, target: Target) -> None:
    device, backend, dtype = target
    x = inputs.build(cases.Case("sink", sink="finite"), dtype, device)
    skip_where_refused(x, backend)
    sink = torch.tensor([0.5, -1.25], dtype=dtype_of_sink, device=device)
    dsink = run(x, backend, sink=sink).dsink
    assert dsink is not None
    assert dsink.dtype == dtype_of_sink
    main = [x.canonical[name] for name in ("q", "k", "v", "dout", "out", "lse")]
    expected = oracle.attention_from_lse(*main, sink=sink.cpu().double()).dsink
    torch.testing.assert_close(dsink.double().cpu(), expected, rtol=2e-2, atol=2e-2)

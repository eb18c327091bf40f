"""Arithmetic of the benchmarks: relative errors, the gradients that they compare, and the bytes of inputs."""

from __future__ import annotations

import contextlib
import itertools
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashbwd.bench import (
    attention_inputs,
    block_peers,
    decoding_peers,
    errors,
    measure,
    norm_peers,
    oracle,
    peers,
    results,
    runner,
)
from flashbwd.bench.cases import AttentionCase, Bar, BlockCase, DecodingCase, NormCase

CPU = torch.device("cpu")
ATTENTION = AttentionCase("t", 2, 24, 4, 2, 16, 8)


# ---- relative errors --------------------------------------------------------------------------------


def test_an_error_is_the_norm_of_the_difference_over_the_norm_of_the_reference() -> None:
    reference = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    off = torch.tensor([[0.0, 0.3], [-0.4, 0.0]])
    assert oracle.relative_error(reference + off, reference) == pytest.approx(0.1, rel=1e-6)


def test_the_error_of_a_tensor_is_the_error_of_its_worst_block_of_rows() -> None:
    reference = torch.ones(6, 1) * torch.tensor([100.0, 100.0, 1.0, 1.0, 10.0, 10.0])[:, None]
    value = reference.clone()
    value[2:4] += 0.5
    value[4:] += 1.0
    assert oracle.relative_error(value, reference, rows=2) == pytest.approx(0.5)
    assert oracle.relative_error(value, reference, rows=4) == pytest.approx(1 / 10)


def test_the_norm_of_a_block_of_zeros_counts_as_a_millionth_of_the_largest() -> None:
    reference = torch.tensor([[2.0], [0.0]])
    assert oracle.relative_error(torch.tensor([[2.0], [1e-6]]), reference, rows=1) == pytest.approx(0.5)


def test_the_error_is_the_norm_itself_if_the_reference_is_zero() -> None:
    assert oracle.relative_error(torch.tensor([[3.0], [4.0]]), torch.zeros(2, 1)) == 5.0


def test_an_error_with_nan_is_nan() -> None:
    assert math.isnan(oracle.relative_error(torch.tensor([[torch.nan]]), torch.ones(1, 1)))


# ---- gradients --------------------------------------------------------------------------------------


def made_worse(tensors: list[Tensor], number: int, by: float) -> list[Tensor]:
    """One of the tensors times 1 + ``by``."""
    return [t * (1 + by) if i == number else t for i, t in enumerate(tensors)]


def norm_gradients(case: NormCase, x: Any) -> list[Tensor]:
    leaves = [t.double().requires_grad_() for t in (x.x, x.gamma, x.beta)]
    centred = leaves[0] if case.rms else leaves[0] - leaves[0].mean(-1, keepdim=True)
    z = centred / (centred.square().mean(-1, keepdim=True) + norm_peers.EPS).sqrt() * leaves[1]
    z = z if case.rms else z + leaves[2]
    return list(torch.autograd.grad(z, leaves[: 2 if case.rms else 3], x.dz.double()))


@pytest.mark.parametrize("wrong", [0, 1, 2])
@pytest.mark.parametrize("rms", [False, True])
def test_the_error_of_a_norm_gradient_is_reported_under_its_name(rms: bool, wrong: int) -> None:
    case = NormCase("t", 20, 300, "fp64", rms=rms)
    x = norm_peers.make_inputs(case, CPU, 0)
    names = ["dx", "dgamma"] if rms else ["dx", "dgamma", "dbeta"]
    found = errors.norm_errors(case, x, made_worse(norm_gradients(case, x), wrong, 0.25))
    assert list(found) == names
    for i, name in enumerate(names):
        assert found[name] == pytest.approx(0.25 if i == wrong else 0.0, abs=1e-9)


def test_the_compared_rows_of_a_norm_include_the_first_and_the_last() -> None:
    case = NormCase("t", 20, 3000, "fp64")
    x = norm_peers.make_inputs(case, CPU, 0)
    for row in (0, -1):
        dx, *rest = norm_gradients(case, x)
        dx[row] += 1
        assert errors.norm_errors(case, x, [dx, *rest])["dx"] > 0.01


@pytest.mark.parametrize(("rows", "compared"), [(3000, 256), (257, 256), (256, 256), (7, 7)])
def test_256_evenly_spaced_rows_of_a_norm_are_compared(
    rows: int, compared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []
    gradients = oracle.norm_gradients

    def noted(*arguments: Any, rows: Tensor, **options: Any) -> Any:
        chosen.extend(rows.tolist())
        return gradients(*arguments, rows=rows, **options)

    monkeypatch.setattr(oracle, "norm_gradients", noted)
    case = NormCase("t", 4, rows, "fp64")
    x = norm_peers.make_inputs(case, CPU, 0)
    assert max(errors.norm_errors(case, x, norm_gradients(case, x)).values()) < 1e-12
    steps = {b - a for a, b in itertools.pairwise(chosen)}
    assert (len(chosen), chosen[0], chosen[-1]) == (compared, 0, rows - 1)
    assert max(steps) - min(steps) <= 1


@pytest.mark.parametrize("row", [0, 127, 128, 255, 256, 299])
def test_the_error_of_attention_is_that_of_the_worst_of_blocks_of_128_rows(row: int) -> None:
    case = replace(ATTENTION, batch=1, seqlen=300, heads=1, heads_kv=1, head_dim_v=16, dtype="fp64")
    x = errors.attention_inputs.make_inputs(case, CPU, 0)
    leaves = [t[0, :, 0].detach().requires_grad_() for t in (x.q, x.k, x.v)]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves)
    grads = [g[None, :, None].clone() for g in torch.autograd.grad(out, leaves, x.dout[0, :, 0])]
    first = row // 128 * 128
    norms = [g[0, first : first + 128].norm().item() for g in grads]
    for grad in grads:
        grad[0, row, 0, 0] += 0.001
    found = errors.attention_errors(case, x, peers.Prepared(lambda: grads), grads)
    assert [found[name] for name in ("dq", "dk", "dv")] == pytest.approx([0.001 / norm for norm in norms], rel=1e-6)


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_the_error_of_a_decoding_gradient_is_reported_under_its_name(wrong: int) -> None:
    case = DecodingCase("t", 3, 4, 2, 3, 40, 16, "fp32", backward=True)
    x = decoding_peers.make_inputs(case, CPU, 0)
    leaves = [t.detach().double().requires_grad_() for t in (x.q, x.k, x.v)]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, enable_gqa=True)
    grads = list(torch.autograd.grad(out, leaves, x.dout.double()))
    found = errors.decoding_errors(case, x, made_worse(grads, wrong, 0.25))
    assert found == pytest.approx({n: 0.25 if i == wrong else 0.0 for i, n in enumerate(("dq", "dk", "dv"))}, abs=1e-9)


@pytest.mark.parametrize("wrong", [0, 1, -1])
def test_the_error_of_a_block_gradient_is_reported_under_the_parameters_name(wrong: int) -> None:
    x = block_peers.make_inputs(BlockCase("t", "gpt", 2, 8, 32, 4, 4, 48, dtype="fp32"), CPU, 0)
    names = ["dx", *dict(x.block.named_parameters())]
    found = errors.block_errors(x, made_worse(list(x.expected), wrong % len(names), 0.25))
    assert found == pytest.approx({name: 0.25 if name == names[wrong] else 0.0 for name in names}, abs=1e-6)


# ---- blocks of rows ---------------------------------------------------------------------------------


@pytest.fixture
def calls_of_autograd(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows in each call of autograd. The oracle may hold 64 float64 scores at a time."""
    rows: list[int] = []
    grad = torch.autograd.grad

    def counted(outputs: Tensor, *arguments: Any) -> Any:
        rows.append(outputs.shape[0])
        return grad(outputs, *arguments)

    monkeypatch.setattr(oracle, "_BLOCK_ELEMENTS", 64)
    monkeypatch.setattr(torch.autograd, "grad", counted)
    return rows


def test_gradients_of_attention_do_not_depend_on_the_size_of_row_blocks(calls_of_autograd: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, dout = (torch.randn(10, 2, 8, generator=generator) for _ in range(2))
    k, v = (torch.randn(16, 8, generator=generator) for _ in range(2))
    found = oracle.attention_slice(q, k, v, dout, causal=True)
    assert calls_of_autograd == [4, 4, 2] * 2
    leaves = [t.double().requires_grad_() for t in (q.transpose(0, 1), k, v)]
    mask = torch.ones(10, 16, dtype=torch.bool).tril(6)
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=mask)
    dq, dk, dv = torch.autograd.grad(out, leaves, dout.double().transpose(0, 1))
    for got, want in zip(found, (dq.transpose(0, 1), dk, dv), strict=False):
        torch.testing.assert_close(got, want)


def test_rows_wider_than_a_block_are_computed_one_at_a_time(calls_of_autograd: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 8, generator=generator), *torch.randn(2, 100, 8, generator=generator).unbind())
    oracle.attention_slice(q[:, None], k, v, q[:, None])
    assert calls_of_autograd == [1, 1, 1]
    calls_of_autograd.clear()
    x, gamma = torch.randn(3, 100, generator=generator), torch.ones(100)
    oracle.norm_gradients(x, x, gamma, eps=1e-5, rms=False, rows=torch.arange(2))
    assert calls_of_autograd == [2, 1, 1, 1]


def test_queries_without_a_key_have_no_gradient() -> None:
    q, none = torch.randn(3, 2, 8), torch.empty(0, 8)
    dq, dk, dv, _ = oracle.attention_slice(q, none, none, q)
    assert torch.equal(dq, torch.zeros(3, 2, 8, dtype=torch.float64))
    assert dk.shape == dv.shape == (0, 8)


def test_gradients_of_a_norm_do_not_depend_on_the_size_of_row_blocks(calls_of_autograd: list[int]) -> None:
    case = NormCase("t", 16, 30, "fp64")
    x = norm_peers.make_inputs(case, CPU, 0)
    rows = torch.arange(30)
    found = oracle.norm_gradients(x.dz, x.x, x.gamma, eps=norm_peers.EPS, rms=False, rows=rows)
    assert calls_of_autograd == [30, *[4] * 7, 2]
    for got, want in zip(found, norm_gradients(case, x), strict=True):
        torch.testing.assert_close(got, want)


# ---- names ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "bf16 B2 S24 H4:2 D16/8 full"),
        ({"heads_kv": 4, "head_dim_v": 16, "causal": True}, "bf16 B2 S24 H4 D16 causal"),
        ({"window": 5, "alibi": True, "softcap": 30.0}, "bf16 B2 S24 H4:2 D16/8 window 5 softcap 30 ALiBi"),
        ({"lengths": (24, 5), "bias_batch": 2}, "bf16 B2 T29 varlen H4:2 D16/8 full bias"),
        ({"bias_batch": 1, "dropout_p": 0.1}, "bf16 B2 S24 H4:2 D16/8 full shared bias dropout 0.1"),
        ({"dropout_p": 0.1, "dropout_layout": "efficient"}, "bf16 B2 S24 H4:2 D16/8 full efficient dropout 0.1"),
    ],
)
def test_the_name_of_a_case_lists_its_features(changes: dict[str, Any], name: str) -> None:
    assert replace(ATTENTION, **changes).name == name


@pytest.mark.parametrize(("heads_kv", "shown"), [(4, "H4"), (2, "H4:2")])
def test_the_name_of_a_training_step_contains_the_numbers_of_heads(heads_kv: int, shown: str) -> None:
    assert BlockCase("t", "gpt", 2, 8, 32, 4, heads_kv, 48).name == f"gpt block bf16 B2 S8 width 32 {shown}"


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "layer norm bf16 N48 rows 70"),
        ({"rms": True, "dtype": "fp32"}, "rms norm fp32 N48 rows 70"),
        ({"form": "dropout"}, "layer norm dropout bf16 N48 rows 70"),
        ({"form": "output", "rms": True}, "rms norm output bf16 N48 rows 70"),
    ],
)
def test_the_name_of_a_norm_has_its_form(changes: dict[str, Any], name: str) -> None:
    assert replace(NormCase("t", 48, 70), **changes).name == name


@pytest.mark.parametrize(("backward", "kind"), [(False, "decoding"), (True, "decoding backward")])
def test_the_name_of_decoding_says_whether_it_is_the_backward(backward: bool, kind: str) -> None:
    case = DecodingCase("t", 3, 4, 2, 5, 40, 16, backward=backward)
    assert case.name == f"{kind} bf16 B3 H4:2 Sq5 Sk40 D16"


# ---- result files -----------------------------------------------------------------------------------


def test_committed_result_files_have_the_current_schema() -> None:
    paths = sorted((Path(__file__).resolve().parents[1] / "benchmarks" / "results").glob("*.json"))
    assert results.load(paths[0]).results


def test_a_saved_file_makes_its_folders_and_begins_as_the_committed_ones(tmp_path: Path) -> None:
    """One field per line, indented by one space per level, lets diff compare two runs line by line."""
    committed = sorted((Path(__file__).resolve().parents[1] / "benchmarks" / "results").glob("*.json"))[0]
    written = tmp_path / "a" / "b" / "run.json"
    results.load(committed).save(written)
    assert written.read_text().splitlines()[:60] == committed.read_text().splitlines()[:60]
    results.load(committed).save(written)
    assert list(written.parent.iterdir()) == [written]


def test_a_failed_peer_has_done_no_work() -> None:
    assert results.PeerResult(results.FAILED).work == 0


def test_a_case_that_only_the_new_run_has_does_not_end_a_comparison() -> None:
    def report(*names: str) -> results.Report:
        peers = {"a": results.PeerResult(results.OK, times_ms=[1.0], work=1e9)}
        found = [results.CaseResult(name, "t", "TFLOP/s", 0.1, {}, peers, [], {}) for name in names]
        return results.Report("attention", "2026-01-01", {}, {}, found)

    assert [change.case for change in results.compare(report("x", "y"), report("new", "x", "other", "y"))] == [
        "t: x",
        "t: y",
    ]


@pytest.mark.parametrize(("unit", "rate"), [("TFLOP/s", 6.0), ("GB/s", 6000.0)])
def test_a_rate_is_work_over_time_in_the_unit_of_the_case(unit: str, rate: float) -> None:
    found = {"a": results.PeerResult(results.OK, times_ms=[1.0], work=6e9)}
    assert results.CaseResult("x", "t", unit, 0.1, {}, found, [], {}).rate("a") == rate


@pytest.mark.parametrize("earlier", [None, results.PeerResult(results.FAILED)])
def test_a_change_is_absolute_unless_both_runs_timed_the_fastest_other_peer(
    earlier: results.PeerResult | None,
) -> None:
    def report(ms: float, other: results.PeerResult | None) -> results.Report:
        found = {"flashbwd": results.PeerResult(results.OK, times_ms=[ms], work=1e9)}
        if other is not None:
            found["torch"] = other
        case = results.CaseResult("x", "t", "TFLOP/s", 0.1, {}, found, [], {})
        return results.Report("attention", "2026-01-01", {}, {}, [case])

    timed = results.PeerResult(results.OK, times_ms=[1.0], work=1e9)
    (change,) = results.compare(report(2.0, earlier), report(1.0, timed))
    assert (change.peer, change.change, change.relative) == ("flashbwd", 2.0, None)


# ---- defaults ---------------------------------------------------------------------------------------


def test_a_case_has_no_feature_by_default() -> None:
    assert not (ATTENTION.causal or ATTENTION.alibi or ATTENTION.deterministic or ATTENTION.compiled)
    assert (ATTENTION.dropout_p, ATTENTION.softcap, ATTENTION.bars) == (0.0, 0.0, ())
    norm = NormCase("t", 48, 70)
    assert (norm.rms, norm.form, norm.compiled) == (False, "", True)
    decoding, block = DecodingCase("t", 3, 4, 2, 5, 40, 16), BlockCase("t", "gpt", 2, 8, 32, 4, 4, 48)
    assert (decoding.backward, decoding.compiled, block.compiled) == (False, True, True)
    assert not Bar("flashbwd sm90", "torch cuDNN", 1.0).goal


def test_a_new_run_is_not_complete_and_a_case_has_one_set_of_inputs() -> None:
    case = results.CaseResult("x", "t", "TFLOP/s", 0.1, {}, {}, [], {})
    assert case.input_sets == 1
    assert not results.Report("attention", "2026-01-01", {}, {}, [case]).complete


@pytest.mark.parametrize("kept", [False, True])
def test_by_default_the_oracle_has_no_mask_and_no_dropout_factor(kept: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, dout = (torch.randn(10, 1, 8, generator=generator) for _ in range(2))
    k, v = (torch.randn(16, 8, generator=generator) for _ in range(2))
    keep = torch.ones(1, 10, 16, dtype=torch.bool) if kept else None
    leaves = [t.double().requires_grad_() for t in (q[:, 0], k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves)
    dq, dk, dv = torch.autograd.grad(out, leaves, dout[:, 0].double())
    for got, want in zip(oracle.attention_slice(q, k, v, dout, keep=keep), (dq[:, None], dk, dv), strict=False):
        torch.testing.assert_close(got, want)


def test_no_dropout_mask_is_computed_without_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors.attention_inputs, "dropout_mask", lambda *_: pytest.fail("asked for"))
    case = replace(ATTENTION, dtype="fp32")
    x = errors.attention_inputs.make_inputs(case, CPU, 0)
    prepared: Any = SimpleNamespace(forward=lambda: None, scope=contextlib.nullcontext)
    found = errors.attention_errors(case, x, prepared, [torch.zeros_like(t) for t in (x.q, x.k, x.v)])
    assert found == {"dq": 1.0, "dk": 1.0, "dv": 1.0}


# ---- work and bytes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "elements"),
    [
        ({}, 2 * 24 * (4 * (16 + 8 + 8) + 2 * (16 + 8))),  # q, out and dout; k and v
        ({"bias_batch": 1}, 2 * 24 * (4 * (16 + 8 + 8) + 2 * (16 + 8)) + 4 * 24 * 24),
        ({"bias_batch": 2}, 2 * 24 * (4 * (16 + 8 + 8) + 2 * (16 + 8)) + 2 * 4 * 24 * 24),
        ({"lengths": (24, 5)}, 29 * (4 * (16 + 8 + 8) + 2 * (16 + 8))),
    ],
)
def test_input_bytes_of_attention_count_all_its_tensors(changes: dict[str, Any], elements: int) -> None:
    assert replace(ATTENTION, **changes).input_bytes == 2 * elements
    assert replace(ATTENTION, dtype="fp32", **changes).input_bytes == 4 * elements


def test_input_bytes_of_a_norm_count_x_and_dz() -> None:
    case = NormCase("t", 48, 70)
    x = norm_peers.make_inputs(case, CPU, 0)
    assert case.input_bytes == x.x.nbytes + x.dz.nbytes


@pytest.mark.parametrize(("backward", "tensors"), [(False, "qkv"), (True, "qkvkv")])
def test_input_bytes_of_decoding_count_queries_keys_and_values(backward: bool, tensors: str) -> None:
    case = DecodingCase("t", 3, 4, 2, 5, 40, 16, backward=backward)
    x = decoding_peers.make_inputs(case, CPU, 0)
    assert case.input_bytes == sum(getattr(x, name).nbytes for name in tensors)
    assert case.work == sum(getattr(x, name).nbytes for name in tensors if name != "q")


def test_input_bytes_of_a_block_count_x_and_the_gradient_of_its_result() -> None:
    case = BlockCase("t", "gpt", 2, 8, 32, 4, 4, 48)
    x = block_peers.make_inputs(case, CPU, 0)
    assert case.input_bytes == x.x.nbytes + x.dout.nbytes


@pytest.mark.parametrize(("form", "passes"), [("", 3), ("output", 3), ("dropout", 5)])
def test_the_work_of_a_norm_depends_on_its_form(form: str, passes: int) -> None:
    assert NormCase("t", 48, 70, form=form).work == passes * 48 * 70 * 2


@pytest.mark.parametrize(("shape", "products"), [("gpt", 2), ("llama", 3)])
def test_the_work_of_a_block_counts_three_passes_over_weights_and_seven_over_half_of_the_pairs(
    shape: str, products: int
) -> None:
    case = BlockCase("t", shape, 2, 8, 32, 4, 2, 48)
    weights = 32 * 32 + 2 * 32 * 16 + 32 * 32 + products * 32 * 48  # q; k and v of 2 heads of 4; output; MLP
    pairs = 2 * 8 * 8 / 2
    assert case.work == 3 * 2 * 16 * weights + 7 * 2 * pairs * 32


@pytest.mark.parametrize("count", [2, 4])
def test_a_block_needs_a_gradient_and_an_expected_one_for_x_and_each_parameter(count: int) -> None:
    layer, one = torch.nn.Linear(1, 1), torch.ones(1)
    given = SimpleNamespace(block=layer, expected=[one] * 3)
    assert errors.block_errors(given, [one] * 3) == {"dx": 0.0, "weight": 0.0, "bias": 0.0}  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="zip"):
        errors.block_errors(given, [one] * count)  # type: ignore[arg-type]
    given.expected = [one] * count
    with pytest.raises(ValueError, match="zip"):
        errors.block_errors(given, [one] * 3)  # type: ignore[arg-type]


def test_an_rms_norm_may_have_no_gradient_of_beta() -> None:
    case = NormCase("t", 8, 16, "fp32", rms=True, compiled=False)
    x = norm_peers.make_inputs(case, CPU, 0)
    dx, dgamma, *_ = oracle.norm_gradients(
        x.dz, x.x, x.gamma, eps=norm_peers.EPS, rms=True, rows=torch.arange(case.rows)
    )
    found = errors.norm_errors(case, x, (dx, dgamma, None))
    assert found.keys() == {"dx", "dgamma"} and max(found.values()) < 1e-6


def test_the_middle_sequence_of_a_batch_is_checked() -> None:
    case = replace(ATTENTION, batch=7, heads=4, heads_kv=4)
    assert errors._attention_slices(case) == [(0, 0), (3, 2), (6, 3)]


@pytest.mark.parametrize("count", [2, 4])
def test_decoding_needs_one_result_and_one_expected_result_per_name(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = DecodingCase("t", 2, 4, 2, 3, 40, 16, "fp32", backward=True)
    x, one = decoding_peers.make_inputs(case, CPU, 0), torch.ones(2, 1)
    monkeypatch.setattr(decoding_peers, "expected", lambda *_: expected)
    expected = [one[-1]] * 3
    assert errors.decoding_errors(case, x, [one] * 3) == {"dq": 0.0, "dk": 0.0, "dv": 0.0}
    with pytest.raises(ValueError, match="zip"):
        errors.decoding_errors(case, x, [one] * count)
    expected = [one[-1]] * count
    with pytest.raises(ValueError, match="zip"):
        errors.decoding_errors(case, x, [one] * 3)


def test_a_bias_that_sequences_do_not_share_asks_for_no_more_slices() -> None:
    case = replace(ATTENTION, batch=7, heads=4, heads_kv=4)
    assert errors._attention_slices(replace(case, bias_batch=7)) == errors._attention_slices(case)
    shared = errors._attention_slices(replace(case, bias_batch=1))
    assert sorted(shared) == [(b, kv) for b in range(7) for kv in (0, 3)]


# ---- verdicts and comparisons -----------------------------------------------------------------------


def peer(*times_ms: float, status: str = results.OK) -> results.PeerResult:
    return results.PeerResult(status, times_ms=list(times_ms), work=6e9, method="clock")


def report_of(**peers: results.PeerResult) -> results.Report:
    named = {name.replace("_", " "): result for name, result in peers.items()}
    case = results.CaseResult("name", "main", "TFLOP/s", 0.02, {}, named, [], {})
    return results.Report("attention", "2026-01-01T00:00:00+00:00", {}, {}, [case], True)


def test_a_bar_is_reached_by_exactly_its_ratio() -> None:
    (case,) = report_of(flashbwd_sm90=peer(2.0), torch_cuDNN=peer(3.0)).results
    assert case.verdict(Bar("flashbwd sm90", "torch cuDNN", 1.5)).passed is True


@pytest.mark.parametrize(
    ("status", "times_ms", "timed"),
    [
        (results.OK, [1.0], True),
        (results.WRONG, [1.0], True),
        (results.OK, [], False),
        (results.FAILED, [1.0], False),
        (results.UNSUPPORTED, [], False),
    ],
)
def test_a_peer_that_ran_with_times_is_timed_and_has_the_figures_that_were_measured(
    status: str, times_ms: list[float], timed: bool
) -> None:
    found = peer(*times_ms, status=status)
    assert (found.timed, found.has(results.COOL), found.has(results.SUSTAINED)) == (timed, timed, False)
    found.sustained_ms = [2.0]
    assert (found.timed, found.has(results.SUSTAINED)) == (timed, timed)


@pytest.mark.parametrize("missing", ["ours", "over"])
def test_there_is_no_ratio_where_either_peer_has_no_time(missing: str) -> None:
    (case,) = report_of(ours=peer(1.0), over=peer(2.0)).results
    assert case.ratio("ours", "over") == results.Ratio(2.0, 2.0, 2.0)
    other = "over" if missing == "ours" else "ours"
    case.peers[other].sustained_ms = [1.0]
    assert case.ratio("ours", "over", results.SUSTAINED) is None
    case.peers[missing] = peer(status=results.FAILED)
    assert case.ratio("ours", "over") is None
    del case.peers[missing]
    assert case.ratio("ours", "over") is None


def test_a_ratio_needs_times_of_the_same_rounds() -> None:
    (case,) = report_of(ours=peer(1.0, 1.0), over=peer(1.0, 1.0, 1.0)).results
    with pytest.raises(ValueError, match="zip"):
        case.ratio("ours", "over")


@pytest.mark.parametrize(
    ("ratio", "shown"),
    [((2.0, 1.0, 3.0), "2.00 (1.00-3.00)"), ((2.0, 2.0, 2.0), "2"), ((612.34, 612.34, 612.34), "612.3")],
)
def test_a_ratio_without_a_range_is_one_number(ratio: tuple[float, float, float], shown: str) -> None:
    assert str(results.Ratio(*ratio)) == shown


def test_only_wrong_and_failed_peers_of_this_library_are_wrong() -> None:
    kinds = {"right": results.OK, "off": results.WRONG, "raised": results.FAILED, "refused": results.UNSUPPORTED}
    ours = {f"flashbwd_{name}": peer(1.0, status=status) for name, status in kinds.items()}
    found = report_of(**ours, torch_flash=peer(1.0, status=results.WRONG)).wrong()
    assert [line.split(":")[0] for line in found] == ["name, flashbwd off", "name, flashbwd raised"]


def test_a_peer_that_was_not_timed_does_not_end_a_comparison() -> None:
    old = report_of(a=peer(1.0), b=peer(1.0))
    new = report_of(a=peer(status=results.FAILED), b=peer(1.0))
    assert [change.peer for change in results.compare(old, new)] == ["b"]


@pytest.mark.parametrize(("slower", "significant"), [(1.15, False), (1.5, True)])
def test_a_change_counts_if_it_exceeds_the_spreads_of_both_runs_together(slower: float, significant: bool) -> None:
    old = report_of(flashbwd=peer(0.95, 1.0, 1.05))
    new = report_of(flashbwd=peer(*(slower * time for time in (0.95, 1.0, 1.05))))
    (change,) = results.compare(old, new)
    assert change.significant == significant


@pytest.mark.parametrize("dropout_p, times", [(0.0, 1), (0.5, 2)])
def test_the_oracle_runs_once_per_slice_unless_the_mask_depends_on_the_peer(
    monkeypatch: pytest.MonkeyPatch, dropout_p: float, times: int
) -> None:
    case = AttentionCase("t", 1, 32, 2, 2, 8, 8, dtype="fp32", dropout_p=dropout_p)
    calls: list[int] = []
    real = oracle.attention_slice

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        return real(*arguments, **options)

    monkeypatch.setattr(oracle, "attention_slice", counted)

    def prepare(case: AttentionCase, x: attention_inputs.AttentionInputs) -> peers.Prepared:
        return peers.Prepared(lambda: (x.q, x.k, x.v))

    settings = measure.Settings(rounds=5, slot_ms=0.0)
    both = [peers.Peer(name, prepare) for name in ("one", "two")]
    found = runner.run_case(case, torch.device("cpu"), settings, both, sets=1)
    assert {peer.status for peer in found.peers.values()} == {results.WRONG}
    assert len(calls) == times * len(errors._attention_slices(case))

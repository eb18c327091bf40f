"""The benchmark harness: its tables, formulas, statistics, files and peers. No test here asserts a time."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import re
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kit import dropout
from kit import oracle as kit_oracle
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from flashbwd.bench import (
    ahead,
    attention_cases,
    attention_inputs,
    attention_peers,
    block_peers,
    cases,
    contenders,
    decoding_peers,
    errors,
    flex_peers,
    machine,
    measure,
    norm_peers,
    oracle,
    override_time,
    peers,
    report,
    results,
    runner,
    suites,
)
from flashbwd.bench.cases import TOLERANCES, AttentionCase, Bar, NormCase
from flashbwd.bench.measure import Settings

CPU = torch.device("cpu")
FAST = Settings(rounds=5, slot_ms=0.1)
CEILINGS = {"matmul_tflops": 1.0, "copy_gbs": 1.0}
input_sets = measure.input_sets
TINY = AttentionCase("tiny", 2, 24, 4, 4, 16, 16, dtype="fp32")


class Operators(TorchDispatchMode):
    """Records every operator that is called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))

    def forwards(self):
        """The recorded operators that belong to a forward: attention, norms, softmax, but not their backwards."""
        of_a_forward = re.compile(r"attention|attend|softmax|logsumexp|layer_norm|rms_norm|flex_decoding")
        return [name for name in self.names if of_a_forward.search(name) and "backward" not in name]


def forwards_of(prepared):
    with prepared.scope(), Operators() as called:
        prepared.backward()
    assert called.names
    return called.forwards()


@pytest.fixture(autouse=True)
def _little_work(monkeypatch):
    """Make two input sets per case, and measure no ceilings."""
    monkeypatch.setattr(measure, "input_sets", lambda input_bytes, device: 2)
    monkeypatch.setattr(measure, "ceilings", lambda device, settings: CEILINGS)


# ---- tables ---------------------------------------------------------------------------------------


def test_tables_have_every_row():
    counts = Counter(case.table for case in attention_cases.ATTENTION_CASES)
    assert counts["main"] == 3 * 2 * 6
    assert counts["grouped"] == 2 * 2 * 2
    assert counts["grouped_window"] == 2
    assert counts["other"] == 24
    assert counts["bias"] == counts["scores"] == 8
    assert counts["varlen"] == 4
    assert counts["dropout"] == 10
    assert (counts["wide"], counts["fp32"]) == (8, 2)
    counts = Counter((case.table, case.dtype) for case in suites.NORM_CASES)
    assert counts["layer_norm", "bf16"] == counts["layer_norm", "fp32"] == 9
    assert counts["layer_norm_untuned", "bf16"] == counts["layer_norm_untuned", "fp32"] == 3
    assert counts["layer_norm_few_rows", "bf16"] == counts["layer_norm_few_rows", "fp32"] == 10
    assert len(suites.DECODING_CASES) == 9


def test_names_are_unique_within_a_table():
    for suite in (
        attention_cases.ATTENTION_CASES,
        suites.NORM_CASES,
        suites.DECODING_CASES,
        suites.DECODING_BACKWARD_CASES,
        attention_cases.CPU_ATTENTION_CASES,
        suites.CPU_NORM_CASES,
        suites.CPU_DECODING_CASES,
        *suites.SMOKE_CASES.values(),
    ):
        names = [(case.table, case.name) for case in suite]
        assert len(set(names)) == len(names)


def test_main_table_has_constant_tokens_and_width():
    for case in attention_cases.ATTENTION_CASES:
        if case.table == "main":
            assert case.batch * case.seqlen == 16384
            assert case.heads * case.head_dim == 2048
            assert case.deterministic


def test_every_gpu_case_has_a_bar():
    decoding = (*suites.DECODING_CASES, *suites.DECODING_BACKWARD_CASES)
    assert all(case.bars for case in (*attention_cases.ATTENTION_CASES, *suites.NORM_CASES, *decoding))


@pytest.mark.parametrize(
    ("table", "dim", "causal", "seqlen", "over", "at_least"),
    [
        ("main", 64, False, 512, cases.CUDNN, 1.23),
        ("main", 128, True, 16384, cases.CUDNN, 1.19),
        ("main", 256, False, 8192, cases.CUDNN, 1.29),
        ("other", 32, False, 4096, cases.CUDNN, round(370 / 232, 3)),
        ("other", 112, True, 4096, cases.CUDNN, 1.0),
    ],
)
def test_bars_are_those_of_the_table(table, dim, causal, seqlen, over, at_least):
    (case,) = [
        c
        for c in attention_cases.ATTENTION_CASES
        if (c.table, c.head_dim, c.causal, c.seqlen) == (table, dim, causal, seqlen) and c.dtype == "bf16"
    ]
    assert Bar(cases.SM90, over, at_least) in case.bars


def test_bars_name_peers_that_exist():
    tables = (
        attention_peers.ATTENTION_PEERS,
        norm_peers.NORM_PEERS,
        decoding_peers.DECODING_PEERS,
        block_peers.BLOCK_PEERS,
        flex_peers.FLEX_PEERS,
    )
    names = {peer.name for table in tables for peer in table}
    names |= {"TFLOP/s", "GB/s", cases.ANY_PEER}
    for case in (*suites.suite("all", "cuda"), *suites.suite("all", "cpu")):
        for bar in case.bars:
            assert {bar.ours, bar.over} <= names


def test_quick_suites_are_parts_of_the_full_ones():
    for device in ("cuda", "cpu"):
        for name in ("attention", "layer_norm", "all"):
            quick, full = suites.suite(name, device, quick=True), suites.suite(name, device)
            assert 0 < len(quick) < len(full)
            assert set(quick) <= set(full)


def test_long_tailed_lengths_are_reproducible_and_fill_the_total():
    lengths = cases.long_tailed_lengths(32768)
    assert sum(lengths) == 32768
    assert lengths == cases.long_tailed_lengths(32768)
    assert max(lengths) > 8 * sorted(lengths)[len(lengths) // 2]


# ---- formulas -------------------------------------------------------------------------------------


def test_flops_of_the_main_table_follow_the_formula():
    for case in attention_cases.ATTENTION_CASES:
        if case.table == "main":
            flops = 10 * case.batch * case.heads * case.seqlen**2 * case.head_dim
            assert case.work == (flops / 2 if case.causal else flops)


def test_flops_count_6d_and_4dv_per_pair():
    case = replace(TINY, head_dim=192, head_dim_v=128)
    assert case.work == 2 * 4 * 24 * 24 * (6 * 192 + 4 * 128)


@pytest.mark.parametrize("window", [1, 5, 24, 100])
def test_window_pairs_are_counted_one_by_one(window):
    case = replace(TINY, causal=True, window=window)
    counted = sum(1 for i in range(24) for j in range(24) if i - window < j <= i)
    assert case.pairs == 2 * counted


def test_varlen_pairs_sum_over_sequences():
    case = replace(TINY, batch=3, seqlen=9, lengths=(9, 1, 4), causal=True)
    assert case.pairs == (81 + 1 + 16) / 2


def test_norm_bytes_are_three_passes():
    assert NormCase("t", 4096, 65536, "bf16").work == 3 * 4096 * 65536 * 2
    assert NormCase("t", 768, 100, "fp32").work == 3 * 768 * 100 * 4


def test_decoding_bytes_are_keys_and_values():
    assert suites.DECODING_CASES[0].work == 2 * 8 * 8192 * 128 * 2


# ---- statistics, bars, comparison -----------------------------------------------------------------


def _peer(*times_ms: float, status: str = results.OK, work: float = 6e9) -> results.PeerResult:
    return results.PeerResult(status, times_ms=list(times_ms), work=work, method="clock")


def _case(bars: list[Bar], **measured: results.PeerResult) -> results.CaseResult:
    named = {name.replace("_", " "): peer for name, peer in measured.items()}
    return results.CaseResult("name", "main", "TFLOP/s", 0.02, {}, named, bars, {})


def _report(*found: results.CaseResult) -> results.Report:
    where = machine.describe(CPU).as_dict()
    return results.Report("attention", "2026-01-01T00:00:00+00:00", where, dataclasses.asdict(FAST), list(found), True)


def test_rate_is_the_median_and_ratio_is_taken_within_rounds():
    found = _case([], flashbwd_sm90=_peer(1.0, 2.0, 4.0), torch_cuDNN=_peer(2.0, 4.0, 8.0))
    assert found.rate("flashbwd sm90") == pytest.approx(6e9 / 2.0 / 1e9)
    ratio = found.ratio("flashbwd sm90", "torch cuDNN")
    assert ratio is not None
    assert (ratio.median, ratio.least, ratio.most) == (2.0, 2.0, 2.0)  # although the times drift by a factor of 4
    assert found.peers["torch cuDNN"].spread == pytest.approx(6.0 / 4.0)


def test_a_ratio_is_the_median_of_the_rounds_ratios_not_the_ratio_of_medians():
    found = _case([], flashbwd_sm90=_peer(1.0, 4.0, 2.0), torch_cuDNN=_peer(4.0, 1.0, 6.0))
    assert str(found.ratio("flashbwd sm90", "torch cuDNN")) == "3.00 (0.25-4.00)"  # the ratio of medians is 2


def test_the_faster_layout_of_cudnn_counts():
    slow, fast, wrong = _peer(4.0), _peer(2.0), _peer(1.0, status=results.WRONG)
    for rows_first, heads_first in ((slow, fast), (fast, slow), (fast, wrong), (wrong, fast)):
        measured = {"flashbwd sm90": _peer(1.0), cases.CUDNN: rows_first, cases.CUDNN_HEADS_FIRST: heads_first}
        found = results.CaseResult("name", "main", "TFLOP/s", 0.02, {}, measured, [], {})
        assert found.ratio("flashbwd sm90", cases.CUDNN) == results.Ratio(2.0, 2.0, 2.0)


def test_a_bar_applies_to_the_settled_clock_if_that_was_measured():
    bars = [Bar("flashbwd sm90", "torch cuDNN", 1.5), Bar("flashbwd sm90", "TFLOP/s", 5.0)]
    ours, theirs = _peer(1.0), _peer(2.0)
    found = _case(bars, flashbwd_sm90=ours, torch_cuDNN=theirs)
    assert [found.verdict(bar).passed for bar in bars] == [True, True]
    ours.sustained_ms, theirs.sustained_ms = [2.0], [2.4]
    assert [found.verdict(bar).passed for bar in bars] == [False, False]
    assert found.verdict(bars[0]).value == results.Ratio(1.2, 1.2, 1.2)
    shown = report.rates([found])
    assert shown.index("with a settled clock") < shown.index("| 6 ")


def test_ratio_compares_rates_not_times():
    found = _case([], flashbwd=_peer(1.0, work=3e9), device_copy=_peer(1.0, work=4e9))
    assert found.ratio("flashbwd", "device copy") == results.Ratio(0.75, 0.75, 0.75)


@pytest.mark.parametrize(
    ("bar", "passed"),
    [
        (Bar("flashbwd sm90", "torch cuDNN", 1.5), True),
        (Bar("flashbwd sm90", "torch cuDNN", 2.5), False),
        (Bar("flashbwd sm90", "TFLOP/s", 5.9), True),
        (Bar("flashbwd sm90", "TFLOP/s", 6.1), False),
        (Bar("flashbwd sm90", cases.ANY_PEER, 1.9), True),  # torch flash is faster, but wrong
        (Bar("flashbwd sm90", "torch efficient", 1.0), None),
        (Bar("flashbwd sm80", "torch cuDNN", 1.0), None),
    ],
)
def test_a_verdict_compares_the_ratio_or_the_rate_with_the_bar(bar, passed):
    found = _case(
        [bar],
        flashbwd_sm90=_peer(1.0, 1.0, 1.0),
        torch_cuDNN=_peer(2.0, 2.0, 2.0),
        torch_flash=_peer(0.1, 0.1, 0.1, status=results.WRONG),
        device_copy=_peer(0.1, 0.1, 0.1),
    )
    assert found.verdict(bar).passed is passed
    assert (bar.over in report.bars([found])) == (passed is not None)


def test_a_wrong_gradient_passes_no_bar():
    bar = Bar("flashbwd sm90", "torch cuDNN", 1.0)
    found = _case([bar], flashbwd_sm90=_peer(1.0, status=results.WRONG), torch_cuDNN=_peer(2.0))
    assert found.verdict(bar).passed is False


def test_a_comparison_divides_by_the_fastest_peer():
    old = _report(_case([], flashbwd_sm90=_peer(2.0, 2.0), torch_cuDNN=_peer(2.0, 2.0)))
    new = _report(_case([], flashbwd_sm90=_peer(1.0, 1.0), torch_cuDNN=_peer(1.0, 1.0)))  # the machine is twice as fast
    ours, cudnn = results.compare(old, new)
    assert (ours.peer, ours.change, ours.relative, ours.significant) == ("flashbwd sm90", 2.0, 1.0, False)
    assert (cudnn.change, cudnn.relative, cudnn.significant) == (2.0, None, True)
    assert "torch cuDNN" in report.changes_table([ours, cudnn])


def test_a_comparison_ignores_cases_and_peers_that_only_one_run_has():
    old = _report(_case([], torch_cuDNN=_peer(2.0)))
    other = _case([], torch_cuDNN=_peer(2.0))
    other.name = "another"
    new = _report(_case([], flashbwd_sm90=_peer(1.0)), other)
    assert results.compare(old, new) == []


def test_fewer_than_five_rounds_are_refused():
    with pytest.raises(ValueError, match="rounds is 4, expected at least 5"):
        Settings(rounds=4)


# ---- files ----------------------------------------------------------------------------------------


def test_a_saved_report_is_loaded_unchanged(tmp_path):
    bar = Bar("flashbwd sm90", "torch cuDNN", 1.2, goal=True)
    saved = _report(_case([bar], flashbwd_sm90=_peer(1.0), flex=results.PeerResult(results.UNSUPPORTED, "no bias")))
    saved.save(tmp_path / "deep" / "r.json")
    assert results.load(tmp_path / "deep" / "r.json") == saved
    assert list((tmp_path / "deep").iterdir()) == [tmp_path / "deep" / "r.json"]


@pytest.mark.parametrize("text", ["{}", "[1]", "nonsense", '{"schema": 99}', '{"schema": 1, "results": [{}]}'])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"flashbwd: .*r\.json"):
        results.load(path)


def test_the_json_file_describes_the_machine_and_the_sources(tmp_path):
    path = tmp_path / "r.json"
    found = runner.run_suite("attention", [TINY], CPU, FAST, path, only=["torch CPU"], progress=False)
    data = json.loads(path.read_text())
    assert found.complete
    assert data["schema"] == results.SCHEMA
    assert {"device", "driver", "cpu", "torch", "commit", "kernel_sources", "libraries"} <= set(data["machine"])
    assert data["machine"]["kernel_sources"] == machine.kernel_sources_hash()
    assert data["results"][0]["ceilings"] == CEILINGS
    peer = data["results"][0]["peers"]["torch CPU flash"]
    assert peer["status"] == "ok"
    assert len(peer["times_ms"]) == FAST.rounds
    assert all(time > 0 for time in peer["times_ms"])


def test_run_goes_on_where_it_stopped(tmp_path):
    path = runner.result_path(tmp_path, "attention", "Some CPU (R) 3")
    assert path.name.startswith("some-cpu-r-3-attention-")
    two = [TINY, replace(TINY, causal=True)]
    stopped = runner.run_suite("attention", two, CPU, FAST, path, only=["torch"], budget_s=-1, progress=False)
    assert (stopped.complete, stopped.results) == (False, [])
    where = machine.describe(CPU)
    assert runner.unfinished(tmp_path, "attention", where, FAST) == path
    assert runner.unfinished(tmp_path, "layer_norm", where, FAST) is None
    assert runner.unfinished(tmp_path, "attention", replace(where, libraries={"_C.so": "0"}), FAST) is None
    runner.run_suite("attention", two[:1], CPU, FAST, path, only=["torch"], progress=False)
    first = results.load(path).results[0]
    whole = runner.run_suite("attention", two, CPU, FAST, path, only=["torch"], progress=False)
    assert whole.complete
    assert [result.name for result in whole.results] == [case.name for case in two]
    assert whole.results[0] == first
    assert runner.unfinished(tmp_path, "attention", where, FAST) is None


def test_peers_are_compiled_ahead_side_by_side_and_may_fail(tmp_path):
    """Each of three processes waits for the other two, and creates a file if it meets them."""
    wait = """import pathlib, sys, time
(folder, name), end = (pathlib.Path(sys.argv[1]), sys.argv[2]), time.monotonic() + 60
(folder / name).touch()
while len(list(folder.glob("?"))) < 3 and time.monotonic() < end: time.sleep(0.01)
if len(list(folder.glob("?"))) == 3: (folder / f"{name} met all").touch()
sys.exit(name == "b")"""
    work = [(replace(TINY, table=name), peers.Peer("peer", lambda *_: None, ahead=True)) for name in "abc"]

    def command(share):
        ((case, _),) = share
        return [sys.executable, "-c", wait, str(tmp_path), case.table]

    ahead.compile_ahead(work, at_once=3, command=command)
    assert sorted(path.name for path in tmp_path.glob("* met all")) == ["a met all", "b met all", "c met all"]
    for path in tmp_path.iterdir():
        path.unlink()
    ahead.compile_ahead(work[:1], until=time.monotonic(), command=command)
    assert not list(tmp_path.iterdir())


def test_peers_that_compile_for_long_are_compiled_before_the_measurements(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(ahead, "compile_ahead", lambda work, until: asked.extend(work))
    table = [replace(peer, ahead=True) for peer in attention_peers.ATTENTION_PEERS if "cpu" in peer.devices]
    monkeypatch.setattr(attention_peers, "ATTENTION_PEERS", table)
    two = [TINY, replace(TINY, causal=True)]
    runner.run_suite("attention", two, CPU, FAST, tmp_path / "r.json", only=["torch"], progress=False)
    assert {case.name for case, _ in asked} == {case.name for case in two}
    assert all(peer.ahead for _, peer in asked)
    asked.clear()
    runner.run_suite("attention", two, CPU, FAST, tmp_path / "r.json", only=["torch"], progress=False)
    assert asked == []


def test_kernel_sources_hash_follows_names_and_contents(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "SOURCE_TREE", tmp_path)
    assert machine.kernel_sources_hash() is None
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "a.cu").write_text("1")
    first = machine.kernel_sources_hash()
    (tmp_path / "csrc" / "a.cu").write_text("2")
    second = machine.kernel_sources_hash()
    (tmp_path / "csrc" / "a.cu").rename(tmp_path / "csrc" / "b.cu")
    assert len({first, second, machine.kernel_sources_hash()}) == 3


def test_a_report_has_a_markdown_file_and_plots(tmp_path):
    suite = [TINY, replace(TINY, causal=True), NormCase("tiny_norm", 32, 40, "fp32", compiled=False)]
    found = runner.run_suite("all", suite, CPU, FAST, tmp_path / "r.json", only=["torch", "copy"], progress=False)
    text = report.markdown(found, found)
    assert TINY.name in text
    assert "TFLOP/s of" in text
    assert "## Compared with" in text
    sources = machine.kernel_sources_hash()  # None for an installed package
    assert sources is None or f"kernel sources {sources[:12]}" in text
    pytest.importorskip("matplotlib")
    images = report.plots(found, tmp_path / "r")
    assert [path.name for path in images] == ["r-tiny.png", "r-tiny_norm.png"]
    assert all(path.stat().st_size > 1000 for path in images)


def test_main_tables_are_drawn_as_lines(tmp_path):
    pytest.importorskip("matplotlib")
    points = []
    for seqlen in (512, 1024):
        point = _case([], flashbwd_sm90=_peer(1.0), torch_cuDNN=_peer(2.0))
        point.case = {"head_dim": 64, "causal": False, "seqlen": seqlen}
        points.append(point)
    (path,) = report.plots(_report(*points), tmp_path / "r")
    assert path.name == "r-main.png"


# ---- correctness of the measured gradients --------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        TINY,
        replace(TINY, causal=True, heads_kv=2),
        replace(TINY, causal=True, window=5, head_dim_v=8),
        replace(TINY, bias_batch=1),
        replace(TINY, bias_batch=2, causal=True, heads_kv=2),
        replace(TINY, softcap=0.5),
        replace(TINY, alibi=True, causal=True, heads_kv=2),
    ],
    ids=lambda case: case.name,
)
def test_oracle_of_slices_agrees_with_the_test_kit(case):
    x = attention_inputs.make_inputs(replace(case, dtype="fp64"), CPU, 0)
    window = (case.window - 1, 0) if case.window else (-1, -1)
    scores = {"attn_bias": x.bias, "softcap": case.softcap, "alibi_slopes": x.alibi_slopes}
    whole = kit_oracle.attention(x.q, x.k, x.v, x.dout, causal=case.causal, window_size=window, **scores)
    grads = (whole.dq, whole.dk, whole.dv) if x.bias is None else (whole.dq, whole.dk, whole.dv, whole.dbias)
    prepared = peers.Prepared(lambda: grads)
    found = errors.attention_errors(case, x, prepared, grads)
    assert max(found.values()) < 1e-12
    for n, name in enumerate(found):
        spoilt = [g.clone() for g in grads]
        spoilt[n].view(-1)[-1] += 1e-3
        assert errors.attention_errors(case, x, prepared, spoilt)[name] > 1e-7


def test_varlen_slices_are_the_longest_the_shortest_and_the_last():
    case = replace(TINY, batch=3, seqlen=9, lengths=(9, 1, 4), causal=True)
    x = attention_inputs.make_inputs(replace(case, dtype="fp64"), CPU, 0)
    whole = kit_oracle.attention(
        x.q, x.k, x.v, x.dout, causal=True, cu_seqlens_q=x.cu_seqlens, cu_seqlens_k=x.cu_seqlens
    )
    grads = (whole.dq, whole.dk, whole.dv)
    assert errors._attention_slices(case) == [(0, 3), (1, 0), (2, 2)]
    assert max(errors.attention_errors(case, x, peers.Prepared(lambda: grads), grads).values()) < 1e-12


@pytest.mark.parametrize("case", [TINY, replace(TINY, batch=5, heads_kv=2), replace(TINY, bias_batch=1)])
def test_slices_come_from_several_heads_and_sequences(case):
    slices = errors._attention_slices(case)
    assert {0, case.batch - 1} <= {b for b, _ in slices}
    assert {0, case.heads_kv - 1} <= {kv for _, kv in slices}
    assert len(set(slices)) == len(slices)


LONG = replace(TINY, batch=2, seqlen=2048, head_dim=32, head_dim_v=32, causal=True, dtype="bf16")


@pytest.fixture(scope="module")
def long_gradients():
    """The inputs of LONG and its gradients, rounded once."""
    x = attention_inputs.make_inputs(LONG, CPU, 0)
    wide = [t.float() for t in (x.q, x.k, x.v, x.dout)]
    grads = kit_oracle.attention(*wide, causal=True, dtype=torch.float32)
    return x, {of: getattr(grads, of).bfloat16() for of in ("dq", "dk", "dv")}


def _errors_of_long(x, grads):
    return errors.attention_errors(LONG, x, peers.Prepared(lambda: tuple(grads.values())), list(grads.values()))


def test_rounded_gradients_of_long_sequences_are_far_within_the_limit(long_gradients):
    assert max(_errors_of_long(*long_gradients).values()) < TOLERANCES["bf16"] / 4


@pytest.mark.parametrize(("name", "rows"), [("dq", 3), ("dk", 20), ("dv", 20)])
@pytest.mark.parametrize("at", ["first", "last"])
def test_zeros_for_the_last_rows_of_any_slice_are_wrong(name, rows, at, long_gradients):
    x, rounded = long_gradients
    b, head = (0, 0) if at == "first" else (1, -1)
    wrong = rounded[name].clone()
    wrong[b, -rows:, head] = 0  # the norm of the whole slice does not show it
    assert _errors_of_long(x, rounded | {name: wrong})[name] > TOLERANCES["bf16"]


def test_nan_anywhere_is_an_error():
    x = attention_inputs.make_inputs(TINY, CPU, 0)
    grads = attention_peers.torch_cpu_flash(TINY, x).backward()
    grads[1][0, 3, 0, 0] = torch.nan  # type: ignore[index]
    found = errors.attention_errors(TINY, x, peers.Prepared(lambda: grads), grads)
    assert math.isnan(found["dk"])
    assert found["dq"] < 1e-5


def test_the_dropout_mask_is_computed_from_a_forward():
    case = replace(TINY, dropout_p=0.3, heads_kv=2)
    x = attention_inputs.make_inputs(case, CPU, 0)
    keep = torch.rand(2, 4, 24, 24) > 0.3

    def forward(v: torch.Tensor) -> torch.Tensor:
        p = torch.softmax(torch.einsum("bshd,bthd->bhst", x.q, x.k.repeat_interleave(2, 2)), -1) * keep
        return torch.einsum("bhst,bthd->bshd", p, v.repeat_interleave(2, 2))

    read = attention_inputs.dropout_mask(case, x, forward, 1)
    assert torch.equal(read, keep[1].transpose(0, 1))


def test_the_oracle_applies_the_dropout_mask():
    case = replace(TINY, dropout_p=0.3, dtype="fp64")
    x = attention_inputs.make_inputs(case, CPU, 0)
    masks = dropout.keep_masks(
        "flash", 1, 2, 0.3, heads=4, seqlens_q=(24, 24), seqlens_k=(24, 24), max_seqlen_q=24, max_seqlen_k=24
    )
    whole = kit_oracle.attention(x.q, x.k, x.v, x.dout, keep=masks, keep_scale=1 / 0.7)
    grads = (whole.dq, whole.dk, whole.dv)

    def forward(v: torch.Tensor) -> torch.Tensor:
        p = torch.softmax(torch.einsum("bshd,bthd->bhst", x.q, x.k) / 4, -1) * torch.stack(masks)
        return torch.einsum("bhst,bthd->bshd", p, v)

    found = errors.attention_errors(case, x, peers.Prepared(lambda: grads, forward=forward), grads)
    assert max(found.values()) < 1e-12


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("peer", ["torch native", "flashbwd"])
def test_norm_peers_are_right(peer, rms):
    case = NormCase("t", 48, 700, "fp32", rms=rms, compiled=False)
    found = runner.run_case(case, CPU, FAST, contenders.peers_of(case, CPU, [peer]))
    assert found.peers[peer].status == results.OK, found.peers[peer].reason
    assert set(found.peers[peer].errors) == ({"dx", "dgamma"} if rms else {"dx", "dgamma", "dbeta"})


@pytest.mark.parametrize("rms", [False, True])
def test_norm_oracle_agrees_with_autograd(rms):
    case = NormCase("t", 20, 30, "fp64", rms=rms)
    x = norm_peers.make_inputs(case, CPU, 0)
    leaves = [t.clone().requires_grad_() for t in (x.x, x.gamma, x.beta)]
    shape = [case.columns]
    if rms:
        z = torch.nn.functional.rms_norm(leaves[0], shape, leaves[1], norm_peers.EPS)
    else:
        z = torch.nn.functional.layer_norm(leaves[0], shape, *leaves[1:], norm_peers.EPS)
    expected = torch.autograd.grad(z, leaves[: 2 if rms else 3], x.dz)
    rows = torch.tensor([0, 7, 29])
    actual = oracle.norm_gradients(x.dz, x.x, x.gamma, eps=norm_peers.EPS, rms=rms, rows=rows)
    torch.testing.assert_close(actual[0], expected[0][rows])
    for a, e in zip(actual[1:], expected[1:], strict=False):
        torch.testing.assert_close(a, e)


SMALL = [
    replace(TINY, causal=True),
    replace(TINY, causal=True, heads_kv=2),
    replace(TINY, head_dim_v=8),
    replace(TINY, causal=True, window=5),
    replace(TINY, bias_batch=1),
    replace(TINY, dtype="bf16"),
    cases.packed(replace(TINY, causal=True), 60),
]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_every_cpu_peer_is_right_or_says_why_not(case):
    found = runner.run_case(case, CPU, FAST, contenders.peers_of(case, CPU))
    for name, peer in found.peers.items():
        assert peer.status in (results.OK, results.UNSUPPORTED), f"{name}: {peer.reason}"
        assert peer.timed == (peer.status == results.OK)
        assert peer.timed or peer.reason
    ours = found.peers[cases.REFERENCE]
    assert ours.status == results.OK
    assert ours.plan.startswith("reference")
    assert set(ours.refusals) == {"short", "sm90", "sm80"}
    assert set(ours.errors) == {"dq", "dk", "dv"} | ({"dbias"} if case.bias_batch else set())


def test_a_peer_that_raises_is_reported():
    def prepare(case, inputs):
        raise RuntimeError("no plan\nmore")

    found = runner.run_case(TINY, CPU, FAST, [peers.Peer("broken", prepare)])
    assert (found.peers["broken"].status, found.peers["broken"].reason) == (results.FAILED, "RuntimeError: no plan")
    assert "broken: failed in 1 cases: RuntimeError: no plan" in report.not_measured(_report(found))


@pytest.mark.parametrize("place", ["checked", "not checked"])
def test_a_gradient_with_nan_is_wrong(place):
    """NaN counts in every sequence of the batch, also in those for which no float64 gradients are computed."""

    def prepare(case, x):
        right = attention_peers.torch_cpu_flash(case, x).backward()
        right[0][-1 if place == "checked" else 0, 3, 0, 0] = torch.nan
        return peers.Prepared(lambda: right)

    found = runner.run_case(replace(TINY, batch=3), CPU, FAST, [peers.Peer("flashbwd wrong", prepare)])
    assert found.peers["flashbwd wrong"].status == results.WRONG
    assert found.peers["flashbwd wrong"].reason == "dq is off by nan"
    assert len(_report(found).wrong()) == 1


def test_a_wrong_peer_is_reported_and_timed():
    def prepare(case, x):
        return peers.Prepared(lambda: (x.q, x.k, x.v))

    found = runner.run_case(TINY, CPU, FAST, [peers.Peer("flashbwd wrong", prepare)])
    assert found.peers["flashbwd wrong"].status == results.WRONG
    assert found.peers["flashbwd wrong"].timed
    assert len(_report(found).wrong()) == 1
    assert "WRONG" in report.rate_cell(found, "flashbwd wrong")


# ---- GPU peers, checked by shapes only ------------------------------------------------------------

BASE = AttentionCase("t", 2, 64, 4, 4, 64, 64)


GPU_SHAPES = [
    BASE,
    replace(BASE, causal=True),
    replace(BASE, heads_kv=2),
    replace(BASE, bias_batch=1),
    replace(BASE, bias_batch=2, causal=True),
    replace(BASE, alibi=True),
    replace(BASE, dropout_p=0.1),
    replace(BASE, head_dim=192, head_dim_v=128),
    cases.packed(BASE, 300),
]
GPU_PEERS = ["torch_efficient", "torch_flash", "torch_flash_deterministic", "torch_cudnn", "torch_cudnn_heads_first"]


def test_cudnn_is_tried_with_rows_first_and_with_heads_first(monkeypatch):
    given = []
    monkeypatch.setattr(attention_peers, "torch_cudnn", lambda case, x: given.append(x))
    x = attention_inputs.make_inputs(TINY, CPU, 0)
    attention_peers.torch_cudnn_heads_first(TINY, x)
    for name in ("q", "k", "v", "dout"):
        tensor = getattr(given[0], name)
        assert getattr(x, name).is_contiguous()
        assert tensor.transpose(1, 2).is_contiguous()
        assert torch.equal(tensor, getattr(x, name))
    packed = cases.packed(TINY, 60)
    with pytest.raises(peers.UnsupportedCaseError):
        attention_peers.torch_cudnn_heads_first(packed, attention_inputs.make_inputs(packed, CPU, 0))
    assert {cases.CUDNN, cases.CUDNN_HEADS_FIRST} <= {peer.name for peer in attention_peers.ATTENTION_PEERS}


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a PyTorch built with CUDA")
@pytest.mark.parametrize(
    ("case", "peer"),
    [
        pytest.param(case, peer, id=f"{peer}-{case.name}")
        for case in GPU_SHAPES
        for peer in GPU_PEERS
        if not (case.lengths and "cudnn" in peer)  # PyTorch gives no shapes for that operator
    ],
)
def test_gpu_peers_call_the_operators_by_their_schemas(case, peer, monkeypatch):
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)  # seeding would initialise the GPU
    with FakeTensorMode():
        rows = (sum(case.lengths),) if case.lengths else (case.batch, case.seqlen)

        def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="cuda")

        x = attention_inputs.AttentionInputs(
            tensor(*rows, case.heads, case.head_dim),
            tensor(*rows, case.heads_kv, case.head_dim),
            tensor(*rows, case.heads_kv, case.head_dim_v),
            tensor(*rows, case.heads, case.head_dim_v),
            tensor(case.bias_batch, case.heads, case.seqlen, case.seqlen) if case.bias_batch else None,
            tensor(case.heads, dtype=torch.float32) if case.alibi else None,
            tensor(case.batch + 1, dtype=torch.int32) if case.lengths else None,
        )
        try:
            prepared = getattr(attention_peers, peer)(case, x)
        except peers.UnsupportedCaseError as reason:
            assert peer != "torch_efficient", reason
            return
        with prepared.scope(), Operators() as called:
            grads = prepared.backward()
        assert called.names
        assert called.forwards() == []
        inputs = (x.q, x.k, x.v) if x.bias is None else (x.q, x.k, x.v, x.bias)
        assert [g.shape for g in grads] == [t.shape for t in inputs]
    assert not torch.are_deterministic_algorithms_enabled()


# ---- measuring ------------------------------------------------------------------------------------


def test_rounds_interleave_and_each_begins_with_another_peer():
    order = []
    noted = {name: [peers.Prepared(lambda name=name: order.append(name) or ())] for name in "abc"}
    timings = measure.interleaved(noted, CPU, Settings(rounds=6, slot_ms=1e-9))
    assert {name: len(t.times_ms) for name, t in timings.items()} == dict.fromkeys("abc", 6)
    assert "".join(order[-18:]) == "acbbcacbaabcbaccab"


@pytest.mark.parametrize("count", range(1, 9))
def test_every_peer_follows_each_of_the_others_equally_often(count):
    names = "abcdefgh"[:count]
    rounds = [measure.order(names, turn) for turn in range(2 * count)]
    followed = Counter(pair for order in rounds for pair in itertools.pairwise(order))
    assert followed == dict.fromkeys(itertools.permutations(names, 2), 2)


@pytest.mark.parametrize(("count", "rounds"), [(1, 7), (2, 8), (3, 9), (7, 7), (8, 8), (9, 9)])
def test_rounds_are_enough_for_every_position_in_the_order(count, rounds):
    calls = {name: [peers.Prepared(lambda: ())] for name in "abcdefghi"[:count]}
    timings = measure.interleaved(calls, CPU, Settings(rounds=7, slot_ms=1e-9))
    assert {len(timing.times_ms) for timing in timings.values()} == {rounds}


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_attention_peers_time_no_forward(case):
    x = attention_inputs.make_inputs(case, CPU, 0)
    for peer in contenders.peers_of(case, CPU):
        with contextlib.suppress(peers.UnsupportedCaseError):
            assert forwards_of(peer.prepare(case, x)) == [], peer.name


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("form", ["", "dropout", "output"])
def test_norm_peers_time_no_forward(rms, form):
    case = NormCase("t", 48, 70, "fp32", rms=rms, form=form, compiled=False)
    x = norm_peers.make_inputs(case, CPU, 0)
    for peer in contenders.peers_of(case, CPU, ["torch native", "flashbwd"]):
        with contextlib.suppress(peers.UnsupportedCaseError):
            assert forwards_of(peer.prepare(case, x)) == [], peer.name


def test_backwards_of_decoding_time_no_forward():
    case = cases.DecodingCase("t", 2, 4, 2, 2, 100, 16, dtype="fp32", backward=True, compiled=False)
    x = decoding_peers.make_inputs(case, CPU, 0)
    for peer in contenders.peers_of(case, CPU):
        assert forwards_of(peer.prepare(case, x)) == [], peer.name


def test_calls_rotate_among_input_sets():
    order = []
    sets = [peers.Prepared(lambda n=n: order.append(n) or ()) for n in range(3)]
    # One call per slot, after warm-up and pilot.
    measure.interleaved({"a": sets}, CPU, Settings(rounds=6, slot_ms=1e-9))
    assert order == [0, 0, 1, 2, 0, 1, 2, 0]


def test_input_sets_exceed_the_cache():
    size = measure.cache_bytes(CPU)
    assert input_sets(10 * size, CPU) == 1
    assert input_sets(size, CPU) == 3
    assert input_sets(1, CPU) == 64


def test_the_deterministic_scope_restores_the_previous_mode():
    with attention_peers.deterministic_algorithms():
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


@pytest.mark.gpu
def test_gpu_cases_run_end_to_end_without_wrong_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measure, "GRAPH_BELOW_MS", float("inf"))  # on a busy GPU no call is short
    device = machine.default_device()
    suite = [replace(BASE, causal=True), replace(BASE, dropout_p=0.1), NormCase("t", 512, 64, compiled=False)]
    found = runner.run_suite("all", suite, device, FAST, tmp_path / "r.json", progress=False)
    assert found.complete
    assert found.wrong() == []
    for result in found.results:
        assert any(peer.timed for peer in result.peers.values())
        methods = {name: peer.method for name, peer in result.peers.items() if peer.timed}
        if not result.case.get("dropout_p"):
            assert set(methods.values()) == {"graph"}, methods


@pytest.mark.parametrize(
    "peer", [peer for peer in decoding_peers.DECODING_PEERS if not peer.compiled], ids=lambda peer: peer.name
)
@pytest.mark.parametrize("backward", [False, True])
def test_decoding_peers_are_right(peer, backward):
    case = cases.DecodingCase("t", 2, 4, 2, 2, 100, 16, dtype="fp32", backward=backward, compiled=False)
    found = runner.run_case(case, CPU, FAST, [peer])
    assert found.peers[peer.name].status == results.OK
    assert bool(found.peers[peer.name].errors) == (" with " not in peer.name)


# ---- blocks --------------------------------------------------------------------------------------

BLOCKS = [
    cases.BlockCase("t", "gpt", 2, 40, 32, 4, 4, 64, dtype="fp32"),
    cases.BlockCase("t", "llama", 2, 40, 32, 4, 2, 48, dtype="fp32"),
]


@pytest.mark.parametrize("case", BLOCKS, ids=lambda case: case.name)
def test_block_peers_repeat_the_same_step(case):
    x = block_peers.make_inputs(case, CPU, 0)
    step = block_peers.eager(case, x).backward
    for grads in (step(), step()):
        found = errors.block_errors(x, grads)
        assert len(found) == 1 + len(list(x.block.parameters()))
        assert max(found.values()) < 1e-5


@pytest.mark.parametrize(("asked", "slot_ms"), [(20.0, 1000.0), (1500.0, 1500.0)])
def test_slots_of_blocks_are_long_and_have_no_rests(asked, slot_ms, monkeypatch):
    given = []
    monkeypatch.setattr(measure, "interleaved", lambda ready, device, settings, *_: given.append(settings) or {})
    eager = next(peer for peer in block_peers.BLOCK_PEERS if peer.name == cases.TORCH_BLOCK)
    runner.run_case(BLOCKS[0], CPU, Settings(slot_ms=asked, pause_ms=50.0, sustained_ms=500.0), [eager])
    assert given == [Settings(slot_ms=slot_ms)]


def test_a_report_of_blocks_says_how_long_their_slots_are(tmp_path, monkeypatch):
    for module in (runner, report):
        monkeypatch.setattr(module, "BLOCK_SLOT_MS", 0.5)
    suite = [replace(BLOCKS[0], table="block", compiled=False), TINY]
    for chosen, slots in (
        (suite, "slots of at least 0.1 ms, for blocks 0.5 ms;"),
        (suite[1:], "slots of at least 0.1 ms;"),
    ):
        path = tmp_path / f"{len(chosen)}.json"
        found = runner.run_suite("all", chosen, CPU, FAST, path, only=["torch"], progress=False)
        assert slots in report.markdown(found)


@pytest.mark.parametrize("case", BLOCKS, ids=lambda case: case.name)
def test_flops_of_a_block_are_those_that_pytorch_counts(case):
    x = block_peers.make_inputs(case, CPU, 0)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        block_peers.eager(case, x).backward()
    halves = case.batch * case.seqlen**2 * case.width  # half of the FLOPs of a product over all pairs
    # Plain attention computes six products over all pairs. The case counts seven products over half of the pairs.
    assert counter.get_total_flops() == pytest.approx(case.work + (2 * 6 - 7) * halves)


# ---- host time ------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_host_times_show_which_calls_pytorch_computed(capsys):
    override_time.main(rounds=1)
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][2:]
    handed_on = {row[0].removeprefix("| ") for row in rows if row[4] == "PyTorch's kernel"}
    assert handed_on >= {"the same, dropout", "LayerNorm, fp64", "RMSNorm, fp64"}
    assert len(rows) == 9

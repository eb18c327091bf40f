"""The benchmark suite for several devices: its cases, its results and its report."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flashbwd.__main__ import main
from flashbwd.bench import results, scale, scale_cases, scale_peers
from flashbwd.bench.cases import Bar
from flashbwd.bench.results import OK, CaseResult, PeerResult
from flashbwd.bench.scale_cases import ONE_FLASHBWD, ONE_TORCH, OURS, WITHOUT_EXCHANGE
from flashbwd.bench.suites import suite

if not torch.distributed.is_gloo_available():
    pytest.skip("this PyTorch has no gloo", allow_module_level=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures the GPUs of this machine instead of the CPU")
def test_the_quick_suite_on_the_cpu_writes_right_gradients_and_an_efficiency(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--suite", "scale", "--quick", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    report = results.load(path)
    assert report.complete and report.machine["devices"] == 2
    assert [result.table for result in report.results] == ["scale", "scale", "scale_packed"]
    for result in report.results:
        peers = {name for name, peer in result.peers.items() if peer.status == OK and len(peer.times_ms) == 2}
        one = {ONE_FLASHBWD} if result.table == "scale_packed" else {ONE_FLASHBWD, ONE_TORCH}
        assert peers == one | {OURS, OURS + WITHOUT_EXCHANGE}
        assert max(result.peers[OURS].errors.values()) < 1e-5
    assert "| efficiency |" in path.with_suffix(".md").read_text()
    assert report.results[0].name in capsys.readouterr().out


def timed(ms: float) -> PeerResult:
    return PeerResult(OK, times_ms=[ms, ms, ms], work=1.0)


def test_efficiency_and_exposed_communication_follow_from_the_times() -> None:
    peers = {
        ONE_TORCH: timed(100.0),
        ONE_FLASHBWD: timed(80.0),
        "torch ring": timed(62.5),
        "flashbwd ring": timed(50.0),
        f"flashbwd ring{WITHOUT_EXCHANGE}": timed(45.0),
    }
    table = scale.efficiency_table([CaseResult("a", "scale", "TFLOP/s", 1e-2, {"devices": 2}, peers, [], {})])
    cells = {
        line.split(" | ")[1].strip(): [c.strip(" |") for c in line.split(" | ")[2:]] for line in table.splitlines()[2:]
    }
    assert cells["flashbwd ring"] == ["50", "0.800", "5 (10.0 %)", "-"]
    assert cells["torch ring"] == ["62.5", "0.800", "-", "-"]
    assert cells[ONE_TORCH][1] == "-"
    assert f"flashbwd ring{WITHOUT_EXCHANGE}" not in cells


def test_the_bars_apply_from_64k_tokens_per_device() -> None:
    cases = scale_cases.scale_cases(2, "cuda", quick=False)
    with_bars = [case.seqlen for case in cases if case.bars]
    assert with_bars == [131072, 262144]
    bars = next(case.bars for case in cases if case.bars)
    assert Bar("flashbwd ring", "torch ring", 1.10) in bars
    assert Bar("flashbwd ring", ONE_FLASHBWD, 1.8) in bars


@pytest.mark.parametrize("name", ["scale", "all"])
def test_a_case_that_does_not_exist_is_an_error_that_names_some_that_do(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = scale.chosen_cases(False, [""]) if name == "scale" else suite(name, device)
    assert main(["bench", "--suite", name, "--cases", "no such case", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "--cases is 'no such case'" in said and f'"{cases[0].table}: {cases[0].name}"' in said


@pytest.mark.parametrize("rows", [0, 3, 8, 20])
def test_without_exchange_the_rows_that_arrive_are_copies_of_the_own_rows(rows: int) -> None:
    sent, arriving = torch.arange(1.0, 17.0).view(8, 2), torch.full((rows, 2), torch.nan)
    scale_peers._copy_own_rows(arriving, sent, [rows], [8], async_op=True).wait()
    assert torch.equal(arriving, torch.cat([sent, sent, sent])[:rows])


def test_without_exchange_a_device_that_sends_nothing_gets_zeros() -> None:
    arriving = torch.full((4, 2), torch.nan)
    scale_peers._copy_own_rows(arriving, torch.empty(0, 2), [4], [0])
    assert torch.equal(arriving, torch.zeros(4, 2))

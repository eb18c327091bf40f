"""The fuzzer benchmarks/fuzz.py: its reference agrees with autograd, and it reports wrong gradients and hangs."""

from __future__ import annotations

import json
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import oracle

import flashbwd

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import fuzz
import fuzz_calls
import fuzz_reference

CPU = torch.device("cpu")


def gradients_of(problem: fuzz_reference.Problem) -> Any:
    with flashbwd.use_backend("reference"):
        return flashbwd.attention_backward(**problem.arguments)


def calls(condition: Any, count: int) -> list[fuzz_calls.Call]:
    found = (fuzz_calls.draw(number, "reference") for number in range(10_000))
    small = (call for call in found if sum(call.lengths_q) * sum(call.lengths_k) * call.heads < 2e5 and condition(call))
    return [call for call, _ in zip(small, range(count), strict=False)]


@pytest.mark.parametrize("packed", [False, True])
def test_the_reference_agrees_with_the_autograd_oracle(packed: bool) -> None:
    for call in calls(lambda c: c.packed == packed and not c.dropout and not c.hides_rows, 12):
        # In fp32, because the fuzzer starts from the output and LSE, which are nearly exact then.
        problem = fuzz_reference.build(replace(call, dtype="fp32", bias_float32=True), CPU)
        a = problem.arguments
        names = ["causal", "window_size", "softcap", "attn_bias", "alibi_slopes", "sink", "dlse", "seqused_k"]
        names += ["cu_seqlens_q", "cu_seqlens_k", "key_mask"]
        want = oracle.attention(a["q"], a["k"], a["v"], a["dout"], **{name: a.get(name) for name in names})
        for name in "qkv":
            expected = getattr(want, f"d{name}").reshape(problem.expected[name].shape)
            torch.testing.assert_close(problem.expected[name], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "feature", ["bias", "sink", "softcap", "dlse", "alibi", "dropout", "packed", "seqused_k", "key_mask"]
)
def test_every_feature_is_drawn_and_right_gradients_pass(feature: str) -> None:
    drawn = calls(lambda call: feature in call.features, 4)
    assert len(drawn) == 4
    for call in drawn:
        problem = fuzz_reference.build(replace(call, dtype="fp32"), CPU)
        ratios = fuzz_reference.worst(problem, gradients_of(problem))
        assert all(ratio <= 1.0 for ratio in ratios.values()), (ratios, call.describe())


def plain(rows: int) -> fuzz_calls.Call:
    call = calls(lambda c: c.features == ["causal"] and not c.packed and c.heads == c.heads_kv, 1)[0]
    sizes = {"lengths_q": (rows,), "lengths_k": (rows,), "head_dim": 64, "head_dim_v": 64, "heads": 1, "heads_kv": 1}
    return replace(call, dtype="bf16", causal=True, **sizes)


@pytest.mark.parametrize(("gradient", "block"), [("dq", 64), ("dk", 128), ("dv", 128)])
def test_a_lost_tile_of_a_gradient_is_reported(gradient: str, block: int) -> None:
    """The contribution of one tile of 64 queries and 128 keys is missing, in the last rows of 1408."""
    problem = fuzz_reference.build(plain(1408), CPU)
    call = replace(problem.call, dtype="fp32")
    a = problem.arguments
    s = (a["q"][0, :, 0].double() @ a["k"][0, :, 0].double().mT) * 64**-0.5
    s = s.masked_fill(~fuzz_reference.visible(call, 1408, 1408, CPU), -torch.inf)
    p = torch.exp(s - a["softmax_lse"][0, 0].double()[:, None])
    delta = (a["dout"].double() * a["out"].double()).sum(-1)[0, :, 0]
    ds = p * (a["dout"][0, :, 0].double() @ a["v"][0, :, 0].double().mT - delta[:, None])
    rows, keys = slice(1408 - 64, 1408), slice(640, 768)
    lost = {
        "dq": (rows, 64**-0.5 * ds[rows, keys] @ a["k"][0, keys, 0].double()),
        "dk": (keys, 64**-0.5 * ds[rows, keys].mT @ a["q"][0, rows, 0].double()),
        "dv": (keys, p[rows, keys].mT @ a["dout"][0, rows, 0].double()),
    }
    exact = {name: problem.expected[name[1]].clone() for name in lost}
    where, part = lost[gradient]
    exact[gradient][where, 0] -= part
    grads = flashbwd.AttentionGrads(exact["dq"], exact["dk"], exact["dv"], None, None)
    ratios = fuzz_reference.worst(problem, grads)
    assert {name for name, ratio in ratios.items() if ratio > 1.0} == {gradient}


@pytest.mark.parametrize("packed", [False, True])
def test_outputs_are_full_of_nan_before_a_call(packed: bool) -> None:
    (call,) = calls(lambda c: c.packed == packed, 1)
    arguments = fuzz_reference.build(call, CPU).arguments
    assert all(bool(arguments[name].isnan().all()) for name in ("dq", "dk", "dv"))


def test_nan_is_a_failure() -> None:
    problem = fuzz_reference.build(plain(64), CPU)
    grads = gradients_of(problem)
    grads.dk[0, 3] = torch.nan
    assert fuzz_reference.worst(problem, grads)["dk"] == float("inf")


# ---- the watchdog ---------------------------------------------------------------------------------


def worker(tmp_path: Path, body: str) -> list[str]:
    """A worker. Its arguments are the number of the first call, and "one" if it must make no other call."""
    program = tmp_path / "worker.py"
    program.write_text(
        "import json, sys, time\nnumber, one = int(sys.argv[1]), 'one' in sys.argv\n" + textwrap.dedent(body)
    )
    return [sys.executable, str(program)]


ENDS = """
def say(**message):
    print(json.dumps(message), flush=True)
while True:
    say(number=number, begins=True)
    if number == {bad}:
        {what}
    say(number=number, features=["plain"], worst={{"bf16 dq": 0.5}}, failure="")
    if one:
        break
    number += 1
"""


def watch(command: list[str], calls: int = 50, **changes: Any) -> fuzz.Tally:
    options = {"workers": 1, "patience_s": 2.0, "budget_s": 90.0, "startup_s": 8.0} | changes
    return fuzz.Watchdog(command, calls=calls, **options).run(100)


def test_a_call_that_never_ends_is_reported_and_the_other_calls_run(tmp_path: Path) -> None:
    tally = watch(worker(tmp_path, ENDS.format(bad=120, what="time.sleep(1000)")))
    assert tally.calls >= 50
    assert [failure["number"] for failure in tally.failures] == [120]
    assert "did not end" in tally.failures[0]["failure"]


def test_a_call_that_ends_when_it_runs_alone_counts_as_slow(tmp_path: Path) -> None:
    tally = watch(worker(tmp_path, ENDS.format(bad=120, what="time.sleep(0 if one else 1000)")))
    assert tally.failures == []
    assert tally.slow >= 1  # on a busy machine, other calls may be slow too


def test_a_process_that_dies_is_a_failure_of_its_call(tmp_path: Path) -> None:
    tally = watch(worker(tmp_path, ENDS.format(bad=120, what="sys.exit(7)")))
    assert [failure["number"] for failure in tally.failures] == [120]
    assert "status 7" in tally.failures[0]["failure"]


def test_calls_that_did_not_run_in_time_fail_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        fuzz, "Watchdog", lambda *a: type("None", (), {"run": lambda self, seed: fuzz.Tally(calls=3)})()
    )
    out = tmp_path / "summary.json"
    assert fuzz.main(["--backend", "reference", "--calls", "4", "--out", str(out)]) == 1
    assert fuzz.main(["--backend", "reference", "--calls", "3"]) == 0
    assert json.loads(out.read_text())["calls"] == 3


def test_random_calls_of_the_reference_backend_agree_with_float64(tmp_path: Path) -> None:
    out = tmp_path / "summary.json"
    options = ["--calls", "12", "--workers", "1", "--seed", "7", "--patience-s", "60", "--budget-s", "200"]
    assert fuzz.main(["--backend", "reference", *options, "--out", str(out)]) == 0
    summary = json.loads(out.read_text())
    assert summary["calls"] >= 12
    assert summary["failures"] == []

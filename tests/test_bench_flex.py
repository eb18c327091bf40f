"""The FlexAttention suite: its cases and bars, the masks, and the peers on small cases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flashbwd.bench import contenders, errors, flex_peers, peers, report, results, runner
from flashbwd.bench.attention_inputs import AttentionInputs
from flashbwd.bench.cases import FLEX, FLEX_TUNED, MASKS, OURS_FLEX, PLAIN, RELATIVE_BIAS, TRAINED_BIAS, FlexCase
from flashbwd.bench.flex_cases import FLEX_CASES, visible_pairs
from flashbwd.bench.measure import Settings
from flashbwd.bench.suites import suite

CPU = torch.device("cpu")
FAST = Settings(rounds=5, slot_ms=0.1)
TINY = FlexCase("flex", 2, 40, 4, 2, 16, "causal", documents=3, window=9, dtype="fp32")


def test_the_suite_has_every_row_once() -> None:
    assert suite("flex", "cuda") == FLEX_CASES
    assert len({case.name for case in FLEX_CASES}) == len(FLEX_CASES) == 32
    assert all(case.batch * case.seqlen == 16384 and case.dtype == "bf16" for case in FLEX_CASES)
    assert {(c.heads, c.heads_kv, c.head_dim) for c in FLEX_CASES} == {(16, 16, 128), (32, 32, 64), (32, 8, 128)}
    assert sum(case.tuned for case in FLEX_CASES) == 4
    assert suite("flex", "cpu") == ()


@pytest.mark.parametrize(
    "mask, dim, over, ratio",
    [
        ("causal", 128, PLAIN, 0.95),
        ("window", 64, PLAIN, 0.95),
        ("documents", 128, FLEX, 2.0),
        ("prefix", 128, FLEX, 1.5),
        ("prefix", 64, FLEX, 2.0),
    ],
)
def test_bars_are_those_of_the_mask(mask: str, dim: int, over: str, ratio: float) -> None:
    chosen = [c for c in FLEX_CASES if (c.mask, c.head_dim) == (mask, dim) and "bias" not in c.score]
    assert chosen
    assert {(b.ours, b.over, b.at_least) for case in chosen for b in case.bars} == {(OURS_FLEX, over, ratio)}


def test_a_relative_bias_has_a_bar_over_pytorchs_kernel() -> None:
    bars = [case.bars for case in FLEX_CASES if case.score == RELATIVE_BIAS]
    assert len(bars) == 2
    assert {(b.ours, b.over, b.at_least) for of_case in bars for b in of_case} == {(OURS_FLEX, FLEX, 1.5)}


def test_the_peers_are_pytorch_this_library_and_the_plain_kernel() -> None:
    names = [peer.name for peer in contenders.peers_of(FLEX_CASES[0], torch.device("cuda"))]
    assert names == [FLEX, FLEX_TUNED, OURS_FLEX, f"{OURS_FLEX} deterministic", PLAIN]


@pytest.mark.parametrize("mask", MASKS)
def test_visible_pairs_are_counted_one_by_one(mask: str) -> None:
    case = replace(TINY, mask=mask)
    assert case.pairs == 2 * int(visible_pairs(case, CPU).sum())
    assert case.work == 10 * 4 * case.pairs * 16


def test_every_mask_of_the_suite_has_the_number_of_pairs_that_its_lengths_say() -> None:
    for case in {(c.mask, c.seqlen): c for c in FLEX_CASES if c.seqlen == 2048}.values():
        assert case.pairs == case.batch * int(visible_pairs(case, CPU).sum())
        assert sum(case.lengths) == case.seqlen and min(case.lengths) > 0


@pytest.mark.parametrize(
    "mask, score",
    [
        *((mask, "") for mask in MASKS),
        *(("causal", score) for score in ("softcap", "ALiBi", RELATIVE_BIAS, TRAINED_BIAS)),
    ],
)
def test_the_oracle_agrees_with_the_reference(mask: str, score: str) -> None:
    case = replace(TINY, mask=mask, score=score)
    found = runner.run_case(case, CPU, FAST, [peers.Peer("flashbwd", flex_peers.ours(reference=True))], sets=1)
    peer = found.peers["flashbwd"]
    assert peer.status == results.OK, peer.reason
    assert set(peer.errors) == {"dq", "dk", "dv"} and max(peer.errors.values()) < 1e-5
    assert peer.first_ms is not None and peer.first_ms > 0
    assert "first call ms" in report.details([found])


def test_a_case_without_a_kernel_is_unsupported_and_a_wrong_gradient_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    reference = errors.attention_reference

    def counted(*arguments: Any, **options: Any) -> errors.AttentionReference:
        computed.append(1)
        return reference(*arguments, **options)

    monkeypatch.setattr(errors, "attention_reference", counted)

    def spoilt(case: FlexCase, x: AttentionInputs) -> peers.Prepared:
        prepared: Any = flex_peers.ours(reference=True)(case, x)
        dq, dk, dv = prepared.backward()
        dk[-1, -1, -1] += 1
        return peers.Prepared(lambda: (dq, dk, dv))

    chosen = [peers.Peer("flashbwd flex", flex_peers.ours()), peers.Peer("a", spoilt), peers.Peer("b", spoilt)]
    found = runner.run_case(TINY, CPU, FAST, chosen, sets=1).peers
    assert found["flashbwd flex"].status == results.UNSUPPORTED
    assert "query is on the CPU" in found["flashbwd flex"].reason
    assert found["a"].status == found["b"].status == results.WRONG and "dk" in found["a"].reason
    assert len(computed) == 1


@pytest.mark.parametrize(
    ("message", "status"),
    [("No valid triton configs. out of resource", results.UNSUPPORTED), ("out of memory", results.FAILED)],
)
def test_a_case_in_which_pytorchs_kernel_does_not_start_is_unsupported(
    message: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(*_: Any, **__: Any) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(flex_peers.flashbwd, "flex_attention", forward)
    chosen = [peers.Peer("flashbwd flex", flex_peers.ours(reference=True))]
    found = runner.run_case(TINY, CPU, FAST, chosen, sets=1).peers["flashbwd flex"]
    assert found.status == status and message in found.reason

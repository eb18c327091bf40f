"""Random FlexAttention calls of benchmarks/fuzz.py: what is drawn, the oracle, and which errors are reported."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flashbwd import _attention_arguments
from flashbwd.mods.captures import Captures, Slots
from flashbwd.mods.derivative import emit_score_gradient
from flashbwd.mods.trace import trace

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import fuzz
import fuzz_flex_calls
import fuzz_flex_mods
import fuzz_flex_reference as flex
from fuzz_flex_calls import MASKS, MODS, SCORES, Call, draw

CPU = torch.device("cpu")
OTHERS = [
    "captured gradients",
    "grouped heads",
    "lists by batch or head",
    "unequal blocks",
    "poisoned",
    "broadcast",
    "dlse",
]
OTHERS += ["only dlse", "deterministic", "beside calls", "beside products", "without bits"]
FEATURES = [f"mask {name}" for name in MASKS] + [f"score {name}" for name in dict.fromkeys(SCORES)] + OTHERS


def trained(call: Call) -> list[fuzz_flex_mods.Table]:
    mod = flex.score_mod_of(call)
    return [] if mod is None else [table for table in mod.tables if table.trained]


def calls(condition: Callable[[Call], bool], count: int) -> list[Call]:
    """Small calls that use only a few score_mods."""
    found = []
    for number in range(0, 200_000, 7):
        call = draw(number, "flex_reference")
        small = call.batch * call.heads * call.length_q * call.length_k < 1e5 and call.mod < 40
        if small and condition(call):
            found.append(call)
            if len(found) == count:
                break
    return found


def ratios(problem: flex.Problem) -> dict[str, float]:
    return flex.worst(problem, flex.gradients(problem, "flex_reference"))


def test_a_call_is_drawn_from_its_number() -> None:
    for number in range(20):
        first, second = (flex.build(draw(number, "flex_reference"), CPU) for _ in range(2))
        assert first.call == second.call
        for name in ("query", "out", "lse"):
            assert torch.equal(first.arguments[name].nan_to_num(), second.arguments[name].nan_to_num())


def test_every_feature_is_drawn() -> None:
    drawn = [draw(number, "flex") for number in range(1000)]
    assert {feature for call in drawn for feature in call.features} == set(FEATURES)
    assert {call.pairs for call in drawn} == set(fuzz_flex_calls.PAIRS)
    ordered = [call for call in drawn if call.trains and call.deterministic]  # kernels compute these for one kind alone
    assert ordered and all((call.score, call.mask) == ("pair", "none") for call in ordered)


def tile_of(call: Call) -> int:
    return next(tile for tile in fuzz_flex_calls.HEAD_DIMS if max(call.head_dim, call.head_dim_v) <= tile)


def test_every_tile_is_drawn_with_equal_and_unequal_head_dimensions() -> None:
    drawn = [draw(number, "flex") for number in range(0, 3000, 5)]
    found = {(tile_of(call), (call.head_dim > call.head_dim_v) - (call.head_dim < call.head_dim_v)) for call in drawn}
    assert found == {(tile, order) for tile in fuzz_flex_calls.HEAD_DIMS for order in (-1, 0, 1)}


def test_consecutive_calls_share_the_compiled_kernel() -> None:
    for first in range(0, 10 * fuzz_flex_calls.SAME_KERNEL, fuzz_flex_calls.SAME_KERNEL):
        same = [draw(first + i, "flex") for i in range(fuzz_flex_calls.SAME_KERNEL)]
        assert len({(call.mod, call.dtype, tile_of(call)) for call in same}) == 1


@pytest.mark.parametrize("feature", FEATURES)
def test_right_gradients_pass(feature: str) -> None:
    drawn = calls(lambda call: feature in call.features, 4)
    assert len(drawn) == 4
    for i, call in enumerate(drawn):
        found = ratios(flex.build(call if i % 2 else replace(call, dtype="fp32"), CPU))
        assert all(ratio <= 1.0 for ratio in found.values()), (found, call.describe())


# ---- the oracle -----------------------------------------------------------------------------------


def by_autograd(problem: flex.Problem, visible: Tensor) -> dict[str, Tensor]:
    """Gradients by autograd of the whole forward in float64."""
    a, call = problem.arguments, problem.call
    x = {name: a[name].double().requires_grad_() for name in ("query", "key", "value")}
    k, v = (x[name].repeat_interleave(call.heads // call.heads_kv, 1) for name in ("key", "value"))
    s = x["query"] @ k.mT * (call.head_dim**-0.5 if call.scale is None else call.scale)
    index = torch.meshgrid(*(torch.arange(n) for n in s.shape), indexing="ij")
    mod = flex.score_mod_of(call)
    tables = {} if mod is None else {table.name: a["score_mod"].__globals__[table.name] for table in mod.tables}
    tables = {name: t.detach().double() if t.is_floating_point() else t for name, t in tables.items()}
    leaves = {table.name: tables[table.name].requires_grad_() for table in trained(call)}
    t = s if mod is None else mod.function(tables)(s, *index)
    t = t.masked_fill(~visible, -1e30)  # -inf would give NaN in a row without keys
    seen = visible.any(-1)
    p = (torch.softmax(t, -1) * visible) * seen[..., None]
    total = ((p @ v) * a["dout"].double()).sum()
    if a["dlse"] is not None:
        total = total + (torch.logsumexp(t, -1) * seen * a["dlse"].double()).sum()
    found = torch.autograd.grad(total, [*x.values(), *leaves.values()], materialize_grads=True)
    return dict(zip(("dq", "dk", "dv", *leaves), found, strict=True))


@pytest.mark.parametrize("score", dict.fromkeys(SCORES))
def test_the_oracle_agrees_with_autograd_of_the_forward(score: str) -> None:
    def hides_nothing(call: Call) -> bool:  # a score of -inf would make the gradient of the forward NaN
        mod = flex.score_mod_of(call)
        return mod is None or "inf" not in mod.text

    for call in calls(lambda c: c.score == score and not c.poisoned and c.dout and hides_nothing(c), 5):
        # In fp32, because the oracle starts from the output and LSE, which are nearly exact then.
        problem = flex.build(replace(call, dtype="fp32"), CPU)
        want = by_autograd(problem, flex.mask_of(call, CPU).visible)
        assert set(want) == set(problem.expected)
        for name, expected in want.items():
            torch.testing.assert_close(problem.expected[name], expected.double(), rtol=2e-4, atol=2e-4)


def test_rows_of_unlisted_blocks_are_nan_before_a_call() -> None:
    poisoned = 0
    for call in calls(lambda c: c.poisoned and c.mask == "nothing", 4):
        problem = flex.build(call, CPU)
        assert all(bool(problem.arguments[name].isnan().all()) for name in ("query", "key", "value", "out"))
    for call in calls(lambda c: c.poisoned and c.mask == "one block", 24):
        problem = flex.build(call, CPU)
        visible = flex.mask_of(call, CPU).visible
        hidden = problem.arguments["query"].isnan().any(-1)
        assert not (hidden & visible.any(-1)).any()
        poisoned += int(hidden.any())
    assert poisoned


# ---- wrong gradients ------------------------------------------------------------------------------


def planted(call: Call, change: Callable[[dict[str, Tensor]], Any]) -> set[str]:
    """The gradients that are reported after a change of exact ones."""
    problem = flex.build(call, CPU)
    grads = {name: gradient.clone() for name, gradient in problem.expected.items()}
    change(grads)
    names = ("dq", "dk", "dv")
    given = [grads.pop(name).to(fuzz_flex_mods.DTYPES[call.dtype]) for name in names]
    result = type("Gradients", (), {**dict(zip(names, given, strict=True)), "captured": grads})
    return {name for name, ratio in flex.worst(problem, result).items() if ratio > 1.0}


def one_of(condition: Callable[[Call], bool]) -> Call:
    def is_ordinary(call: Call) -> bool:
        return call.mask == "causal" and call.length_q >= 100 and call.length_k >= 100 and condition(call)

    return calls(is_ordinary, 1)[0]


def test_a_scaled_gradient_is_reported() -> None:
    for dtype in ("bf16", "fp16"):
        call = one_of(lambda c: c.score == "none" and c.dtype == dtype)  # noqa: B023
        assert planted(call, lambda grads: None) == set()
        assert planted(call, lambda grads: grads["dk"].mul_(1.25)) == {"dk"}


def test_a_lost_block_of_keys_is_reported() -> None:
    call = one_of(lambda c: c.score == "generated")
    assert planted(call, lambda grads: grads["dv"][:, :, :64].zero_()) == {"dv"}


@pytest.mark.parametrize("score", ["alibi", "pair", "generated"])
def test_a_wrong_gradient_of_a_captured_tensor_is_reported(score: str) -> None:
    call = one_of(lambda c: c.score == score and c.trains)
    name = trained(call)[0].name
    assert planted(call, lambda grads: None) == set()
    assert planted(call, lambda grads: grads[name].zero_()) == {"captured"}
    assert planted(call, lambda grads: grads[name].mul_(1.02)) == {"captured"}
    assert planted(call, lambda grads: grads.pop(name)) == {"captured"}


def test_nan_is_a_failure() -> None:
    call = one_of(lambda c: c.score == "softcap")
    assert planted(call, lambda grads: grads["dq"][0, 0, 3].fill_(torch.nan)) == {"dq"}


# ---- generated score_mods -------------------------------------------------------------------------


@pytest.mark.parametrize("first", range(0, MODS, 25))
def test_every_generated_score_mod_can_be_written_as_cuda(first: int) -> None:
    sizes = {"b": 2, "h": 4, "i": 30, "j": 40}
    for number in range(first, first + 25):
        mod = fuzz_flex_mods.generated(number)
        tensors = {table.name: table.values(sizes, torch.Generator(), CPU) for table in mod.tables}
        differentiable = [tensors[table.name] for table in mod.tables if table.trained]
        assert bool(differentiable) == (number % 2 == 0)
        function = mod.function(tensors)
        captures = Captures(function)
        assert captures.key is not None, mod.text  # it is traced once
        traced = trace("score_mod", function, True)
        slots = emit_score_gradient(traced, None, Slots(captures, "cpu"), differentiable).slots
        assert sorted(slots) == list(range(len(differentiable))), mod.text


def test_generated_score_mods_differ_and_use_most_operators() -> None:
    mods = [fuzz_flex_mods.generated(number) for number in range(MODS)]
    assert len({mod.text for mod in mods}) > 0.9 * MODS
    assert {table.dtype for mod in mods for table in mod.tables} == set(fuzz_flex_mods.DTYPES)
    words = [template.split("(")[1 if template[0] == "(" else 0] for template in fuzz_flex_mods.UNARY]
    unused = {word for word in words if not any(word in mod.text for mod in mods)}
    assert len(unused) < len(words) / 4, unused


def test_random_calls_run_under_the_watchdog(tmp_path: Path) -> None:
    out = tmp_path / "summary.json"
    options = ["--calls", "6", "--workers", "1", "--seed", "16", "--patience-s", "60", "--budget-s", "200"]
    assert fuzz.main(["--backend", "flex_reference", *options, "--out", str(out)]) == 0
    summary = json.loads(out.read_text())
    assert summary["calls"] >= 6
    assert any(name.startswith("mask ") for name in summary["features"])


def test_calls_of_sm80_have_its_dtypes_and_head_dimensions() -> None:
    drawn = [draw(number, "flex_sm80") for number in range(0, 4000, 3)]
    assert {call.dtype for call in drawn} == {"bf16", "fp16", "fp32"}
    largest = {max(call.head_dim, call.head_dim_v) for call in drawn}
    assert max(largest) == 256 and any(128 < n <= 192 for n in largest) and any(n % 8 for n in largest)


@pytest.mark.parametrize(("backend", "forced"), [("flex", "sm90"), ("flex_sm80", "sm80")])
def test_a_process_asks_for_the_kernels_of_its_backend(backend: str, forced: str) -> None:
    problem = flex.build(draw(0, "flex_reference"), CPU)
    try:
        assert flex.refusal(problem, backend) == "query is on the CPU"
        gc.collect()
        assert _attention_arguments.backend() == forced
    finally:
        flex._forced.close()
    assert _attention_arguments.backend() == "auto"

"""Each kernel family accepts and refuses the calls that the support matrix declares. The plans need no GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from kit import cases, inputs, support_matrix
from kit.cases import Case
from kit.host import device_info, load_host, planned_for
from support import as_declared, refusal_of, with_rng_state
from test_attention_tiles import HEAD_DIMS, LONG_SHAPES, SHAPES
from test_sanitizer import ATTENTION

GPUS: dict[str, dict[str, Any]] = {
    "A100": {"cc_major": 8, "cc_minor": 0, "sm_count": 108, "smem_per_block": 163 * 1024},
    "H100": {"cc_major": 9, "cc_minor": 0, "sm_count": 132, "smem_per_block": 227 * 1024},
    "L40": {"cc_major": 8, "cc_minor": 9, "sm_count": 142, "smem_per_block": 99 * 1024},
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
FEATURES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "top_left": {"causal": "top_left"},
    "window": {"window_size": (40, 20)},
    "softcap": {"softcap": 2.0},
    "bias": {"bias": "bhqk"},
    "shared_bias": {"bias": "11qk"},
    "bias_of_keys": {"bias": "1h1k"},
    "key_mask": {"key_mask": "random"},
    "alibi": {"alibi": "heads"},
    "sink": {"sink": "finite"},
    "dlse": {"dlse": True},
    "flash_dropout": {"dropout_p": 0.1},
    "efficient_dropout": {"dropout_p": 0.1, "rng_layout": "efficient64"},
    "groups": {"heads": 4},
    "used": {"seqused_q": (70, 0), "seqused_k": (100, 3)},
    "packed": {"seqlens_q": (70, 0, 5), "seqlens_k": (100, 3, 5)},
    "deterministic": {"deterministic": True},
}
SHAPED = [
    dataclasses.replace(shape, name=f"{shape}_{d}x{dv}", head_dim=d, head_dim_v=dv)
    for shape in SHAPES + LONG_SHAPES
    for d, dv in HEAD_DIMS
]


def assert_as_declared(case: Case, dtype: torch.dtype) -> None:
    arguments = with_rng_state(case, inputs.arguments_to_plan(case, dtype))
    for gpu in GPUS.values():
        info = device_info(
            load_host(), usable=True, has_attention_short=True, has_attention_sm80=True, has_attention_sm90=True, **gpu
        )
        with planned_for(info):
            for backend in ("auto", "reference", "short", "sm80", "sm90"):
                capability = (gpu["cc_major"], gpu["cc_minor"])
                expected = support_matrix.declared_refusals(arguments, backend, capability)
                as_declared(refusal_of(arguments, backend), expected, backend)


@pytest.mark.parametrize("case", [*cases.CASES, *ATTENTION, *SHAPED], ids=str)
def test_named_cases_run_and_are_refused_as_declared(case: Case) -> None:
    for dtype in DTYPES:
        assert_as_declared(case, dtype)


@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256, 320, 520])
@pytest.mark.parametrize("feature", FEATURES)
def test_pairs_of_features_run_and_are_refused_as_declared(feature: str, head_dim: int) -> None:
    lengths = (40, 60) if head_dim == 80 else (70, 100)  # the short tile of 80 and 64 rows is near a limit of 99 KB
    plain = Case("pair", seqlen_q=lengths[0], seqlen_k=lengths[1], head_dim=head_dim, head_dim_v=head_dim)
    names = list(FEATURES)
    for other in names[names.index(feature) :]:
        if {feature, other} == {"key_mask", "packed"}:
            continue  # an invalid call
        changes = FEATURES[feature] | FEATURES[other]
        if {feature, other} == {"used", "packed"}:
            changes |= {"seqused_q": (70, 0, 1), "seqused_k": (60, 3, 5)}
        for dtype in DTYPES[:3]:
            assert_as_declared(dataclasses.replace(plain, **changes), dtype)


@given(case=cases.any_case(max_head_dim=300))
def test_random_cases_run_and_are_refused_as_declared(case: Case) -> None:
    assert_as_declared(case, torch.bfloat16)


@pytest.mark.parametrize(
    ("reason", "expected", "message"),
    [
        ("it takes no softcap", [], "sm90 refuses what the support matrix says it runs"),
        ("it takes no softcap", ["it holds no tile"], "or for another reason: it takes no softcap"),
        (None, ["it holds no tile"], "sm90 runs what the support matrix says it refuses: it holds no tile"),
    ],
)
def test_a_difference_from_the_matrix_is_a_failure(reason: str | None, expected: list[str], message: str) -> None:
    with pytest.raises(pytest.fail.Exception, match=message):
        as_declared(reason, expected, "sm90")
    assert as_declared("it holds no tile for 9", ["it holds no tile"], "sm90") == "it holds no tile for 9"
    assert as_declared(None, [], "sm90") is None


def test_every_family_that_must_run_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = inputs.arguments_to_plan(Case("plain"), torch.bfloat16)
    assert support_matrix.declared_refusals(arguments, "sm90", (9, 0)) == []
    monkeypatch.setenv("FLASHBWD_FAMILIES", "attention_sm80,layer_norm")
    assert support_matrix.declared_refusals(arguments, "sm90", (9, 0)) == [support_matrix.NOT_BUILT]
    assert support_matrix.declared_refusals(arguments, "sm80", (9, 0)) == []

"""Gradients of the reference backend agree with the oracle with bf16 products and with fp32 products, on any CPU."""

from __future__ import annotations

import pytest
import torch
from kit import cases, inputs
from support import run

from flashbwd.reference import blocks, operands

CASES = [
    case
    for case in cases.with_prefix(
        *("heads_", "mask_40x70_True", "softmax_scale", "softcap", "alibi", "sink", "dlse", "bias_1", "bias_softcap"),
        *(
            "empty_rows",
            "bias_one_sign_b",
            "bias_one_sign_rows",
            "dropout_flash_bias_softcap",
            "dropout_efficient64_small",
            "varlen_",
            "dense_seqused",
        ),
    )
    if case.bias_floor != cases.LEAST
]


@pytest.fixture(params=[True, False], ids=["bf16_products", "fp32_products"])
def bfloat16_products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether PyTorch reports bf16 instructions. It can multiply bf16 matrices on every CPU, but slowly on some."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: request.param)
    return bool(request.param)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each tile, whether its products had bf16 operands."""
    found: list[bool] = []
    add_products = operands.Tile.add_products

    def recorded(tile: operands.Tile, *arguments: object) -> None:
        found.append(tile.p_factor.dtype == tile.ds_factor.dtype == torch.bfloat16)
        add_products(tile, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(operands.Tile, "add_products", recorded)
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_obey_the_tolerance_rule_with_products_of_either_dtype(
    case: cases.Case, bfloat16_products: bool
) -> None:
    x = inputs.build(case, torch.bfloat16)
    x.check(*run(x, "reference"))


@pytest.mark.parametrize("name", ["heads_6to2", "softcap", "dropout_flash_small", "varlen_many"])
def test_gradients_obey_the_tolerance_rule_with_products_of_either_dtype_in_many_tiles(
    name: str, bfloat16_products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tile in ("_CPU_TILE", "_CPU_SHARED_TILE"):
        monkeypatch.setattr(blocks, tile, blocks.TileSize(8, 16, 2 * 8 * 16, 1000))
    x = inputs.build(cases.BY_NAME[name], torch.bfloat16)
    x.check(*run(x, "reference"))


def test_products_have_bf16_operands_if_the_cpu_has_bf16_instructions(
    bfloat16_products: bool, taken: list[bool]
) -> None:
    run(inputs.build(cases.BY_NAME["heads_4to2"], torch.bfloat16), "reference")
    assert set(taken) == {bfloat16_products}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_products_of_other_dtypes_are_never_rounded_to_bfloat16(
    dtype: torch.dtype, taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    run(inputs.build(cases.BY_NAME["heads_4to2"], dtype), "reference")
    assert set(taken) == {False}


@pytest.mark.parametrize("wide", ["dq", "dk", "dv"])
def test_products_for_a_gradient_in_fp32_are_not_rounded_to_bfloat16(
    wide: str, taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    x = inputs.build(cases.BY_NAME["heads_4to2"], torch.bfloat16)
    given = torch.full_like(x.arguments[wide[1]], torch.nan, dtype=torch.float32)
    x.check(*run(x, "reference", **{wide: given}))
    assert set(taken) == {False}

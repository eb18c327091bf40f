"""Sums of indices, captured integers and a constant: their arithmetic, and whether they can wrap around."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashbwd.mods.values import FAR, Captured, Score, Sum

LENGTH, OTHER = torch.tensor(11, dtype=torch.int32), torch.tensor(7, dtype=torch.int32)
WIDE = torch.tensor(11)  # int64
ONE, TWO = Captured(LENGTH, ""), Captured(OTHER, "")


def test_adding_sums_adds_their_weights() -> None:
    found = Sum(1, 2, 3, 4, 5, ((ONE, 1),)) + Sum(10, 20, 30, 40, 50, ((ONE, 2), (TWO, 3)), bits=64)
    assert found == Sum(11, 22, 33, 44, 55, ((ONE, 3), (TWO, 3)), bits=64)


def test_multiplying_a_sum_multiplies_every_weight() -> None:
    assert Sum(1, 2, 3, 4, 5, ((ONE, 6),), bits=64) * -2 == Sum(-2, -4, -6, -8, -10, ((ONE, -12),), bits=64)


def test_terms_that_cancel_are_removed() -> None:
    assert (Sum(terms=((ONE, 2),)) + Sum(terms=((ONE, -2),))).terms == ()
    assert (Sum(k=1, terms=((ONE, 2),)) * 0) == Sum()


def test_captured_elements_are_equal_by_tensor_and_index() -> None:
    same = Captured(LENGTH, "")
    assert same == ONE
    assert hash(same) == hash(ONE)
    assert Captured(LENGTH, "b") != ONE
    assert Captured(LENGTH.clone(), "") != ONE


@pytest.mark.parametrize(
    ("total", "exact"),
    [
        (Sum(k=1), True),
        (Sum(k=1, q=-1, constant=100), True),
        (Sum(k=1, q=1, h=1), True),  # 3 * 2**29 < 2**31
        (Sum(k=-1, q=1, h=1, b=1), False),
        (Sum(k=4), False),
        (Sum(b=-4), False),
        (Sum(h=4), False),
        (Sum(q=-4), False),
        (Sum(k=4, bits=64), True),
        (Sum(k=3, constant=FAR - 1), True),
        (Sum(k=3, constant=FAR), False),
        (Sum(k=3, constant=-FAR), False),
        (Sum(terms=((ONE, 1),)), True),
        (Sum(terms=((ONE, 1),), bits=64), True),
        (Sum(terms=((Captured(WIDE, ""), 1),), bits=64), True),
        (Sum(terms=((Captured(WIDE, ""), 1),), bits=32), False),
        (Sum(terms=((ONE, 2),)), False),
        (Sum(terms=((ONE, -1),)), False),
        (Sum(k=1, terms=((ONE, 1),)), False),
        (Sum(constant=1, terms=((ONE, 1),)), False),
        (Sum(terms=((ONE, 1), (TWO, 1))), False),
    ],
)
def test_a_sum_is_exact_if_it_cannot_wrap_around(total: Sum, exact: bool) -> None:
    assert total.is_exact is exact


@pytest.mark.parametrize(
    ("total", "names"),
    [(Sum(b=1), "b"), (Sum(h=1), "h"), (Sum(h=1, bits=64), "h"), (Sum(h=2), ""), (Sum(b=1, h=1), ""), (Sum(k=1), "")],
)
def test_a_sum_of_a_single_index_is_that_index(total: Sum, names: str) -> None:
    assert "".join(name for name in "bh" if total.is_index(name)) == names


@pytest.mark.parametrize("change", [{}, {"softcap": 2.0}, {"stage": "tanh"}])
def test_a_score_is_untouched_before_any_change(change: dict[str, Any]) -> None:
    assert Score(**change).untouched is (change == {})

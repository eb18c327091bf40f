"""Host simulations of the sm90 kernels for head dimensions 257 to 512: no order of arrival makes a role wait forever,
read a buffer too early, or find it overwritten."""

from __future__ import annotations

import random

import pytest
from kit.barriers import run
from kit.head_dim_512 import Faults, QueryGradientsCta, key_gradients_ctas

SEEDS = range(60)
NO_FAULTS = Faults()
ATOMS = {320: (5, 5, 0), 384: (6, 6, 0), 512: (8, 2, 2)}  # of a tile of v, its slots, and those of them in dout


def key_gradients_end(iterations: int, seed: int, faults: Faults = NO_FAULTS) -> bool:
    rng = random.Random(seed)
    ctas = key_gradients_ctas(iterations, rng, faults)
    ended = run([role for cta in ctas for role in cta.roles()], rng)
    expected = [(half, index) for half in (0, 1) for index in range(iterations)]
    return ended and all(sorted(cta.results) == expected for cta in ctas)


def query_gradients_end(iterations: int, head_dim: int, seed: int, faults: Faults = NO_FAULTS) -> bool:
    rng = random.Random(seed)
    cta = QueryGradientsCta(iterations, *ATOMS[head_dim], rng, faults)
    ended = run(cta.roles(), rng)
    return ended and sorted(cta.results) == [(half, index) for half in (0, 1) for index in range(iterations)]


@pytest.mark.parametrize("iterations", [0, 1, 2, 3, 4, 5, 8, 13])
def test_cluster_of_dk_and_dv_ends_in_any_order(iterations: int) -> None:
    assert all(key_gradients_end(iterations, seed) for seed in SEEDS)


@pytest.mark.parametrize("head_dim", ATOMS)
@pytest.mark.parametrize("iterations", [0, 1, 2, 3, 8])
def test_cta_of_dq_ends_in_any_order(iterations: int, head_dim: int) -> None:
    assert all(query_gradients_end(iterations, head_dim, seed) for seed in SEEDS)


@pytest.mark.parametrize("fault", ["releases_early", "skips_full", "sends_at_once"])
def test_planted_fault_in_the_cluster_is_found(fault: str) -> None:
    def fails(seed: int) -> bool:
        try:
            return not key_gradients_end(8, seed, Faults(**{fault: True}))
        except AssertionError:
            return True

    assert any(fails(seed) for seed in range(300))


@pytest.mark.parametrize("fault", ["keys_by_scores", "dout_is_empty"])
def test_planted_fault_in_the_cta_of_dq_is_found(fault: str) -> None:
    with pytest.raises(AssertionError, match="holds"):
        for seed in range(300):
            query_gradients_end(8, 512, seed, Faults(**{fault: True}))

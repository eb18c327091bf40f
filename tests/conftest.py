"""Markers, hypothesis profiles, thread limits, and the devices and backends that a test runs on."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci", max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# Workers of pytest-xdist share the cores; the library is what is tested, not torch's thread pool.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

HAS_CUDA = torch.cuda.is_available()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_CUDA:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


# (device, backend): the reference everywhere, each kernel family on a GPU. A family refuses, with its reason, what it
# does not take; `on_backend` turns that into the family's absence from the test.
BACKENDS = [
    pytest.param("cpu", "reference", id="cpu-reference"),
    pytest.param("cuda", "reference", id="cuda-reference", marks=pytest.mark.gpu),
    pytest.param("cuda", "sm80", id="cuda-sm80", marks=pytest.mark.gpu),
    pytest.param("cuda", "sm90", id="cuda-sm90", marks=pytest.mark.gpu),
]


@pytest.fixture(params=BACKENDS)
def target(request: pytest.FixtureRequest) -> tuple[str, str]:
    """(device, backend)."""
    return request.param


@pytest.fixture(autouse=True)
def _no_deterministic_mode_left_behind() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    yield
    assert torch.are_deterministic_algorithms_enabled() == before, "the test left deterministic algorithms switched"

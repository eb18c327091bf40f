"""The library's host arithmetic, compiled for the tests."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

BUILT = Path(__file__).resolve().parent.parent / "_built"
NAME = "flashbwd_host_tests"


@lru_cache(maxsize=1)
def load_host() -> ModuleType:
    """Import ``flashbwd_host_tests`` from ``tests/_built``.

    Raises
    ------
    ImportError
        When it has not been built for this Python, naming the command that builds it.
    """
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = BUILT / (NAME + suffix)
        if path.exists():
            spec = importlib.util.spec_from_file_location(NAME, path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    raise ImportError(f"{NAME} is not in {BUILT}; build it with: python setup.py build_test_modules")


def dense_problem(host: ModuleType, **changes: Any) -> Any:
    """A dense bfloat16 problem of two batches and grouped heads, with changes to its fields."""
    values = {
        "dtype": host.DType.kBFloat16,
        "batch": 2,
        "heads": 6,
        "heads_kv": 3,
        "head_dim": 128,
        "head_dim_v": 128,
        "seqlen_q": 300,
        "seqlen_k": 500,
        **changes,
    }
    values.setdefault("total_q", values["batch"] * values["seqlen_q"])
    values.setdefault("total_k", values["batch"] * values["seqlen_k"])
    return _with(host.AttentionProblem(), values)


def device_info(host: ModuleType, **values: Any) -> Any:
    """A GPU that need not be there."""
    return _with(host.DeviceInfo(), values)


def _with(target: Any, values: dict[str, Any]) -> Any:
    for name, value in values.items():
        setattr(target, name, value)
    return target

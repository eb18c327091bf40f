"""The library's host arithmetic, compiled for the tests."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from functools import lru_cache
from pathlib import Path
from types import ModuleType

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

"""PEP 517 backend: setuptools, plus the build requirements of the build that was asked for.

`FLASHBWD_CUDA=0` needs no CUDA compiler, and a machine with a usable CUDA toolkit or its own CUTLASS needs no copy
of them, so the list cannot stand in pyproject.toml.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (  # noqa: F401
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

from build_tools import toolchain

_REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements"


def _read(name: str) -> list[str]:
    lines = (line.split("#")[0].strip() for line in (_REQUIREMENTS / name).read_text().splitlines())
    return [line for line in lines if line]


def _requirements() -> list[str]:
    requirements = _read("build.txt")
    if not toolchain.cuda_wanted():
        return requirements
    cuda = _read("cuda.txt")
    pinned = next(re.findall(r"==(\d+\.\d+)", line)[0] for line in cuda if line.startswith("nvidia-cuda-nvcc"))
    if toolchain.find_cuda_toolkit(pinned)[0] is not None:
        cuda = [line for line in cuda if not line.startswith(("nvidia-cuda-", "nvidia-nvvm"))]
    if os.environ.get("FLASHBWD_CUTLASS_PATH"):
        cuda = [line for line in cuda if not line.startswith("nvidia-cutlass")]
    return requirements + cuda


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return build_meta.get_requires_for_build_wheel(config_settings) + _requirements()


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return build_meta.get_requires_for_build_editable(config_settings) + _requirements()

"""The pip requirements of a build, which depend on what is built and on what is already installed.

This module uses only the standard library.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from build_tools.toolchain import (
    BuildError,
    Torch,
    cuda_wanted,
    cutlass_is_used,
    find_cuda_toolkit,
    find_torch,
    local_cutlass,
)

_FOLDER = Path(__file__).resolve().parent.parent / "requirements"
_COMPILER = ("nvidia-cuda-", "nvidia-nvvm")


def _read(name: str) -> list[str]:
    lines = (line.split("#")[0].strip() for line in (_FOLDER / name).read_text().splitlines())
    return [line for line in lines if line]


def build_requirements(torch: Torch | None = None) -> list[str]:
    """The requirements of a build with the installed `torch`; with None, torch itself is one of them."""
    requirements = _read("build.txt")
    if cuda_wanted() and not (torch and torch.cuda is None):
        cuda = _read("cuda.txt")
        pinned = next(re.findall(r"==(\d+\.\d+)", line)[0] for line in cuda if line.startswith("nvidia-cuda-nvcc"))
        if find_cuda_toolkit(torch.cuda if torch and torch.cuda else pinned)[0] is not None:
            cuda = [line for line in cuda if not line.startswith(_COMPILER)]
        if local_cutlass() or not cutlass_is_used():
            cuda = [line for line in cuda if not line.startswith("nvidia-cutlass")]
        requirements += cuda
    return [line for line in requirements if not (torch and line.startswith("torch"))]


def environment_requirements(torch: Torch | None = None) -> list[str]:
    """The same for `.venv`: without a torch, dev.py installs the one that cuda.txt names, with kernels or not."""
    tested = [] if torch else [line for line in _read("cuda.txt") if line.startswith("torch")]
    return list(dict.fromkeys([*build_requirements(torch), *tested]))


if __name__ == "__main__":
    try:
        installed: Torch | None = find_torch()
    except BuildError:
        installed = None
    print("\n".join(environment_requirements(installed)))

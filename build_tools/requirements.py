"""The pip requirements of a build, which depend on what is built and on what is already installed.

This module uses only the standard library.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from build_tools.toolchain import BuildError, Torch, cuda_wanted, find_cuda_toolkit, find_torch

_FOLDER = Path(__file__).resolve().parent.parent / "requirements"


def _read(name: str) -> list[str]:
    lines = (line.split("#")[0].strip() for line in (_FOLDER / name).read_text().splitlines())
    return [line for line in lines if line]


def build_requirements(torch: Torch | None = None) -> list[str]:
    """Return the requirements of a build with the installed `torch`. If it is None, they include torch."""
    requirements = _read("build.txt")
    if cuda_wanted() and not (torch and torch.cuda is None):
        cuda = _read("cuda.txt")
        pinned = next(re.findall(r"==(\d+\.\d+)", line)[0] for line in cuda if line.startswith("nvidia-cuda-nvcc"))
        if find_cuda_toolkit(torch.cuda if torch and torch.cuda else pinned)[0] is not None:
            cuda = [line for line in cuda if not line.startswith("nvidia-")]
        requirements += cuda
    return [line for line in requirements if not (torch and line.startswith("torch"))]


def _versions_of_torch() -> str:
    """Return what pip prints about the versions of torch that its index offers for this Python and machine."""
    command = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def cpu_torch() -> str | None:
    """Return the requirement of a torch without CUDA, if pip's index offers one: 0.2 GB instead of 2.7 GB.

    The function prefers version 2.11, with which flashbwd is tested most, to newer versions. For x86-64, PyTorch's own
    index offers such a build, and PyPI does not.
    """
    builds = re.findall(r"\b(\d+)\.(\d+)\.(\d+)\+cpu\b", _versions_of_torch())
    offered = [tuple(map(int, version)) for version in builds]
    usable = [version for version in offered if version >= (2, 10, 0)]
    if not usable:
        return None
    tested = [version for version in usable if version[:2] == (2, 11)]
    return "torch=={}.{}.{}+cpu".format(*max(tested or usable))


def environment_requirements(torch: Torch | None = None) -> list[str]:
    """Return the requirements of `.venv`, for which dev.py also chooses the torch.

    A build with kernels uses the torch that cuda.txt names. Other builds use a torch without CUDA if pip's index offers
    one. If kernels are wanted and an earlier run installed a torch without CUDA, the requirements replace it.
    """
    tested = next(line for line in _read("cuda.txt") if line.startswith("torch"))
    if torch and cuda_wanted() and torch.cuda is None and torch.root.is_relative_to(sys.prefix):
        return [*build_requirements(), f"{tested},!={torch.version}"]
    if torch:
        return build_requirements(torch)
    return [*build_requirements(), tested if cuda_wanted() else cpu_torch() or tested]


def torch_of_target() -> Torch | None:
    """Return the torch of the environment into which pip installs, if a build can use it; else None."""
    try:
        torch = find_torch()
    except BuildError:
        return None
    pinned = next(line for line in _read("cuda.txt") if line.startswith("nvidia-cuda-nvcc"))
    fits = torch.cuda is not None and f"=={torch.cuda.split('.')[0]}." in pinned
    return torch if fits or not cuda_wanted() else None


if __name__ == "__main__":
    try:
        installed: Torch | None = find_torch()
    except BuildError:
        installed = None
    print("\n".join(environment_requirements(installed)))

"""Describes the machine and the sources of a measurement."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

PACKAGE = Path(__file__).resolve().parents[1]
SOURCE_TREE = PACKAGE.parent  # the checkout; site-packages for an installed wheel


@dataclass(frozen=True)
class Machine:
    """The hardware and software that a result depends on."""

    device: str  # name of the GPU, or of the CPU
    kind: str  # "cuda" or "cpu"
    cpu: str
    threads: int
    driver: str | None
    torch: str
    cuda: str | None  # the CUDA version that torch was built with
    cudnn: int | None
    python: str
    platform: str
    commit: str | None  # ends in "-dirty" if tracked files have changes
    kernel_sources: str | None  # SHA-256 of csrc/**
    libraries: dict[str, str]  # SHA-256 of each compiled library in use

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def default_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def describe(device: torch.device) -> Machine:
    cpu = cpu_name()
    return Machine(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        kind=device.type,
        cpu=cpu,
        threads=torch.get_num_threads(),
        driver=driver_version() if device.type == "cuda" else None,
        torch=torch.__version__,
        cuda=torch.version.cuda,
        cudnn=torch.backends.cudnn.version() if device.type == "cuda" else None,
        python=platform.python_version(),
        platform=platform.platform(),
        commit=commit(),
        kernel_sources=kernel_sources_hash(),
        libraries={path.name: sha256([path]) for path in sorted(PACKAGE.glob("*.so"))},
    )


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver, or None."""
    found = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return found.splitlines()[0].strip() if found else None


def commit() -> str | None:
    """Return the commit of the source tree from which the package is imported; None for an installed package.

    The environment variable FLASHBWD_COMMIT takes precedence, for copies of the tree without git history.
    """
    if given := os.environ.get("FLASHBWD_COMMIT"):
        return given
    if not (SOURCE_TREE / ".git").exists():
        return None
    head = _output(["git", "-C", str(SOURCE_TREE), "rev-parse", "HEAD"])
    if head is None:
        return None
    changed = _output(["git", "-C", str(SOURCE_TREE), "status", "--porcelain", "--untracked-files=no"])
    return head.strip() + ("-dirty" if changed else "")


def kernel_sources_hash() -> str | None:
    """Return a SHA-256 over the names and contents of csrc/**; None for an installed package."""
    root = SOURCE_TREE / "csrc"
    return sha256(path for path in sorted(root.rglob("*")) if path.is_file()) if root.is_dir() else None


def sha256(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(SOURCE_TREE)}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None

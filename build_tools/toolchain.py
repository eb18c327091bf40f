"""Finds torch, ninja, a CUDA toolkit and this machine's GPUs. Imports no large package."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_CUDA = Path("/usr/local/cuda")
OLDEST_GPU = (8, 0)  # the lowest compute capability that has kernels


class BuildError(RuntimeError):
    """The build cannot continue; the message says what to do."""


@functools.lru_cache
def gpus() -> tuple[tuple[int, int], ...]:
    """Return the compute capabilities of this machine's GPUs from NVIDIA's driver; empty without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count, device, value = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    found = []
    for ordinal in range(count.value):
        driver.cuDeviceGet(ctypes.byref(device), ordinal)
        capability = []
        for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
            driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            capability.append(value.value)
        found.append((capability[0], capability[1]))
    return tuple(found)


def names_from_env(variable: str) -> list[str]:
    return [name for name in re.split(r"[,;\s]+", os.environ.get(variable, "")) if name]


def _asked_architectures() -> list[str]:
    return names_from_env("FLASHBWD_CUDA_ARCHS") or names_from_env("TORCH_CUDA_ARCH_LIST")


def named_architectures() -> list[str]:
    """Return the GPUs to compile for: the environment names them, else they are this machine's. Empty means all."""
    if asked := _asked_architectures():
        return [] if asked == ["all"] else asked
    return sorted({f"{major}.{minor}" for major, minor in gpus()})


def cuda_wanted() -> bool:
    """Return whether this build has kernels: FLASHBWD_CUDA if set, else whether GPUs are named or present."""
    if asked := os.environ.get("FLASHBWD_CUDA", ""):
        if asked not in ("0", "1"):
            raise BuildError(f"FLASHBWD_CUDA is {asked!r}, expected 0 or 1")
        return asked == "1"
    return bool(_asked_architectures()) or any(gpu >= OLDEST_GPU for gpu in gpus())


def _package_dir(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None


def _outside_of_isolation(name: str) -> Path | None:
    """Return the folder of a package in pip's target environment, from which an isolated build cannot import."""
    folders = (Path(sysconfig.get_path(key)) / name for key in ("platlib", "purelib"))
    return next((folder for folder in folders if (folder / "version.py").is_file()), None)


@dataclass(frozen=True)
class Torch:
    """The torch whose headers and libraries the build uses. It is found without an import."""

    root: Path
    version: str
    cuda: str | None

    @property
    def include(self) -> Path:
        return self.root / "include"

    @property
    def lib(self) -> Path:
        return self.root / "lib"


def find_torch() -> Torch:
    root = _package_dir("torch") or _outside_of_isolation("torch")
    if root is None:
        raise BuildError(
            "torch is not installed in this environment. With --no-build-isolation install the build requirements "
            "first: pip install -r requirements/build.txt -r requirements/cuda.txt"
        )
    facts = runpy.run_path(str(root / "version.py"))
    version = str(facts["__version__"])
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < (2, 10):
        raise BuildError(f"torch is {version} in {root}, expected 2.10 or later")
    return Torch(root, version, facts.get("cuda"))


@dataclass(frozen=True)
class CudaToolkit:
    root: Path
    version: str

    @property
    def nvcc(self) -> Path:
        return self.root / "bin" / "nvcc"

    @property
    def lib(self) -> Path:
        lib = _cudart_dir(self.root)
        assert lib is not None
        return lib

    @property
    def includes(self) -> list[Path]:
        """Return the toolkit's include folders. From CUDA 13 on, libcu++ and CUB have a separate folder."""
        return [path for path in (self.root / "include", self.root / "include" / "cccl") if path.is_dir()]


def _cudart_dir(root: Path) -> Path | None:
    for lib in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
        if (root / lib / "libcudart_static.a").is_file():
            return root / lib
    return None


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout + done.stderr


def _root_of_nvcc(nvcc: str) -> Path | None:
    """Return the toolkit of an nvcc by running it, because the nvcc may be a wrapper script in another folder."""
    match = re.search(r"^#\$ TOP=(.*)$", _run(nvcc, "--dryrun", "-c", "-x", "cu", os.devnull), re.MULTILINE)
    return Path(match.group(1).strip()).resolve() if match else None


def _candidates() -> list[tuple[str, Path]]:
    found = [(name, Path(os.environ[name])) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    if (on_path := shutil.which("nvcc")) and (root := _root_of_nvcc(on_path)):
        found.append(("nvcc on PATH", root))
    found.append(("default location", DEFAULT_CUDA))
    found += [("pip packages", Path(entry or ".") / "nvidia" / "cu13") for entry in sys.path]
    return found


def find_cuda_toolkit(cuda: str) -> tuple[CudaToolkit | None, list[str]]:
    """Return the first usable toolkit with the CUDA major version of `cuda`, and why others were rejected before it."""
    rejected = []
    for source, root in _candidates():
        if not (root / "bin" / "nvcc").is_file():
            if source in ("CUDA_HOME", "CUDA_PATH", "nvcc on PATH"):
                rejected.append(f"{root} ({source}): no bin/nvcc")
            continue
        match = re.search(r"release (\d+\.\d+)", _run(str(root / "bin" / "nvcc"), "--version"))
        if match is None:
            rejected.append(f"{root} ({source}): nvcc does not run")
        elif match.group(1).split(".")[0] != cuda.split(".")[0]:
            rejected.append(f"{root} ({source}): is CUDA {match.group(1)}, torch was built with {cuda}")
        elif not (root / "include" / "cuda_runtime.h").is_file():
            rejected.append(f"{root} ({source}): no include/cuda_runtime.h")
        elif _cudart_dir(root) is None:
            rejected.append(f"{root} ({source}): no libcudart_static.a")
        else:
            return CudaToolkit(root, match.group(1)), rejected
    return None, rejected


def find_ninja() -> str:
    """Return the ninja of this environment, even if it is not activated, else the ninja on PATH."""
    beside_python = Path(sys.executable).parent / "ninja"
    if beside_python.is_file():
        return str(beside_python)
    if on_path := shutil.which("ninja"):
        return on_path
    raise BuildError("ninja is not installed: pip install ninja")

"""Writes a wheel as a folder that the `kernels` package of Hugging Face loads.

Usage: kernels_layout.py WHEEL FOLDER

FOLDER/build/ gets one variant per library: one for the CPU, and one for CUDA if the wheel has kernels. Both use torch's
stable ABI, so they serve every torch from 2.10 on.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import zipfile
from pathlib import Path

STABLE_ABI = "torch-stable-abi210"  # torch 2.10, as TORCH_TARGET_VERSION in build_tools/native.py
CUDA = "cu130"  # the CUDA of requirements/cuda.txt
KERNELS = "flashbwd/_C_cuda.so"
ENTRY = '''"""flashbwd, loaded by the `kernels` package."""

import importlib.util
import sys
from pathlib import Path

if "flashbwd" not in sys.modules:
    _folder = Path(__file__).resolve().parent / "flashbwd"
    _spec = importlib.util.spec_from_file_location(
        "flashbwd", _folder / "__init__.py", submodule_search_locations=[str(_folder)]
    )
    _package = importlib.util.module_from_spec(_spec)
    sys.modules["flashbwd"] = _package
    _spec.loader.exec_module(_package)

import flashbwd  # noqa: E402

if flashbwd.__version__ != "{version}":
    raise ImportError(f"flashbwd {{flashbwd.__version__}} is already loaded; this kernel is version {version}")

from flashbwd import *  # noqa: E402, F403
from flashbwd.integrations.transformers import attention_forward  # noqa: E402, F401
'''


def write_variant(wheel: zipfile.ZipFile, folder: Path, backend: str, *, with_kernels: bool, version: str) -> None:
    folder.mkdir(parents=True)
    for name in wheel.namelist():
        if name.startswith("flashbwd/") and (with_kernels or name != KERNELS):
            wheel.extract(name, folder)
    (folder / "__init__.py").write_text(ENTRY.format(version=version))
    metadata = {
        "id": f"flashbwd_{backend}_{version.replace('.', '_')}",
        "name": "flashbwd",
        "version": 1,
        "license": "BSD-3-Clause",
        "python-depends": [],
        "backend": {"type": backend},
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=1) + "\n")


def write_layout(path: Path, folder: Path) -> list[Path]:
    """Write the variants of a wheel and return their folders."""
    match = re.fullmatch(r"flashbwd-([^-]+)-py3-none-.*(x86_64|aarch64)\.whl", path.name)
    if match is None:
        raise SystemExit(f"kernels_layout.py: WHEEL is {path.name}, expected a wheel of flashbwd for Linux")
    version, machine = match.groups()
    shutil.rmtree(folder / "build", ignore_errors=True)
    written = []
    with zipfile.ZipFile(path) as wheel:
        backends = {"cpu": "cpu", "cuda": CUDA} if KERNELS in wheel.namelist() else {"cpu": "cpu"}
        for backend, name in backends.items():
            variant = folder / "build" / f"{STABLE_ABI}-{name}-{machine}-linux"
            write_variant(wheel, variant, backend, with_kernels=backend == "cuda", version=version)
            written.append(variant)
    return written


def main(arguments: list[str]) -> None:
    if len(arguments) != 2:
        raise SystemExit(__doc__)
    for variant in write_layout(Path(arguments[0]), Path(arguments[1])):
        print(variant)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Checks the dependencies, symbols and contents of the built libraries.

Usage: audit.py WHEEL_OR_FOLDER    a wheel, or a folder that contains _C.so and perhaps _C_cuda.so

The libraries may use only torch's stable ABI, no Python symbols, and no shared CUDA library except torch's. They may
export only flashbwd_* symbols. For each GPU that the build targets, _C_cuda must contain the code of every source, and
the number of kernels that the budget states.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from build_tools.native import Unit, chosen_families, cuda_units, machine_targets

SYSTEM = {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "libdl.so.2", "librt.so.1", "libpthread.so.0"}
SYSTEM |= {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
ALLOWED = {"_C.so": {"libtorch_cpu.so"}, "_C_cuda.so": {"libtorch_cpu.so", "libtorch_cuda.so", "_C.so"}}
WHEEL_LIMIT_MB = 40
BUDGET = Path(__file__).resolve().parent.parent / "build_tools" / "budget.json"


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def dependencies(library: Path) -> list[str]:
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", output("readelf", "-d", str(library))))
    extra = needed - SYSTEM - ALLOWED[library.name]
    return [f"{library.name} needs {name}" for name in sorted(extra)]


def exports(library: Path) -> list[str]:
    names = [line.split()[-1] for line in output("nm", "-D", "--defined-only", str(library)).splitlines()]
    return [f"{library.name} exports {name}" for name in names if not name.startswith("flashbwd_")]


def stable_abi(library: Path) -> list[str]:
    tool = Path(sys.executable).parent / "torch-abi-audit"
    done = subprocess.run(
        [str(tool), "--check", "torch", "-v", str(library)], capture_output=True, text=True, check=False
    )
    return [] if done.returncode == 0 else [done.stdout + done.stderr]


def cuobjdump() -> str:
    from build_tools.toolchain import find_cuda_toolkit

    pip = [Path(entry) / "nvidia/cu13/bin/cuobjdump" for entry in sys.path]
    toolkit = find_cuda_toolkit("13")[0]
    candidates = [*pip, *([toolkit.root / "bin" / "cuobjdump"] if toolkit else [])]
    found = next((str(path) for path in candidates if path.is_file()), None) or shutil.which("cuobjdump")
    if found is None:
        sys.exit("cuobjdump is missing: pip install nvidia-cuda-cuobjdump")
    return found


def expected_code(units: Iterable[Unit], budget: dict[str, Any]) -> tuple[Counter[str], Counter[str]]:
    """Return the expected pieces of code (one per source and target, including PTX) and kernels of ``units``."""
    pieces: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    for unit in units:
        machine = machine_targets(unit.arch)
        ptx = {f"compute_{t.removesuffix('+PTX').replace('.', '')}" for t in unit.arch if t.endswith("+PTX")}
        pieces.update(machine | ptx)
        allowed = budget["units"][str(unit.source)]["kernels"]
        kernels.update({target: allowed[target] for target in machine if target in allowed})
    return pieces, kernels


def code_found(elf: str, ptx: str, symbols: str) -> tuple[Counter[str], Counter[str]]:
    """Count the pieces of code and the kernels in cuobjdump's listings, by target."""
    pieces = Counter(re.findall(r"\.(sm_\w+)\.cubin", elf))
    pieces.update(name.replace("sm_", "compute_") for name in re.findall(r"\.(sm_\w+)\.ptx", ptx))
    kernels: Counter[str] = Counter()
    for part in symbols.split("Fatbin elf code:")[1:]:
        found = re.search(r"^arch = (\w+)", part, re.MULTILINE)
        kernels[found[1] if found else "unknown"] += len(re.findall(r"^FUNC .* ENTRY\s", part, re.MULTILINE))
    return pieces, +kernels


def code(library: Path) -> list[str]:
    tool = cuobjdump()
    listings = (output(tool, option, str(library)) for option in ("--list-elf", "--list-ptx", "-symbols"))
    found = code_found(*listings)
    expected = expected_code(cuda_units(chosen_families()), json.loads(BUDGET.read_text()))
    problems = []
    for what, built, wanted in zip(("pieces of code", "kernels"), found, expected, strict=True):
        print(f"{library.name}: {what}: {', '.join(f'{target} {n}' for target, n in sorted(built.items()))}")
        if built != wanted:
            problems.append(f"{library.name} holds {what} {dict(built)}, expected {dict(wanted)}")
    return problems


def audit(folder: Path) -> list[str]:
    problems = []
    for library in sorted(folder.glob("_C*.so")):
        problems += [*dependencies(library), *exports(library), *stable_abi(library)]
        if library.name == "_C_cuda.so":
            problems += code(library)
        print(f"{library.name}: {library.stat().st_size / 2**20:.1f} MB")
    return problems if (folder / "_C.so").is_file() else [f"{folder} holds no _C.so"]


def main() -> None:
    target = Path(sys.argv[1])
    if target.is_dir():
        problems = audit(target)
    else:
        megabytes = target.stat().st_size / 2**20
        print(f"{target.name}: {megabytes:.1f} MB")
        with tempfile.TemporaryDirectory() as folder:
            zipfile.ZipFile(target).extractall(folder)
            problems = audit(Path(folder) / "flashbwd")
        if megabytes > WHEEL_LIMIT_MB:
            problems.append(f"the wheel is larger than {WHEEL_LIMIT_MB} MB")
        if not re.search(r"-py3-none-(many)?linux", target.name):
            problems.append(f"{target.name} is not for every Python")
    if problems:
        sys.exit("\n".join(problems))
    print("audit passed")


if __name__ == "__main__":
    main()

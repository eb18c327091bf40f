"""Chooses the sources, the GPUs and the compiler flags of a build; writes the ninja file and runs ninja.

Each source is a unit with its own architecture flags. torch.utils.cpp_extension cannot do this, because its flags apply
to a whole extension.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from build_tools.progress import HOST_SECONDS, Limits, run_ninja, unit_seconds
from build_tools.toolchain import (
    ROOT,
    BuildError,
    CudaToolkit,
    Torch,
    cuda_wanted,
    find_cuda_toolkit,
    find_ninja,
    find_torch,
    named_architectures,
    names_from_env,
)

BUDGET = ROOT / "build_tools" / "budget.json"
ENVIRONMENT = ROOT / "flashbwd" / "_environment.py"  # run as a file, because the package imports torch
OUT = Path("build/native")  # relative to ROOT, in which ninja runs
TORCH_TARGET_VERSION = "0x020a000000000000"  # torch 2.10, the oldest version that can load the libraries
GB_PER_NVCC_JOB = 5

# The GPU targets of each kernel family. The 8.0 code of a portable family also runs on 8.6 and 8.9, and the driver
# compiles its PTX for newer GPUs. 9.0a code runs only on 9.0.
PORTABLE = ("8.0", "9.0", "9.0+PTX")
FAMILIES = {
    "attention_sm90": ("csrc/attention/sm90", ("9.0a",)),
    "attention_sm80": ("csrc/attention/sm80", PORTABLE),
    "attention_short": ("csrc/attention/short", PORTABLE),
    "layer_norm": ("csrc/layer_norm", PORTABLE),
    "decoding": ("csrc/decoding", PORTABLE),
}

CXX_FLAGS = ["-std=c++17", "-O2", "-fopenmp-simd", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Icsrc"]
NVCC_FLAGS = [
    "-std=c++17",
    "-O3",
    "-Icsrc",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra",
    "-Xptxas=-v",
    "--expt-relaxed-constexpr",
    "--compress-mode=size",
    "--threads=1",
]
# z,defs makes a missing definition a link error. Otherwise it would be an error when a user imports the library.
LINK_FLAGS = ["-shared", "-Wl,-z,defs", "-Wl,--as-needed", "-Wl,--exclude-libs,ALL", "-Wl,-O1", "-s"]
EXPORTS = "-Wl,--version-script=build_tools/exports.map"


@dataclass(frozen=True)
class Unit:
    source: Path
    arch: tuple[str, ...] = ()  # GPU targets for nvcc; empty for C++


@dataclass(frozen=True)
class Library:
    output: Path
    units: list[Unit]
    flags: list[str]  # preprocessor flags
    link: list[str]
    needs: list[Path] = field(default_factory=list)  # libraries built before this one


def cxx() -> str:
    return os.environ.get("CXX", "g++")


def chosen_architectures(offered: tuple[str, ...]) -> tuple[str, ...]:
    """Return the targets of a family that run on the GPUs to compile for (``named_architectures``)."""
    wanted = named_architectures()
    if not wanted:
        return offered
    chosen = set()
    for name in wanted:
        match = re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", name)
        if match is None:
            raise BuildError(f"FLASHBWD_CUDA_ARCHS names {name!r}, expected architectures such as 8.0, 9.0a or 9.0+PTX")
        gpu = (int(match.group(1)), int(match.group(2)))
        native = []
        for target in offered:
            major, minor = (int(part) for part in re.findall(r"\d+", target))
            runs_there = major == gpu[0] and (minor == gpu[1] if target.endswith("a") else minor <= gpu[1])
            if not target.endswith("+PTX") and runs_there:
                native.append(target)
        ptx = [target for target in offered if target.endswith("+PTX")]
        if native:
            chosen.add(max(native))
        if match.group(4) or (not native and gpu >= (9, 0)):
            chosen.update(ptx)
    return tuple(target for target in offered if target in chosen)


def _gencode(targets: tuple[str, ...]) -> list[str]:
    flags = []
    for target in targets:
        number = target.replace(".", "").replace("+PTX", "")
        kind = "compute" if target.endswith("+PTX") else "sm"
        flags.append(f"-gencode=arch=compute_{number},code={kind}_{number}")
    return flags


def machine_targets(targets: tuple[str, ...]) -> set[str]:
    """Return the compiler's names of the targets with machine code: sm_90a for 9.0a, none for PTX."""
    return {f"sm_{target.replace('.', '')}" for target in targets if not target.endswith("+PTX")}


def chosen_families() -> dict[str, tuple[str, ...]]:
    """Return the kernel families of this build that have sources, and the architectures of each."""
    wanted = names_from_env("FLASHBWD_FAMILIES") or list(FAMILIES)
    if unknown := [name for name in wanted if name not in FAMILIES]:
        raise BuildError(f"FLASHBWD_FAMILIES names {unknown[0]!r}, expected families of {', '.join(FAMILIES)}")
    families = {}
    for name in wanted:
        folder, offered = FAMILIES[name]
        targets = chosen_architectures(offered)
        if any((ROOT / folder).rglob("*.cu")) and targets:
            families[name] = targets
    return families


def _head_dim(source: Path) -> int | None:
    """Return the head dimension in a file name such as `d128_bf16.cu`, or None."""
    match = re.search(r"(?:^|_)d(\d+)(?:_|x|$)", source.stem)
    return int(match.group(1)) if match else None


def _sources(pattern: str) -> list[Path]:
    return sorted(path.relative_to(ROOT) for path in ROOT.glob(pattern))


def cuda_units(families: dict[str, tuple[str, ...]]) -> list[Unit]:
    """Return the CUDA sources of ``families`` and the sources that belong to no family."""
    portable = chosen_architectures(PORTABLE)
    if not portable:
        raise BuildError(
            f"flashbwd has no kernels for the GPUs {', '.join(named_architectures())}, expected 8.0 or later. Name "
            "other GPUs with FLASHBWD_CUDA_ARCHS, or set FLASHBWD_CUDA=0 for a build without kernels"
        )
    head_dims = [int(number) for number in names_from_env("FLASHBWD_HEAD_DIMS")]
    units = []
    for source in _sources("csrc/**/*.cu"):
        owner = next((name for name, (folder, _) in FAMILIES.items() if source.is_relative_to(folder)), None)
        if owner is not None and owner not in families:
            continue
        head_dim = _head_dim(source)
        if owner and owner.startswith("attention") and head_dims and head_dim and head_dim not in head_dims:
            continue
        units.append(Unit(source, families[owner] if owner else portable))
    return units


def longest_first(units: Sequence[Unit]) -> list[Unit]:
    """Sort units so that none that takes long starts last. Ninja starts them in the order of its file."""
    shares = {str(unit.source): _share(unit) for unit in units if unit.arch}
    seconds = unit_seconds(BUDGET, shares)
    return sorted(units, key=lambda unit: -seconds.get(str(unit.source), HOST_SECONDS))


def _head_dim_macro() -> list[str]:
    """Return the macro FLASHBWD_BUILT_HEAD_DIMS=64,128 of a build that contains only some head dimensions."""
    head_dims = names_from_env("FLASHBWD_HEAD_DIMS")
    return [f"-DFLASHBWD_BUILT_HEAD_DIMS={','.join(head_dims)}"] if head_dims else []


class NativeBuild:
    """One build with the torch and the CUDA toolkit of this environment."""

    def __init__(self) -> None:
        self.torch: Torch = find_torch()
        self.toolkit: CudaToolkit | None = None
        if shutil.which(cxx()) is None:
            raise BuildError(f"no C++ compiler {cxx()}: install g++ (apt install g++), or set CXX to another compiler")
        for complaint in runpy.run_path(str(ENVIRONMENT))["complaints"]():
            print(f"WARNING: {complaint}", file=sys.stderr)
        print(f"flashbwd: torch {self.torch.version} (CUDA {self.torch.cuda}) in {self.torch.root}")
        if not cuda_wanted():
            why = (
                "FLASHBWD_CUDA=0"
                if os.environ.get("FLASHBWD_CUDA")
                else "this machine has no GPU of compute capability 8.0 or later"
            )
            print(f"flashbwd: {why}: library for the CPU only; FLASHBWD_CUDA=1 compiles the kernels too")
        elif self.torch.cuda is None:
            print("flashbwd: this torch has no CUDA: library for the CPU only")
        else:
            self.toolkit = self._toolkit(self.torch.cuda)
        families = chosen_families()  # refuses an unknown family even in a build without kernels
        self.families = families if self.toolkit else {}

    @staticmethod
    def _toolkit(cuda: str) -> CudaToolkit:
        toolkit, rejected = find_cuda_toolkit(cuda)
        for reason in rejected:
            print(f"flashbwd: not used: {reason}")
        if toolkit is None:
            raise BuildError(
                f"no CUDA toolkit for torch's CUDA {cuda}. Install one from pip (pip install -r requirements/cuda.txt, "
                "which is for CUDA 13), point CUDA_HOME at one, or set FLASHBWD_CUDA=0 for a build without kernels"
            )
        print(f"flashbwd: CUDA {toolkit.version} in {toolkit.root}")
        return toolkit

    def _torch_flags(self) -> list[str]:
        return [f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}", "-isystem", str(self.torch.include)]

    def _cuda_flags(self) -> list[str]:
        assert self.toolkit is not None
        return ["-DUSE_CUDA", *(flag for path in self.toolkit.includes for flag in ("-isystem", str(path)))]

    def _cuda_link(self) -> list[str]:
        assert self.toolkit is not None
        torch = [f"-L{self.torch.lib}", "-ltorch_cuda", "-ltorch_cpu"]
        return [*torch, f"-L{self.toolkit.lib}", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]

    def libraries(self) -> list[Library]:
        """Return `_C`, and `_C_cuda` if the build has a CUDA toolkit."""
        api = [Unit(path) for path in _sources("csrc/api/*.cpp")]
        host = [*_host_units(), *(unit for unit in api if not unit.source.name.startswith("cuda_"))]
        base = Library(
            OUT / "_C.so",
            host,
            [*self._torch_flags(), *_head_dim_macro()],
            [f"-L{self.torch.lib}", "-ltorch_cpu", "-Wl,-soname,_C.so", EXPORTS],
        )
        if self.toolkit is None:
            return [base]
        cuda = [unit for unit in api if unit.source.name.startswith("cuda_")] + cuda_units(self.families)
        built = [f"-DFLASHBWD_BUILT_{name.upper()}" for name in self.families]
        kernels = Library(
            OUT / "_C_cuda.so",
            cuda,
            [*self._torch_flags(), *self._cuda_flags(), *built, *_head_dim_macro()],
            ["-Wl,-rpath,$ORIGIN", str(base.output), *self._cuda_link(), "-Wl,-soname,_C_cuda.so", EXPORTS],
            [base.output],
        )
        return [base, kernels]

    def test_modules(self) -> list[Library]:
        """Return the modules that only tests load: bindings of the host code, and kernels that fail on purpose."""
        python = ["-isystem", sysconfig.get_paths()["include"], "-isystem", str(self.torch.include)]
        name = "flashbwd_host_tests" + sysconfig.get_config_var("EXT_SUFFIX")
        units = [Unit(Path("tests/csrc/host_module.cpp")), *_host_units()]
        # The interpreter defines the Python symbols.
        modules = [Library(Path("tests/_built") / name, units, python, ["-Wl,-z,undefs"])]
        if self.toolkit:
            units = [Unit(Path("tests/csrc/fault_kernels.cu"), PORTABLE)]
            flags = [*self._torch_flags(), *self._cuda_flags()]
            modules.append(Library(Path("tests/_built/fault_kernels.so"), units, flags, self._cuda_link()))
        return modules

    def build(self, libraries: list[Library], name: str) -> None:
        """Compile and link everything that is out of date. Print the progress and the compilers' messages."""
        (ROOT / OUT).mkdir(parents=True, exist_ok=True)
        ninja_file = OUT / f"{name}.ninja"
        (ROOT / ninja_file).write_text(self._ninja(libraries, name))
        for family, targets in self.families.items():
            print(f"flashbwd: {family} for {' '.join(targets)}", flush=True)
        command = [find_ninja(), "-j", str(job_limits()[0]), "-f", str(ninja_file)]
        shares = {str(unit.source): _share(unit) for library in libraries for unit in library.units if unit.arch}
        if run_ninja(command, ROOT, unit_seconds(BUDGET, shares), Limits(*job_limits())) != 0:
            raise BuildError("compilation failed: the compiler's messages are above, after the line FAILED")

    def write_report(self, libraries: list[Library]) -> Path:
        """Merge the reports of all units into build/resource_usage.json."""
        files = [ROOT / _report(unit, library) for library in libraries for unit in library.units]
        reports = [json.loads(file.read_text()) for file in files]
        path = ROOT / "build" / "resource_usage.json"
        path.write_text(json.dumps(reports, indent=1) + "\n")
        return path

    def _ninja(self, libraries: list[Library], name: str) -> str:
        record = f"{shlex.quote(sys.executable)} build_tools/compile_unit.py $report $in"
        ccache = shutil.which("ccache") or ""
        nvcc = shlex.quote(str(self.toolkit.nvcc)) if self.toolkit else "nvcc"
        cxx_flags = [*CXX_FLAGS, *shlex.split(os.environ.get("CXXFLAGS", ""))]
        lines = [
            "ninja_required_version = 1.5",
            f"builddir = {OUT}/{name}",
            "pool nvcc",
            f"  depth = {job_limits()[1]}",
            "rule cxx",
            f"  command = {record} {ccache} {cxx()} -MMD -MF $out.d $flags -c $in -o $out",
            "  description = g++ $in",
            "  depfile = $out.d",
            "  deps = gcc",
            "rule nvcc",
            f"  command = {record} {ccache} {nvcc} -ccbin={cxx()} -MMD -MF $out.d $flags -c $in -o $out",
            "  description = nvcc $in",
            "  depfile = $out.d",
            "  deps = gcc",
            "  pool = nvcc",
            "rule link",
            f"  command = {cxx()} $in $link -o $out",
            "  description = link $out",
        ]
        for library in libraries:
            objects = []
            for unit in longest_first(library.units):
                compiled = _object(unit, library)
                objects.append(str(compiled))
                if unit.arch:
                    flags = [*NVCC_FLAGS, *_gencode(unit.arch), *map(_one_value, library.flags)]
                else:
                    flags = [*cxx_flags, *library.flags]
                lines += [
                    f"build {compiled}: {'nvcc' if unit.arch else 'cxx'} {unit.source}",
                    f"  report = {_report(unit, library)}",
                    f"  flags = {_quote(flags)}",
                ]
            needs = f" | {' '.join(map(str, library.needs))}" if library.needs else ""
            lines += [
                f"build {library.output}: link {' '.join(objects)}{needs}",
                f"  link = {_quote([*LINK_FLAGS, *library.link])}",
            ]
        return "\n".join(lines) + "\n"


def _host_units() -> list[Unit]:
    """Return the C++ sources that do not depend on torch: plans, workspaces, schedules."""
    return [Unit(path) for path in _sources("csrc/**/*.cpp") if not path.is_relative_to("csrc/api")]


def _share(unit: Unit) -> float:
    """Return the fraction of the GPU targets of a unit's family that this build compiles."""
    offered = next((t for folder, t in FAMILIES.values() if unit.source.is_relative_to(folder)), PORTABLE)
    return len(unit.arch) / len(offered)


def _object(unit: Unit, library: Library) -> Path:
    return OUT / library.output.name.split(".")[0] / unit.source.with_suffix(unit.source.suffix + ".o")


def _report(unit: Unit, library: Library) -> Path:
    return _object(unit, library).with_suffix(".json")


def _one_value(flag: str) -> str:
    """Escape the commas in a flag, at which nvcc would split its value."""
    return flag.replace(",", r"\,")


def _quote(flags: list[str]) -> str:
    """Quote flags for a shell command in a ninja file, which writes $ as $$."""
    return shlex.join(flags).replace("$", "$$")


def job_limits() -> tuple[int, int]:
    """Return the number of parallel jobs, and the number of nvcc jobs among them.

    The first number is MAX_JOBS, by default the number of cores. The free memory also limits the number of nvcc jobs.
    """
    cores = len(os.sched_getaffinity(0))
    if given := os.environ.get("MAX_JOBS"):
        cores = max(1, int(given))
    return cores, max(1, min(cores, int(_free_gigabytes() / GB_PER_NVCC_JOB)))


def _free_gigabytes() -> float:
    """Return the available memory, or the unused part of the container's limit if it is smaller."""
    meminfo = Path("/proc/meminfo").read_text()
    match = re.search(r"MemAvailable:\s+(\d+) kB", meminfo)
    free = int(match.group(1)) * 1024 if match else 0
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            free = min(free, int(limit) - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except OSError:
        pass  # no cgroup v2 on this machine
    return free / 2**30

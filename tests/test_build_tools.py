"""Decisions of the build: the toolkit, the GPU targets, the requirements, and how it reads a compiler's report."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # last: an installed package goes before the one of the tree

from build_tools import native, progress, requirements, toolchain  # noqa: E402
from build_tools.compile_unit import parse_ptxas  # noqa: E402

BUDGETED = "csrc/attention/pre_post/launch.cu"
SM90 = native.FAMILIES["attention_sm90"][1]


SWITCHES = (
    "FLASHBWD_CUDA",
    "FLASHBWD_CUDA_ARCHS",
    "FLASHBWD_FAMILIES",
    "TORCH_CUDA_ARCH_LIST",
    "MAX_JOBS",
)


@pytest.fixture(autouse=True)
def no_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine without a GPU, and unset every variable that the build reads."""
    for name in SWITCHES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(toolchain, "gpus", lambda: ())


@pytest.mark.parametrize(
    ("gpus", "switches", "portable"),
    [
        ((), {}, None),
        (((7, 5),), {}, None),
        (((9, 0),), {}, ("9.0",)),
        (((8, 6), (9, 0), (9, 0)), {}, ("8.0", "9.0")),
        (((7, 5), (8, 0)), {}, ("8.0",)),
        (((12, 0),), {}, ("9.0+PTX",)),
        (((9, 0),), {"FLASHBWD_CUDA": "0"}, None),
        ((), {"FLASHBWD_CUDA": "1"}, native.PORTABLE),
        (((9, 0),), {"FLASHBWD_CUDA": "1"}, ("9.0",)),
        (((9, 0),), {"FLASHBWD_CUDA_ARCHS": "all"}, native.PORTABLE),
        ((), {"FLASHBWD_CUDA_ARCHS": "8.0"}, ("8.0",)),
        ((), {"TORCH_CUDA_ARCH_LIST": "8.0"}, ("8.0",)),
        (((9, 0),), {"FLASHBWD_CUDA_ARCHS": "8.0", "TORCH_CUDA_ARCH_LIST": "9.0"}, ("8.0",)),
        ((), {"FLASHBWD_CUDA": "0", "FLASHBWD_CUDA_ARCHS": "all"}, None),
    ],
)
def test_kernels_are_compiled_for_the_gpus_of_the_machine_or_the_named_ones(
    monkeypatch: pytest.MonkeyPatch,
    gpus: tuple[tuple[int, int], ...],
    switches: dict[str, str],
    portable: tuple[str, ...] | None,
) -> None:
    monkeypatch.setattr(toolchain, "gpus", lambda: gpus)
    for name, value in switches.items():
        monkeypatch.setenv(name, value)
    assert toolchain.cuda_wanted() == (portable is not None)
    if portable is not None:
        assert native.chosen_architectures(native.PORTABLE) == portable


def test_gpus_without_kernels_are_refused_if_kernels_are_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "gpus", lambda: ((7, 5),))
    monkeypatch.setenv("FLASHBWD_CUDA", "1")
    with pytest.raises(toolchain.BuildError, match=r"no kernels for the GPUs 7\.5, expected 8.0 or later"):
        native.cuda_units({})


@pytest.mark.parametrize(
    ("arch_list", "portable", "sm90"),
    [
        ("", native.PORTABLE, SM90),
        ("all", native.PORTABLE, SM90),
        ("8.0", ("8.0",), ()),
        ("8.6 8.9", ("8.0",), ()),
        ("9.0", ("9.0",), SM90),
        ("9.0a", ("9.0",), SM90),
        ("8.0;9.0+PTX", native.PORTABLE, SM90),
        ("10.0", ("9.0+PTX",), ()),
        ("7.5", (), ()),
    ],
)
def test_the_list_of_gpus_selects_the_targets(
    monkeypatch: pytest.MonkeyPatch, arch_list: str, portable: tuple[str, ...], sm90: tuple[str, ...]
) -> None:
    monkeypatch.setenv("FLASHBWD_CUDA_ARCHS", arch_list)
    assert native.chosen_architectures(native.PORTABLE) == portable
    assert native.chosen_architectures(SM90) == sm90


def test_a_switch_that_is_neither_on_nor_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHBWD_CUDA", "maybe")
    with pytest.raises(toolchain.BuildError, match="FLASHBWD_CUDA is 'maybe', expected 0 or 1"):
        toolchain.cuda_wanted()


def test_a_build_without_kernels_refuses_an_unknown_family_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHBWD_CUDA", "0")
    monkeypatch.setenv("FLASHBWD_FAMILIES", "attention_sm91")
    with pytest.raises(toolchain.BuildError, match="FLASHBWD_FAMILIES names 'attention_sm91'"):
        native.NativeBuild()


def test_a_build_warns_of_an_unknown_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLASHBWD_CUDA", "0")
    monkeypatch.setenv("FLASHBWD_CUDA_ARCH", "9.0")
    native.NativeBuild()
    assert "the environment variable FLASHBWD_CUDA_ARCH is unknown" in capsys.readouterr().err


def test_an_unknown_architecture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHBWD_CUDA_ARCHS", "Hopper")
    with pytest.raises(toolchain.BuildError, match="names 'Hopper', expected architectures"):
        native.chosen_architectures(native.PORTABLE)


def test_an_unknown_family_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHBWD_FAMILIES", "attention_sm70")
    with pytest.raises(toolchain.BuildError, match="names 'attention_sm70', expected families of"):
        native.chosen_families()


def test_jobs_are_bounded_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_JOBS", "8")
    monkeypatch.setattr(native, "_free_gigabytes", lambda: 16.0)
    assert native.job_limits() == (8, 3)
    monkeypatch.setattr(native, "_free_gigabytes", lambda: 1.0)
    assert native.job_limits() == (8, 1)


def test_each_compiler_gets_a_macro_with_commas_as_one_value() -> None:
    """nvcc would split a value at its commas, so the build escapes them."""
    build = native.NativeBuild.__new__(native.NativeBuild)
    build.toolkit = None
    units = [native.Unit(Path("kernel.cu"), ("9.0",)), native.Unit(Path("host.cpp"))]
    text = build._ninja([native.Library(Path("x.so"), units, ["-DDIMS=64,128"], [])], "x")
    of_kernel, of_host = (line for line in text.splitlines() if line.startswith("  flags = "))
    assert r"'-DDIMS=64\,128'" in of_kernel
    assert "-DDIMS=64,128" in of_host


def fake_toolkit(root: Path, release: str, *, headers: bool = True, runtime: bool = True) -> Path:
    (root / "bin").mkdir(parents=True)
    nvcc = root / "bin" / "nvcc"
    nvcc.write_text(
        f'#!/bin/sh\ncase "$*" in *dryrun*) echo "#$ TOP={root}/bin/.." >&2;; *) echo "release {release},";; esac\n'
    )
    nvcc.chmod(0o755)
    if headers:
        (root / "include").mkdir()
        (root / "include" / "cuda_runtime.h").touch()
    if runtime:
        (root / "lib64").mkdir()
        (root / "lib64" / "libcudart_static.a").touch()
    return root


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide all toolkits except those that a test creates."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(toolchain, "DEFAULT_CUDA", Path("/nonexistent"))
    monkeypatch.setattr(sys, "path", [])


@pytest.mark.usefixtures("only")
def test_the_toolkit_is_found_if_nvcc_is_a_wrapper_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root = fake_toolkit(tmp_path / "cuda", "13.0")
    (tmp_path / "bin").mkdir()
    wrapper = tmp_path / "bin" / "nvcc"
    wrapper.write_text(f'#!/bin/sh\nexec {root}/bin/nvcc "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", str(wrapper.parent), prepend=":")
    toolkit, _ = toolchain.find_cuda_toolkit("13.0")
    assert toolkit is not None
    assert toolkit.root == root.resolve()


@pytest.mark.usefixtures("only")
@pytest.mark.parametrize(
    ("release", "headers", "runtime", "reason"),
    [
        ("12.8", True, True, "is CUDA 12.8, torch was built with 13.0"),
        ("13.0", False, True, "no include/cuda_runtime.h"),
        ("13.0", True, False, "no libcudart_static.a"),
    ],
)
def test_an_unusable_toolkit_is_rejected_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, release: str, headers: bool, runtime: bool, reason: str
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(fake_toolkit(tmp_path / "bad", release, headers=headers, runtime=runtime)))
    monkeypatch.setenv("CUDA_PATH", str(fake_toolkit(tmp_path / "good", "13.2")))
    toolkit, rejected = toolchain.find_cuda_toolkit("13.0")
    assert toolkit is not None
    assert toolkit.root == tmp_path / "good"
    assert rejected == [f"{tmp_path / 'bad'} (CUDA_HOME): {reason}"]


@pytest.mark.usefixtures("only")
def test_the_pip_compiler_is_required_only_for_kernels_and_without_a_toolkit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert not any(line.startswith("nvidia") for line in requirements.build_requirements())  # no GPU here
    monkeypatch.setenv("FLASHBWD_CUDA", "1")
    assert any(line.startswith("nvidia-cuda-nvcc") for line in requirements.build_requirements())
    cpu_torch = toolchain.Torch(tmp_path, "2.13.0+cpu", None)
    assert not any(line.startswith("nvidia") for line in requirements.build_requirements(cpu_torch))
    monkeypatch.setenv("CUDA_HOME", str(fake_toolkit(tmp_path / "cuda", "13.0")))
    assert not any(line.startswith("nvidia") for line in requirements.build_requirements())
    monkeypatch.setenv("FLASHBWD_CUDA", "0")
    assert not any(line.startswith("nvidia") for line in requirements.build_requirements())


CPU_TORCH = toolchain.Torch(Path(sys.prefix) / "torch", "2.13.0+cpu", None)


@pytest.mark.parametrize(
    ("offered", "chosen"),
    [
        ("", "torch==2.11.*"),
        ("2.15.0, 2.14.1, 2.11.0", "torch==2.11.*"),
        ("2.15.0, 2.13.0+cpu, 2.13.0", "torch==2.13.0+cpu"),
        ("2.14.0+cpu, 2.11.1+cpu, 2.11.0+cpu", "torch==2.11.1+cpu"),
        ("2.9.1+cpu", "torch==2.11.*"),
    ],
)
def test_without_a_gpu_the_environment_gets_a_cpu_build_of_torch_if_the_index_has_one(
    monkeypatch: pytest.MonkeyPatch, offered: str, chosen: str
) -> None:
    listed = f"torch (2.15.0)\nAvailable versions: {offered}\n"
    monkeypatch.setattr(requirements, "_versions_of_torch", lambda: listed)
    assert requirements.environment_requirements()[-1] == chosen
    monkeypatch.setenv("FLASHBWD_CUDA", "1")
    assert requirements.environment_requirements()[-1] == "torch==2.11.*"


def test_a_cpu_build_of_torch_is_replaced_if_kernels_are_requested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not any(line.startswith("torch") for line in requirements.environment_requirements(CPU_TORCH))
    monkeypatch.setenv("FLASHBWD_CUDA", "1")
    assert requirements.environment_requirements(CPU_TORCH)[-1] == "torch==2.11.*,!=2.13.0+cpu"


def test_a_torch_that_dev_py_did_not_install_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHBWD_CUDA", "1")
    for torch in (toolchain.Torch(tmp_path, "2.13.0+cpu", None), toolchain.Torch(tmp_path, "2.12.0", "13.0")):
        assert not any(line.startswith("torch") for line in requirements.environment_requirements(torch))


@pytest.mark.parametrize(
    ("cuda", "kernels", "usable"),
    [(None, "0", True), ("12.8", "0", True), (None, "1", False), ("12.8", "1", False), ("13.2", "1", True)],
)
def test_an_isolated_build_uses_the_torch_of_its_target_unless_kernels_need_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cuda: str | None, kernels: str, usable: bool
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.12.0'\ncuda = {cuda!r}\n")
    monkeypatch.setattr(toolchain, "_package_dir", lambda name: None)  # pip hides torch from an isolated build
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda key: str(tmp_path))
    monkeypatch.setenv("FLASHBWD_CUDA", kernels)
    torch = requirements.torch_of_target()
    assert (torch is not None) is usable
    asked = [line for line in requirements.build_requirements(torch) if line.startswith("torch")]
    assert (asked == []) is usable


# ---- progress ----

SECONDS = {"a.cu": 60.0, "b.cu": 120.0}


@pytest.mark.parametrize(
    ("units", "limits", "expected"),
    [
        (["a.cu", "b.cu"], (4, 4), 120.0),  # the longest unit
        (["a.cu", "b.cu"], (4, 1), 180.0),  # one nvcc at a time
        (["a.cu"] + [f"{n}.cpp" for n in range(60)], (4, 4), (60 + 60 * progress.HOST_SECONDS) / 4),
        ([], (4, 4), 0.0),
    ],
)
def test_a_build_takes_as_long_as_its_units_and_its_jobs_allow(
    units: list[str], limits: tuple[int, int], expected: float
) -> None:
    assert progress.wall_seconds(units, SECONDS, progress.Limits(*limits)) == pytest.approx(expected)


def test_the_expected_time_of_a_unit_follows_its_number_of_gpus() -> None:
    source = Path("csrc/layer_norm/backward.cu")
    assert native._share(native.Unit(source, native.PORTABLE)) == 1.0
    assert native._share(native.Unit(source, ("9.0",))) == pytest.approx(1 / 3)
    whole = progress.unit_seconds(native.BUDGET, {BUDGETED: 1.0})[BUDGETED]
    assert progress.unit_seconds(native.BUDGET, {BUDGETED: 0.5, "new.cu": 1.0}) == {BUDGETED: whole / 2}


def test_no_unit_that_takes_long_is_compiled_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "unit_seconds", lambda budget, shares: {"long.cu": 60.0, "short.cu": 1.0})
    units = [
        native.Unit(Path(name), ("9.0",) if name.endswith(".cu") else ()) for name in ("short.cu", "a.cpp", "long.cu")
    ]
    assert [str(unit.source) for unit in native.longest_first(units)] == ["long.cu", "a.cpp", "short.cu"]


def test_ninja_starts_units_in_the_order_of_their_expected_times(monkeypatch: pytest.MonkeyPatch) -> None:
    build = native.NativeBuild.__new__(native.NativeBuild)
    build.toolkit = None
    units = [native.Unit(Path("csrc/attention/plan.cpp")), native.Unit(Path("csrc/attention/problem.cpp"))]
    monkeypatch.setattr(native, "longest_first", lambda units: units[::-1])
    text = build._ninja([native.Library(Path("x.so"), units, [], [])], "x")
    assert text.index(": cxx csrc/attention/problem.cpp") < text.index(": cxx csrc/attention/plan.cpp")


def test_progress_shows_the_compiled_unit_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter((0.0, 120.0, 240.0, 300.0))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    shown = progress.Progress(["a.cu", "b.cu", "c.cpp"], SECONDS, progress.Limits(1, 1))
    assert shown.announcement() == "compiling 2 CUDA units and 1 C++ units with 1 jobs (at most 1 of nvcc): about 3 min"
    # The first 60 of 184 expected seconds took 120 seconds here, so the other 124 will take 248.
    assert shown.line("[1/4] nvcc a.cu") == "[1/3] nvcc a.cu, about 4 min left"
    assert shown.line("a.cu(3): warning: unused") == "a.cu(3): warning: unused"
    assert shown.line("[2/4] g++ c.cpp").startswith("[2/3] g++ c.cpp, about ")
    assert shown.line("[3/4] nvcc b.cu") == "[3/3] nvcc b.cu"
    assert shown.line("[4/4] link x.so") == "[4/4] link x.so"


def test_progress_reports_a_build_without_work() -> None:
    assert progress.Progress([], {}, progress.Limits(2, 1)).announcement() == "everything is up to date"


def test_ninja_reports_its_units_and_its_failures(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rule = "rule cxx\n  command = $do\n  description = g++ $in\n"
    edges = "build a.o: cxx a.cpp\n  do = touch a.o\nbuild b.o: cxx b.cpp\n  do = echo broken; false\n"
    (tmp_path / "x.ninja").write_text(rule + edges)
    for name in ("a.cpp", "b.cpp"):
        (tmp_path / name).touch()
    command = [toolchain.find_ninja(), "-j", "1", "-f", "x.ninja"]
    assert progress.outdated(command, tmp_path) == ["a.cpp", "b.cpp"]
    assert progress.run_ninja(command, tmp_path, {}, progress.Limits(1, 1)) != 0
    shown = capfd.readouterr().out
    assert "compiling 2 C++ units" in shown and "[1/2] g++ a.cpp" in shown and "broken" in shown
    assert progress.outdated(command, tmp_path) == ["b.cpp"]


def test_torch_is_not_required_twice() -> None:
    torch = toolchain.find_torch()
    assert not any(line.startswith("torch") for line in requirements.build_requirements(torch))


def test_the_report_of_ptxas_is_parsed() -> None:
    report = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1kPf' for 'sm_80'
ptxas info    : Function properties for _Z1kPf
    40 bytes stack frame, 36 bytes spill stores, 52 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 40 bytes cumulative stack size, 360 bytes cmem[0]
ptxas info    : Compiling entry function '_Z1kPf' for 'sm_90a'
ptxas info    : Function properties for _Z1kPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers
"""
    assert parse_ptxas(report) == [
        {"name": "_Z1kPf", "arch": "sm_80", "stack": 40, "spills": 88, "registers": 32},
        {"name": "_Z1kPf", "arch": "sm_90a", "stack": 0, "spills": 0, "registers": 168},
    ]

"""The audit of built libraries and wheels finds each fault that it checks for, and accepts correct files."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # last: an installed package goes before the one of the tree

from build_tools import toolchain  # noqa: E402
from scripts import audit  # noqa: E402


def says(monkeypatch: pytest.MonkeyPatch, text: str) -> list[tuple[str, ...]]:
    """Make every tool print ``text``; return the list of the commands that are called."""
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(audit, "output", lambda *command: commands.append(command) or text)
    return commands


@pytest.mark.parametrize(
    ("library", "needed", "problems"),
    [
        ("_C.so", ["libtorch_cpu.so", "libc.so.6", "ld-linux-x86-64.so.2"], []),
        ("_C.so", ["libtorch_cuda.so", "libc.so.6"], ["_C.so needs libtorch_cuda.so"]),
        ("_C_cuda.so", ["libtorch_cpu.so", "libtorch_cuda.so", "_C.so", "libm.so.6"], []),
        (
            "_C_cuda.so",
            ["libz.so.1", "libcudart.so.13"],
            ["_C_cuda.so needs libcudart.so.13", "_C_cuda.so needs libz.so.1"],
        ),
    ],
)
def test_a_library_may_need_only_torch_and_system_libraries(monkeypatch, library, needed, problems):
    says(monkeypatch, "\n".join(f" 0x0001 (NEEDED)  Shared library: [{name}]" for name in needed))
    assert audit.dependencies(Path(library)) == problems


def test_a_library_may_export_only_names_of_this_project(monkeypatch):
    says(monkeypatch, "0000000000001000 T flashbwd_open\n0000000000002000 T helper\n                 V weak\n")
    assert audit.exports(Path("_C.so")) == ["_C.so exports helper", "_C.so exports weak"]


def test_tools_are_asked_about_the_defined_symbols_and_dependencies_of_the_library(monkeypatch):
    commands = says(monkeypatch, "")
    audit.dependencies(Path("a/_C.so"))
    audit.exports(Path("a/_C.so"))
    assert commands == [("readelf", "-d", "a/_C.so"), ("nm", "-D", "--defined-only", "a/_C.so")]


@pytest.mark.parametrize(("status", "problems"), [(0, []), (1, ["unstable: at::empty\nsee the log\n"])])
def test_the_output_of_the_abi_tool_becomes_a_problem(monkeypatch, tmp_path, status, problems):
    tool = tmp_path / "torch-abi-audit"
    wanted = "--check torch -v x/_C.so"
    found = 'echo "unstable: at::empty"\necho "see the log" >&2'
    tool.write_text(f'#!/bin/sh\n[ "$*" = "{wanted}" ] || exit 9\n{found}\nexit {status}\n')
    tool.chmod(0o755)
    monkeypatch.setattr(audit.sys, "executable", str(tmp_path / "python"))
    assert audit.stable_abi(Path("x/_C.so")) == problems


def test_a_tool_that_fails_ends_the_audit():
    with pytest.raises(audit.subprocess.CalledProcessError):
        audit.output(sys.executable, "-c", "raise SystemExit(1)")


def test_output_is_what_a_tool_prints_as_text():
    assert audit.output(sys.executable, "-c", "print('found')") == "found\n"


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def places(monkeypatch, tmp_path):
    """Paths at which cuobjdump may be, in order of preference. No file exists there yet."""
    toolkit = type("Toolkit", (), {"root": tmp_path / "toolkit"})()
    monkeypatch.setattr(toolchain, "find_cuda_toolkit", lambda major: (toolkit, "13.0"))
    monkeypatch.setattr(audit.sys, "path", [str(tmp_path / "elsewhere"), str(tmp_path / "packages")])
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    pip = tmp_path / "packages" / "nvidia" / "cu13" / "bin"
    return [folder / "cuobjdump" for folder in (pip, tmp_path / "toolkit" / "bin", tmp_path / "bin")]


@pytest.mark.parametrize("first", [0, 1, 2])
def test_cuobjdump_of_the_package_is_preferred_to_the_toolkits_and_the_path(places, first):
    for path in places[first:]:
        executable(path)
    assert audit.cuobjdump() == str(places[first])


def test_cuobjdump_is_found_without_a_toolkit(places, monkeypatch):
    monkeypatch.setattr(toolchain, "find_cuda_toolkit", lambda major: (None, "none"))
    tool = executable(places[2])
    assert audit.cuobjdump() == str(tool)


def test_an_audit_without_cuobjdump_says_how_to_get_it(places):
    with pytest.raises(SystemExit, match="pip install nvidia-cuda-cuobjdump"):
        audit.cuobjdump()


CHECKS = ("dependencies", "exports", "stable_abi", "code")


@pytest.fixture
def libraries(monkeypatch, tmp_path) -> Path:
    """A folder with both libraries, in which no check finds a fault."""
    for name in ("_C.so", "_C_cuda.so"):
        (tmp_path / name).write_bytes(bytes(2**19))
    for check in CHECKS:
        monkeypatch.setattr(audit, check, lambda library: [])
    return tmp_path


def test_both_libraries_without_a_fault_pass(libraries, capsys):
    assert audit.audit(libraries) == []
    assert capsys.readouterr().out == "_C.so: 0.5 MB\n_C_cuda.so: 0.5 MB\n"


@pytest.mark.parametrize("check", CHECKS)
def test_a_fault_that_any_check_finds_is_a_problem(libraries, monkeypatch, check):
    monkeypatch.setattr(audit, check, lambda library: [f"{check} of {library.name}"])
    checked = ["_C_cuda.so"] if check == "code" else ["_C.so", "_C_cuda.so"]
    assert audit.audit(libraries) == [f"{check} of {name}" for name in checked]


def test_a_folder_without_the_cpu_library_is_a_problem(libraries):
    (libraries / "_C.so").unlink()
    assert audit.audit(libraries) == [f"{libraries} holds no _C.so"]


WHEEL = "flashbwd-0.1.0-py3-none-manylinux_2_28_x86_64.whl"


def wheel_of(folder: Path, name: str = WHEEL, megabytes: int = 0) -> Path:
    path = folder / name
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("flashbwd/_C.so", b"")
        wheel.writestr("padding", bytes(megabytes * 2**20))
    return path


def run(monkeypatch: pytest.MonkeyPatch, target: Path) -> None:
    monkeypatch.setattr(audit.sys, "argv", ["audit.py", str(target)])
    audit.main()


@pytest.mark.parametrize("name", [WHEEL, "flashbwd-0.1.0-py3-none-linux_x86_64.whl"])
def test_a_wheel_for_every_python_passes(libraries, monkeypatch, capsys, name):
    run(monkeypatch, wheel_of(libraries, name, megabytes=40 - 1))
    assert f"{name}: 39.0 MB" in capsys.readouterr().out


def test_a_folder_passes(libraries, monkeypatch, capsys):
    run(monkeypatch, libraries)
    assert capsys.readouterr().out.endswith("audit passed\n")


def test_a_wheel_beyond_the_limit_fails(libraries, monkeypatch):
    with pytest.raises(SystemExit, match=r"^the wheel is larger than 40 MB$"):
        run(monkeypatch, wheel_of(libraries, megabytes=40))


@pytest.mark.parametrize("below", [0, 1])
def test_a_wheel_of_exactly_the_limit_passes(libraries, monkeypatch, below):
    wheel = wheel_of(libraries)
    monkeypatch.setattr(audit, "WHEEL_LIMIT_MB", (wheel.stat().st_size - below) / 2**20)
    if below:
        with pytest.raises(SystemExit, match="the wheel is larger than"):
            run(monkeypatch, wheel)
    else:
        run(monkeypatch, wheel)


def test_a_wheel_for_one_python_fails(libraries, monkeypatch):
    name = "flashbwd-0.1.0-cp311-cp311-linux_x86_64.whl"
    with pytest.raises(SystemExit, match=f"^{name} is not for every Python$"):
        run(monkeypatch, wheel_of(libraries, name))


def test_a_wheel_whose_library_has_a_fault_fails(libraries, monkeypatch):
    monkeypatch.setattr(audit, "exports", lambda library: [f"{library.name} exports helper"])
    with pytest.raises(SystemExit, match=r"^_C\.so exports helper$"):
        run(monkeypatch, wheel_of(libraries))

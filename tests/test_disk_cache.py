"""The cache of compiled modifications on disk."""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
from kit.compiler import needs_nvrtc

from flashbwd.mods import nvrtc

SMALL = 'extern "C" __global__ void f(int* x) { *x = 7; }'
OPTIONS = ["--gpu-architecture=sm_80"]


@needs_nvrtc
def test_an_entry_is_read_and_a_corrupt_entry_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHBWD_CACHE_DIR", str(tmp_path / "cache"))
    calls = []
    real = nvrtc.compile_source
    monkeypatch.setattr(nvrtc, "compile_source", lambda *a: calls.append(1) or real(*a))
    cubin = nvrtc.cubin_of(SMALL, OPTIONS)
    assert nvrtc.cubin_of(SMALL, OPTIONS) == cubin and len(calls) == 1
    (entry,) = (tmp_path / "cache").iterdir()
    whole = entry.read_bytes()
    for broken in (b"", whole[:-1], whole[:40] + bytes([whole[40] ^ 1]) + whole[41:]):
        entry.write_bytes(broken)
        assert nvrtc.cubin_of(SMALL, OPTIONS) == cubin
        assert entry.read_bytes() == whole
    assert len(calls) == 4
    nvrtc.cubin_of(SMALL, ["--gpu-architecture=sm_90"])
    assert len(calls) == 5


@needs_nvrtc
def test_an_entry_gets_its_name_only_when_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHBWD_CACHE_DIR", str(tmp_path))
    written: list[bytes] = []
    real = nvrtc.os.replace

    def replace(source: str, target: Path) -> None:
        assert not target.exists()
        written.append(Path(source).read_bytes())
        real(source, target)

    monkeypatch.setattr(nvrtc.os, "replace", replace)
    cubin = nvrtc.cubin_of(SMALL, OPTIONS)
    (entry,) = tmp_path.iterdir()
    assert written == [entry.read_bytes()] and written[0].endswith(cubin)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace NVRTC; return the list of the sources that are compiled."""
    sources: list[str] = []
    monkeypatch.setattr(nvrtc, "nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(nvrtc, "compile_source", lambda source, _: sources.append(source) or f"of {source}".encode())
    nvrtc._warn_of_no_cache.cache_clear()
    return sources


@pytest.mark.parametrize("cubin", [b"", b"x", b"cubin"], ids=["nothing", "one byte", "more"])
def test_an_entry_without_a_kernel_is_compiled_again(
    cubin: bytes, compiler: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHBWD_CACHE_DIR", str(tmp_path))
    nvrtc.cubin_of("source", OPTIONS)
    (entry,) = tmp_path.iterdir()
    entry.write_bytes(hashlib.sha256(cubin).digest() + cubin)
    assert nvrtc.cubin_of("source", OPTIONS) == (cubin or b"of source")
    assert compiler == ["source"] * (1 if cubin else 2)


def test_a_kernel_is_found_on_disk_and_then_in_memory(
    compiler: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHBWD_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(nvrtc, "_loaded", {})
    monkeypatch.setattr(nvrtc, "load_kernel", lambda *_: 7)
    monkeypatch.setattr(nvrtc.torch.cuda, "device", lambda _: contextlib.nullcontext())

    def where() -> str | None:
        return nvrtc.cache_of("source", "f", 0, "sm_90a")

    assert where() is None and not compiler
    nvrtc.cubin_of("source", nvrtc.compiler_options("sm_90a"))
    assert where() == "disk"
    assert nvrtc.kernel_of("source", "f", 0, 0, "sm_90a") == 7
    assert where() == "memory"
    assert nvrtc.cache_of("source", "f", 1, "sm_90a") == "disk"
    assert nvrtc.cache_of("source", "f", 1, "sm_80") is None
    assert compiler == ["source"]


@pytest.mark.parametrize(("cuda", "major"), [("12.8", 12), ("13.0", 13), (None, 13)])
@pytest.mark.parametrize("found", [0, 1, 2, 3])
def test_nvrtc_has_the_version_of_pytorchs_cuda(
    found: int, cuda: str | None, major: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"libnvrtc.so.{major}"
    installed = [tmp_path / "nvidia" / "cuda_nvrtc" / "lib" / f"{name}.1", tmp_path / "torch" / "lib" / name]
    for path in (*installed, tmp_path / "torch" / "__init__.py"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    paths = [name, *map(str, installed)]
    tried: list[str] = []

    def load(path: str) -> str:
        tried.append(path)
        if path not in paths[found : found + 1]:
            raise OSError("not there")
        return f"loaded {path}"

    monkeypatch.setattr(nvrtc.torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr(nvrtc.torch.version, "cuda", cuda)
    monkeypatch.setattr(nvrtc.ctypes, "CDLL", load)
    if found < 3:
        assert nvrtc._nvrtc.__wrapped__() == f"loaded {paths[found]}"
    else:
        with pytest.raises(nvrtc.CompilationError, match=f"{name} is neither on the library path nor in PyTorch"):
            nvrtc._nvrtc.__wrapped__()
    assert tried == paths[: found + 1]


def _compiles_in_memory(compiler: list[str], message: str) -> None:
    """Assert that two calls both compile, that only the first one warns, and that neither fails."""
    compiler.clear()
    with pytest.warns(UserWarning, match=f"flashbwd: .*not kept on disk: .*{message}.*FLASHBWD_CACHE_DIR"):
        assert nvrtc.cubin_of("source", OPTIONS) == b"of source"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert nvrtc.cubin_of("source", OPTIONS) == b"of source"
    assert compiler == ["source"] * 2


def test_without_a_usable_folder_kernels_are_compiled_in_memory(
    compiler: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHBWD_CACHE_DIR", str(tmp_path / "file" / "cache"))
    _compiles_in_memory(compiler, "Not a directory")


def test_without_a_home_directory_kernels_are_compiled_in_memory(
    compiler: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("FLASHBWD_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(nvrtc.Path, "home", no_home)
    _compiles_in_memory(compiler, "home directory")


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({}, "home/.cache/flashbwd"),
        ({"XDG_CACHE_HOME": "xdg"}, "xdg/flashbwd"),
        ({"XDG_CACHE_HOME": "xdg", "FLASHBWD_CACHE_DIR": "given"}, "given"),
    ],
    ids=["home", "xdg", "given"],
)
def test_the_most_specific_variable_names_the_folder(
    variables: dict[str, str], folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_CACHE_HOME", "FLASHBWD_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    monkeypatch.setattr(nvrtc.Path, "home", lambda: tmp_path / "home")
    assert nvrtc.cache_folder() == tmp_path / folder
    assert (tmp_path / folder).is_dir()


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777], ids=oct)
def test_a_folder_that_others_can_write_to_is_neither_read_nor_written(
    mode: int, compiler: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHBWD_CACHE_DIR", str(tmp_path))
    assert nvrtc.cubin_of("source", OPTIONS) == b"of source"
    (entry,) = tmp_path.iterdir()
    planted = b"planted"
    entry.write_bytes(hashlib.sha256(planted).digest() + planted)
    assert nvrtc.cubin_of("source", OPTIONS) == planted  # the folder is trusted while no other user can write to it
    tmp_path.chmod(mode)
    _compiles_in_memory(compiler, "other users can write")
    assert [path.read_bytes()[32:] for path in tmp_path.iterdir()] == [planted]


def test_a_folder_of_another_user_is_not_used(
    compiler: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHBWD_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(nvrtc.os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    _compiles_in_memory(compiler, "belongs to another user")
    assert list(tmp_path.iterdir()) == []


def test_only_the_user_can_access_a_new_folder(
    compiler: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHBWD_CACHE_DIR", str(tmp_path / "new"))
    before = os.umask(0)
    try:
        nvrtc.cubin_of("source", OPTIONS)
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    nvrtc.cubin_of("source", OPTIONS)
    assert compiler == ["source"]


def test_a_failed_rename_leaves_no_file(compiler: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise OSError("no")

    monkeypatch.setenv("FLASHBWD_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(nvrtc.os, "replace", fails)
    assert nvrtc.cubin_of("source", OPTIONS) == b"of source"
    assert list(tmp_path.iterdir()) == []


def _compile(folder: str, results: Any) -> None:
    os.environ["FLASHBWD_CACHE_DIR"] = folder
    results.put(nvrtc.cubin_of(SMALL, OPTIONS))


@needs_nvrtc
def test_processes_can_share_the_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    workers = [context.Process(target=_compile, args=(str(tmp_path), results)) for _ in range(3)]
    for worker in workers:
        worker.start()
    cubins = {results.get(timeout=60) for _ in workers}
    for worker in workers:
        worker.join()
    assert len(cubins) == 1
    assert [path.suffix for path in tmp_path.iterdir()] == [".cubin"]

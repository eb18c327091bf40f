"""Compiles CUDA source with the NVRTC that ships with PyTorch, caches the result on disk, and loads kernels."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import stat
import tempfile
import threading
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

_MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
# Headers that NVRTC lacks. The kernels need little of them, and get it from csrc/nvrtc/standard.h.
_STANDARD = ("algorithm", "array", "cmath", "cstdint", "string", "type_traits", "cuda.h", "cuda_bf16.h", "cuda_fp16.h")


class CompilationError(Exception):
    """NVRTC is missing or rejects the source. The message contains its log."""


def cache_folder() -> Path | None:
    """Return ``FLASHBWD_CACHE_DIR``, or ``flashbwd`` in the user's cache folder by default.

    Returns None and warns once if the folder belongs to another user or another user can write to it. That user could
    otherwise store a kernel there that this process would run.
    """
    try:
        given = os.environ.get("FLASHBWD_CACHE_DIR")
        cache = os.environ.get("XDG_CACHE_HOME")
        folder = Path(given) if given else Path(cache or Path.home() / ".cache") / "flashbwd"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if not stat.S_ISDIR(status.st_mode):
            reason = f"{folder} is not a folder"
        elif status.st_uid != os.geteuid():
            reason = f"{folder} belongs to another user"
        elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            reason = f"other users can write to {folder}"
        else:
            return folder
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home directory
        reason = str(error)
    _warn_of_no_cache(reason)
    return None


@functools.cache
def _warn_of_no_cache(reason: str) -> None:
    warnings.warn(
        f"flashbwd: compiled modifications are not kept on disk: {reason}; "
        "set FLASHBWD_CACHE_DIR to a folder that only this user can write to",
        stacklevel=2,
    )


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    major = (torch.version.cuda or "13").split(".")[0]
    name = f"libnvrtc.so.{major}"
    site = Path(torch.__file__).parent.parent
    found = [
        name,
        *map(str, sorted(site.glob(f"nvidia/*/lib/{name}*"))),
        *map(str, (site / "torch/lib").glob(f"{name}*")),
    ]
    for path in found:
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise CompilationError(f"{name} is neither on the library path nor in PyTorch's installation")


def nvrtc_version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


@functools.cache
def header_folder() -> Path:
    """Return the folder of the kernels' headers: in an installed package, or beside it in a source tree.

    Raises
    ------
    CompilationError
        If the installation lacks them.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "csrc", package.parent / "csrc"):
        if (folder / "nvrtc" / "standard.h").is_file():
            return folder
    raise CompilationError(f"{package} has no folder csrc with the headers of the kernels; install flashbwd again")


@functools.cache
def header_digest() -> str:
    """Return the SHA-256 of all headers of the kernels, for the keys of what is compiled with them."""
    digest = hashlib.sha256()
    for path in sorted(header_folder().rglob("*.h")) + sorted(header_folder().rglob("*.cuh")):
        digest.update(str(path.relative_to(header_folder())).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def compile_source(source: str, options: Sequence[str]) -> bytes:
    """Compile to a cubin. ``options`` must name a real architecture (sm_XY)."""
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()

    def call(function: str, *arguments: object) -> int:
        return getattr(nvrtc, function)(*arguments)

    headers = _strings(['#include "nvrtc/standard.h"\n'] * len(_STANDARD)), _strings(_STANDARD)
    if call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"flashbwd.cu", len(_STANDARD), *headers):
        raise CompilationError("NVRTC could not be started")
    try:
        failed = call("nvrtcCompileProgram", program, len(options), _strings(options))
        size = ctypes.c_size_t()
        if failed:
            call("nvrtcGetProgramLogSize", program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            call("nvrtcGetProgramLog", program, log)
            raise CompilationError(f"NVRTC: {log.value.decode(errors='replace')}")
        call("nvrtcGetCUBINSize", program, ctypes.byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        call("nvrtcGetCUBIN", program, cubin)
        return cubin.raw
    finally:
        call("nvrtcDestroyProgram", ctypes.byref(program))


def _strings(texts: Iterable[str]) -> ctypes.Array[ctypes.c_char_p]:
    encoded = [text.encode() for text in texts]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def cubin_of(source: str, options: Sequence[str]) -> bytes:
    """Return the cubin of a source from the disk cache, or compile it if the cache has no intact entry.

    An entry starts with the SHA-256 of the rest. It is written under a temporary name and then renamed, so that
    processes that share the folder see a complete entry or none.
    """
    path = _entry_of(source, options)
    if path is None:
        return compile_source(source, options)
    cubin = _read(path)
    if cubin is None:
        cubin = compile_source(source, options)
        with contextlib.suppress(OSError):  # read-only or full disk: the source is compiled again next time
            _write(path, hashlib.sha256(cubin).digest() + cubin)
    return cubin


def _entry_of(source: str, options: Sequence[str]) -> Path | None:
    """Return the file of a source in the disk cache, which need not exist. None if there is no such cache."""
    folder = cache_folder()
    if folder is None:
        return None
    key = hashlib.sha256("\0".join([repr(nvrtc_version()), *options, source]).encode()).hexdigest()
    return folder / f"{key}.cubin"


def _read(path: Path) -> bytes | None:
    """Return the cubin of an entry, or None if there is no intact one."""
    try:
        entry = path.read_bytes()
    except OSError:
        return None
    return entry[32:] if len(entry) > 32 and hashlib.sha256(entry[32:]).digest() == entry[:32] else None


def _write(path: Path, entry: bytes) -> None:
    """Write the file atomically, and leave no temporary file behind."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.stem}.", delete=False) as file:
        try:
            file.write(entry)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


_loaded: dict[tuple[bytes, str, int], int] = {}  # never shrinks, because kernels are never unloaded
_lock = threading.Lock()


def kernel_of(
    source: str,
    name: str,
    shared_bytes: int,
    device: int,
    architecture: str | None = None,
) -> int:
    """Return the CUkernel ``name`` of a source on a device. It is compiled and loaded at the first call.

    The kernel stays loaded until the process ends, because captured CUDA graphs may use it.

    Parameters
    ----------
    architecture : str, optional
        As "sm_90a". Default: that of the device, without features of that device alone.

    Raises
    ------
    CompilationError
        If NVRTC is missing or rejects the source, or the driver cannot load the kernel.
    """
    key = _key(source, name, device)
    with _lock:
        if key not in _loaded:
            options = _options_for(device, architecture)
            with torch.cuda.device(device):
                _loaded[key] = load_kernel(cubin_of(source, options), name, shared_bytes)
        return _loaded[key]


def cache_of(source: str, name: str, device: int, architecture: str | None = None) -> str | None:
    """Return where :func:`kernel_of` finds a kernel: "memory", "disk", or None if it must be compiled.

    Raises
    ------
    CompilationError
        If NVRTC is missing.
    """
    if _key(source, name, device) in _loaded:
        return "memory"
    path = _entry_of(source, _options_for(device, architecture))
    return "disk" if path is not None and _read(path) is not None else None


def _key(source: str, name: str, device: int) -> tuple[bytes, str, int]:
    return hashlib.sha256(source.encode()).digest(), name, device


def _options_for(device: int, architecture: str | None) -> list[str]:
    if architecture is None:
        major, minor = torch.cuda.get_device_capability(device)
        architecture = f"sm_{major}{minor}"
    return compiler_options(architecture)


def includes(*names: str) -> str:
    """Return the first lines of a source that includes these headers. They change whenever a header changes."""
    return "\n".join([f"// headers {header_digest()}", *(f'#include "{name}"' for name in names)])


def compiler_options(architecture: str) -> list[str]:
    """Return the options for a real architecture (sm_XY)."""
    folder = f"--include-path={header_folder()}"
    return [f"--gpu-architecture={architecture}", "-std=c++17", "-default-device", "--fmad=true", folder]


def load_kernel(cubin: bytes, name: str, shared_bytes: int) -> int:
    """Load a cubin and return its CUkernel ``name``, with a limit of ``shared_bytes`` of dynamic shared memory."""
    cuda = ctypes.CDLL("libcuda.so.1")
    library, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    device = ctypes.c_int(torch.cuda.current_device())
    codes = [
        cuda.cuLibraryLoadData(ctypes.byref(library), cubin, None, None, 0, None, None, 0),
    ]
    if codes == [0]:
        codes.append(cuda.cuLibraryGetKernel(ctypes.byref(kernel), library, name.encode()))
    if codes == [0, 0]:
        codes.append(cuda.cuKernelSetAttribute(_MAX_DYNAMIC_SHARED_BYTES, shared_bytes, kernel, device))
    if any(codes) or kernel.value is None:
        raise CompilationError(f"the driver could not load the compiled kernel (CUDA error {codes[-1]})")
    return kernel.value

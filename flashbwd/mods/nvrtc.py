"""CUDA source to machine code with the NVRTC that ships with PyTorch, a cache of it on disk, and loading it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

_MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class CompilationError(Exception):
    """NVRTC is missing or refuses the source; the message has its log."""


def cache_folder() -> Path:
    """``FLASHBWD_CACHE_DIR``, else ``flashbwd`` in the user's cache folder."""
    if given := os.environ.get("FLASHBWD_CACHE_DIR"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flashbwd"


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
    raise CompilationError(f"{name} is neither on the library path nor beside PyTorch")


def nvrtc_version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def compile_source(source: str, options: Sequence[str]) -> bytes:
    """A cubin. ``options`` name a real architecture."""
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()

    def call(function: str, *arguments: object) -> int:
        return getattr(nvrtc, function)(*arguments)

    if call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"flashbwd.cu", 0, None, None):
        raise CompilationError("NVRTC could not be started")
    try:
        flags = [option.encode() for option in options]
        failed = call("nvrtcCompileProgram", program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
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


def cubin_of(source: str, options: Sequence[str]) -> bytes:
    """As :func:`compile_source`, from the cache on disk where it is there and whole.

    An entry begins with the SHA-256 of the rest. It is written under another name and then renamed, so that processes
    that share the folder see all of an entry or nothing.
    """
    key = hashlib.sha256("\0".join([repr(nvrtc_version()), *options, source]).encode()).hexdigest()
    path = cache_folder() / f"{key}.cubin"
    try:
        entry = path.read_bytes()
        if len(entry) > 32 and hashlib.sha256(entry[32:]).digest() == entry[:32]:
            return entry[32:]
    except OSError:
        pass
    cubin = compile_source(source, options)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{key}.", delete=False) as file:
            file.write(hashlib.sha256(cubin).digest() + cubin)
        os.replace(file.name, path)
    except OSError:
        pass  # a read-only or full disk: compiled again next time
    return cubin


def load_kernel(cubin: bytes, name: str, shared_bytes: int) -> int:
    """A CUkernel of a library that stays loaded, allowed ``shared_bytes`` of dynamic shared memory."""
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

"""Access to the library's host C++ code, which is compiled into a module for the tests."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from flashbwd import _ops

BUILT = Path(__file__).resolve().parent.parent / "_built"
NAME = "flashbwd_host_tests"


@lru_cache(maxsize=1)
def load_host() -> ModuleType:
    """Import ``flashbwd_host_tests`` from ``tests/_built``.

    Raises
    ------
    ImportError
        If the module was not built for this Python; the message gives the build command.
    """
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = BUILT / (NAME + suffix)
        if path.exists():
            spec = importlib.util.spec_from_file_location(NAME, path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    raise ImportError(f"{NAME} is not in {BUILT}; build it with: python setup.py build_test_modules")


def dense_problem(host: ModuleType, **changes: Any) -> Any:
    """A dense bfloat16 problem with batch size 2 and grouped heads; ``changes`` override its fields."""
    values = {
        "dtype": host.DType.kBFloat16,
        "bias_dtype": host.DType.kBFloat16,
        "batch": 2,
        "heads": 6,
        "heads_kv": 3,
        "head_dim": 128,
        "head_dim_v": 128,
        "seqlen_q": 300,
        "seqlen_k": 500,
        **changes,
    }
    values.setdefault("total_q", values["batch"] * values["seqlen_q"])
    values.setdefault("total_k", values["batch"] * values["seqlen_k"])
    return _with(host.AttentionProblem(), values)


def device_info(host: ModuleType, **values: Any) -> Any:
    """A description of a GPU, which need not exist."""
    return _with(host.DeviceInfo(), values)


_DTYPES = {"float16": "kFloat16", "bfloat16": "kBFloat16", "float32": "kFloat32", "float64": "kFloat64"}
_DTYPES |= {"int32": "kInt32", "int64": "kInt64", "uint64": "kUInt64", "uint8": "kUInt8", "bool": "kBool"}


def on_gpu(host: ModuleType, tensor: Tensor) -> Any:
    """A description of a tensor as if it were on a GPU."""
    dtype = getattr(host.DType, _DTYPES[str(tensor.dtype).removeprefix("torch.")])
    return host.on_gpu(tensor.data_ptr(), list(tensor.shape), list(tensor.stride()), dtype)


@contextmanager
def planned_for(device: Any) -> Iterator[None]:
    """Make ``plan_attention_backward`` plan for ``device``, a ``device_info`` of a GPU that need not exist.

    Within the context, every tensor is treated as if it were on that GPU.
    """
    host = load_host()
    call = _ops.call

    def call_here(operator: Any, *args: Any, **kwargs: Any) -> Any:
        if operator is not torch.ops.flashbwd.plan_attention_backward:
            return call(operator, *args, **kwargs)
        dout, *others = args
        args = (dout if dout.stride(-1) == 1 else dout.contiguous(), *others)  # the operator does the same
        given = dict(zip(("dout", "q", "k", "v", "out", "softmax_lse"), args, strict=True)) | kwargs
        del given["plan_device"]
        values = {n: on_gpu(host, v) if isinstance(v, Tensor) else v for n, v in given.items() if v is not None}
        return host.plan_of_arguments(_with(host.AttentionArguments(), values), device)

    with mock.patch.object(_ops, "call", call_here):
        yield


def _with(target: Any, values: dict[str, Any]) -> Any:
    for name, value in values.items():
        setattr(target, name, value)
    return target

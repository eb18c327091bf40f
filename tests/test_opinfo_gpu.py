"""The samples that torch ships for its own operators, with overrides on: gradients as good as PyTorch's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kit import tolerance
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map

import flashbwd

pytestmark = pytest.mark.gpu

pytest.importorskip("expecttest", reason="torch's samples need the package expecttest")

#: Operator, and the forward that scaled_dot_product_attention is held to.
OPERATORS = {
    "cudnn": ("nn.functional.scaled_dot_product_attention", SDPBackend.CUDNN_ATTENTION),
    "flash": ("nn.functional.scaled_dot_product_attention", SDPBackend.FLASH_ATTENTION),
    "efficient": ("nn.functional.scaled_dot_product_attention", SDPBackend.EFFICIENT_ATTENTION),
    "default": ("nn.functional.scaled_dot_product_attention", None),
    "flash_operator": ("torch.ops.aten._flash_attention_forward", None),
    "efficient_operator": ("torch.ops.aten._efficient_attention_forward", None),
    "layer_norm": ("nn.functional.layer_norm", None),
    "native_layer_norm": ("native_layer_norm", None),
    "rms_norm": ("nn.functional.rms_norm", None),
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def operator_called(name: str) -> Any:
    from torch.testing._internal.common_methods_invocations import op_db

    return next(info for info in op_db if info.name == name)


def as_float64(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().double().requires_grad_(value.requires_grad)
    return value


def gradients(operator: Any, call: tuple[Any, ...]) -> list[Tensor]:
    """Of everything in a sample that has one, for the same random numbers and the same gradient of the result."""
    leaves = [t for t in tree_leaves(call) if isinstance(t, Tensor) and t.requires_grad]
    torch.manual_seed(0)
    args, kwargs = call
    result = operator(*args, **kwargs)
    out = result if isinstance(result, Tensor) else result[0]
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return list(torch.autograd.grad(out, leaves, dout.to(out.device, out.dtype)))


def samples_of(info: Any, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for sample in info.sample_inputs("cuda", dtype, requires_grad=True):
        yield (sample.input, *sample.args), dict(sample.kwargs)


def check(ours: list[Tensor], stock: list[Tensor], exact: list[Tensor] | None, dtype: torch.dtype) -> None:
    for i, (got, plain) in enumerate(zip(ours, stock, strict=True)):
        assert got.shape == plain.shape and got.stride() == plain.stride() and got.dtype == plain.dtype
        if exact is not None and bool(exact[i].isfinite().all()):
            tolerance.assert_close(got, exact[i], [plain.double()], f"gradient {i}", dtype=dtype)
        else:  # dropout has no float64 form, and the samples' negative eps gives NaN
            near = 2e-2 if dtype != torch.float32 else 1e-4
            torch.testing.assert_close(got, plain, rtol=near, atol=near, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", OPERATORS)
def test_gradients_of_torchs_samples(case: str, dtype: torch.dtype) -> None:
    name, forward = OPERATORS[case]
    info = operator_called(name)
    if dtype not in info.supported_dtypes("cuda"):
        pytest.skip(f"PyTorch has no samples of {dtype}")
    flashbwd.stats(reset=True)
    ran = 0
    for call in samples_of(info, dtype):
        held = contextlib.nullcontext() if forward is None else sdpa_kernel(forward)
        with held:
            try:
                stock = gradients(info.op, call)
            except RuntimeError as error:
                assert "No available kernel" in str(error)  # this forward does not take the sample
                continue
            with flashbwd.enable():
                ours = gradients(info.op, call)
        exact = None
        if not call[1].get("dropout_p") and not name.startswith("torch.ops"):
            exact = gradients(info.op, tree_map(as_float64, call))
        check(ours, stock, exact, dtype)
        ran += 1
    stats = {name: each for name, each in flashbwd.stats(reset=True).items() if each != (0, {})}
    print(f"{case} {dtype}: {ran} samples; {stats}")
    if ran == 0:
        pytest.skip("no sample is taken by this forward")
    assert sum(each.hits for each in stats.values()) > 0

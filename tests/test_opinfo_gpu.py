"""Under the overrides, gradients of the samples that torch ships for its operators are as accurate as PyTorch's."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kit import tolerance
from kit.summary import NO_CASE
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map

import flashbwd

pytestmark = pytest.mark.gpu

pytest.importorskip("expecttest", reason="torch's samples need the package expecttest")

#: The operator, and the forward that scaled_dot_product_attention must use.
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


def as_leaf(value: Any, dtype: torch.dtype | None = None) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().to(dtype or value.dtype).requires_grad_(value.requires_grad)
    return value


def gradients(operator: Any, call: tuple[Any, ...]) -> list[Tensor]:
    """The gradients of all tensors of a sample, for fixed random numbers and a fixed gradient of the result."""
    leaves = [t for t in tree_leaves(call) if isinstance(t, Tensor) and t.requires_grad]
    torch.manual_seed(0)
    args, kwargs = call
    result = operator(*args, **kwargs)
    out = result if isinstance(result, Tensor) else result[0]
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return list(torch.autograd.grad(out, leaves, dout.to(out.device, out.dtype)))


def samples_of(info: Any, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for sample in info.sample_inputs("cuda", dtype, requires_grad=True):
        yield tree_map(as_leaf, ((sample.input, *sample.args), dict(sample.kwargs)))


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Tensor | None = None,
    is_causal: bool = False,
    custom_mask_type: int = 0,
    scale: float | None = None,
    **_: Any,
) -> Tensor:
    """The formula of aten's flash and memory-efficient operators for (B, S, H, D), in plain operators."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    diagonal = k.shape[1] - q.shape[1] if is_causal or custom_mask_type == 2 else 0
    if is_causal or custom_mask_type:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(diagonal + 1), -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)


def plain_form(name: str, operator: Any, call: tuple[Any, ...]) -> Any:
    """A function of the same arguments in plain operators, or None if there is none."""
    _, kwargs = call
    if kwargs.get("dropout_p") or kwargs.get("cu_seqlens_q") is not None:
        return None
    return plain_attention if name.startswith("torch.ops") else operator


def rows_in_use(grad: Tensor, index: int, call: tuple[Any, ...]) -> Tensor:
    """The gradient of q, k or v up to the end of the last packed sequence. PyTorch does not write the rows after it."""
    cu_seqlens = call[1].get("cu_seqlens_q" if index == 0 else "cu_seqlens_k")
    return grad if cu_seqlens is None else grad[:, : int(cu_seqlens[-1])]


def check(ours: Tensor, stock: Tensor, plain: Tensor | None, exact: Tensor | None, dtype: torch.dtype) -> None:
    """Apply the tolerance rule if there is a float64 form; otherwise compare with PyTorch's gradient."""
    assert ours.shape == stock.shape and ours.stride() == stock.stride() and ours.dtype == stock.dtype
    if plain is not None and exact is not None and bool(exact.isfinite().all()):
        if dtype == torch.float32:  # gradients of rows with one column are 0, but their terms are 300 times larger
            near = 1e-4 * max(1.0, float(exact.abs().max())) if exact.numel() else 0.0
            torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=near)
        else:
            tolerance.assert_close(ours, exact, [stock.double(), plain.double()], "gradient", dtype=dtype)
    else:  # a sample with a negative eps has NaN
        near = 2e-2 if dtype != torch.float32 else 1e-3
        largest = max(1.0, float(stock.nan_to_num().abs().max())) if stock.numel() else 1.0
        torch.testing.assert_close(ours, stock, rtol=near, atol=near * largest, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", OPERATORS)
def test_gradients_of_torchs_samples_are_as_accurate_as_pytorchs(case: str, dtype: torch.dtype) -> None:
    name, forward = OPERATORS[case]
    info = operator_called(name)
    if dtype not in info.supported_dtypes("cuda"):
        pytest.skip(f"{NO_CASE}PyTorch has no samples of {dtype}")
    flashbwd.stats(reset=True)
    ran = 0
    for call in samples_of(info, dtype):
        with contextlib.nullcontext() if forward is None else sdpa_kernel(forward):
            try:
                stock = gradients(info.op, call)
            except RuntimeError as error:
                assert "No available kernel" in str(error)  # this forward does not support the sample
                continue
            with flashbwd.enable():
                ours = gradients(info.op, call)
        plain = exact = [None] * len(ours)
        if (form := plain_form(name, info.op, call)) is not None:
            with sdpa_kernel(SDPBackend.MATH):
                plain = gradients(form, call)
                exact = gradients(form, tree_map(functools.partial(as_leaf, dtype=torch.float64), call))
        for i, each in enumerate(zip(ours, stock, plain, exact, strict=True)):
            check(*(grad if grad is None else rows_in_use(grad, i, call) for grad in each), dtype)  # type: ignore[arg-type]
        ran += 1
    stats = {name: each for name, each in flashbwd.stats().items() if each != (0, {})}
    print(f"{case} {dtype}: {ran} samples; {stats}")
    if ran == 0:
        pytest.skip(NO_CASE + "this forward supports no sample")
    assert sum(each.hits for each in stats.values()) > 0

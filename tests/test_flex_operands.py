"""FlexAttention on kernels: what they cannot load is copied, and gradients have the shapes of the inputs.

The reference takes the place of a kernel, so no test needs a GPU. It refuses tensors that TMA cannot load.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flashbwd.flex import backends
from flashbwd.flex.kernel_lists import KernelLists
from flashbwd.flex.tile import Tile
from flashbwd.reference.decoding import DecodingCall
from flashbwd.reference.decoding_backward import decoding_backward

SCALE = 0.3


def kernel(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *_: Any, **options: Any) -> Any:
    for x in (dout, q, k, v, out):
        assert x.shape[0] == q.shape[0] and x.stride(3) == 1
        assert x.shape[3] * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
        assert all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:3])
    heads_first = [x.transpose(1, 2) for x in (q, k, v, out)]
    call = DecodingCall(None, None, options["softmax_scale"])
    *grads, _ = decoding_backward(call, *heads_first, lse, dout.transpose(1, 2), None, [])
    return [grad.transpose(1, 2).to(q.dtype) for grad in grads]


def run(operands: dict[str, Tensor]) -> tuple[Tensor, ...]:
    empty = torch.empty(0)
    lists = KernelLists(empty, empty, empty, True, Tile())
    call = backends.KernelCall(kernel, kernel, {"softmax_scale": SCALE}, lists)
    return call.gradients(dlse=None, **operands)[:3]


def expected(operands: dict[str, Tensor]) -> list[Tensor]:
    x = {name: tensor.double() for name, tensor in operands.items()}
    tensors = (x["query"], x["key"], x["value"], x["out"], x["lse"], x["dout"])
    return list(decoding_backward(DecodingCall(None, None, SCALE), *tensors, None, [])[:3])


def problem(head_dim: int, head_dim_v: int, batch_kv: int = 3, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(head_dim)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    q, dout = random(3, 4, 9, head_dim), random(3, 4, 9, head_dim_v)
    k, v = random(batch_kv, 2, 11, head_dim), random(batch_kv, 2, 11, head_dim_v)
    keys, values = (x.repeat_interleave(2, 1).double() for x in (k, v))
    scores = SCALE * q.double() @ keys.mT
    out, lse = scores.softmax(-1) @ values, scores.logsumexp(-1)
    return {"dout": dout, "query": q, "key": k, "value": v, "out": out.to(dtype), "lse": lse.float()}


def check(operands: dict[str, Tensor]) -> None:
    for name, got, want in zip(("query", "key", "value"), run(operands), expected(operands), strict=True):
        assert got.shape == operands[name].shape
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(1, 1), (4, 4), (37, 37), (8, 30), (41, 64)])
def test_head_dimensions_that_tma_cannot_load_are_padded(head_dim: int, head_dim_v: int) -> None:
    check(problem(head_dim, head_dim_v))


def test_padding_follows_the_bytes_of_an_element() -> None:
    operands = problem(36, 36, dtype=torch.bfloat16)  # 72 bytes: a multiple of 16 needs 40 columns
    assert backends._for_kernel(operands["query"], torch.bfloat16, 3, True).shape[3] == 40
    assert backends._for_kernel(operands["query"], torch.float32, 3, True).shape[3] == 36
    assert [grad.shape[3] for grad in run(operands)] == [36, 36, 36]


@pytest.mark.parametrize("head_dim", [8, 13])
def test_keys_and_values_of_one_batch_get_the_sum_of_the_gradients(head_dim: int) -> None:
    check(problem(head_dim, head_dim, batch_kv=1))


def test_a_broadcast_batch_is_summed_in_fp32() -> None:
    ones = torch.ones(1024, 1, 1, 8, dtype=torch.bfloat16)
    assert bool((backends._like_input(ones, ones[:1]) == 1024).all())


def test_strides_and_pointers_that_tma_cannot_load_are_copied() -> None:
    operands = problem(8, 8)
    odd = (
        operands
        | {
            "query": torch.nn.functional.pad(operands["query"], (0, 1))[..., :8],  # rows of 36 bytes
            "key": operands["key"].mT.contiguous().mT,  # the last dimension is not contiguous
            "value": torch.cat([torch.zeros(1), operands["value"].flatten()])[1:].view_as(operands["value"]),
            "dout": torch.ones(3, 4, 9, 1).expand(-1, -1, -1, 8),
        }
    )
    check(odd)


@pytest.mark.parametrize("layout", ["heads first", "rows first"])
def test_tensors_that_tma_can_load_are_not_copied(layout: str) -> None:
    query = problem(8, 8)["query"]
    if layout == "rows first":
        query = query.transpose(1, 2).contiguous().transpose(1, 2)
    assert backends._for_kernel(query, query.dtype, 3, True).data_ptr() == query.data_ptr()


def test_a_kernel_without_tma_gets_views_of_any_rows() -> None:
    query = torch.nn.functional.pad(problem(5, 5)["query"], (0, 2))[..., :5]
    view = backends._for_kernel(query, query.dtype, 3, False)
    assert view.shape == (3, 9, 4, 5) and view.data_ptr() == query.data_ptr()

"""What FlexAttention caches between calls, and changes of the tensors that its modifications read."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit import decoding as kit
from kit.decoding import Shape
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import BlockMask

import flashbwd
from flashbwd.flex import cache, forward
from flashbwd.flex.backends import KernelCall
from flashbwd.flex.check import check_call
from flashbwd.flex.kernel_lists import UnsupportedError
from flashbwd.flex.tile import Tile
from flashbwd.reference.decoding import DecodingCall

SHAPE = Shape(seqlen_q=40, seqlen_k=40)


def inputs() -> list[Tensor]:
    return [tensor.requires_grad_() for tensor in SHAPE.tensors(torch.float32)]


@pytest.mark.parametrize("written", ["score", "mask", "list"])
def test_the_backward_refuses_tensors_that_changed_after_the_forward(written: str) -> None:
    bias, limit = torch.zeros(40), torch.zeros((), dtype=torch.int32)
    mask = kit.block_mask(lambda b, h, q, k: q >= k + limit, SHAPE, block=16)
    out = flashbwd.flex_attention(*inputs(), lambda s, b, h, q, k: s + bias[k], mask, enable_gqa=True)
    {"score": bias, "mask": limit, "list": mask.kv_indices}[written].add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()  # type: ignore[union-attr]


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set whether PyTorch reports a graph capture. Without a driver, PyTorch could not be asked."""

    def set_to(state: bool) -> None:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state)

    set_to(False)
    return set_to


def test_cached_kernel_lists_need_no_call_of_mask_mod(capturing: Any) -> None:
    calls = []

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        calls.append(None)
        return q >= k

    mask = kit.block_mask(mask_mod, SHAPE, block=16)
    q, k, _ = SHAPE.tensors(torch.float32)
    cache.kernel_lists_of(DecodingCall(None, mask, 1.0), q, k, Tile())
    calls.clear()
    cache.kernel_lists_of(DecodingCall(None, mask, 1.0), q, k, Tile())
    assert not calls


def test_cached_values_are_not_used_for_a_new_tensor_with_the_id_of_a_freed_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every tensor gets the same id here, as if each reused the memory of the one before."""
    monkeypatch.setattr(cache, "id", lambda tensor: 0, raising=False)
    mask = kit.block_mask(lambda b, h, q, k: q >= k, SHAPE, block=16)
    assert cache.kept(mask, "key", [torch.zeros(1)], lambda: "first") == "first"
    assert cache.kept(mask, "key", [torch.zeros(1)], lambda: "second") == "second"


def test_what_was_computed_for_other_data_of_a_tensor_is_not_used() -> None:
    mask, tensor = kit.block_mask(lambda b, h, q, k: q >= k, SHAPE, block=16), torch.zeros(1)
    assert cache.kept(mask, "key", [tensor], lambda: "first") == "first"
    tensor.data = torch.ones(1)  # the version stays
    assert cache.kept(mask, "key", [tensor], lambda: "second") == "second"


def kernel_lists(mask: BlockMask) -> Any:
    q, k, _ = SHAPE.tensors(torch.float32)
    return cache.kernel_lists_of(DecodingCall(None, mask, 1.0), q, k, Tile())


@pytest.mark.parametrize("form", [lambda mod: mod, functools.partial], ids=["closure", "partial"])
def test_a_number_that_mask_mod_reads_is_part_of_its_lists(capturing: Any, form: Any) -> None:
    size = 4
    mask = kit.block_mask(form(lambda b, h, q, k: q - k < size), SHAPE, block=16)
    q, k, v = SHAPE.tensors(torch.float32)

    def bits() -> Any:
        call, _ = check_call(q, k, v, None, mask, None, True, None)
        return cache.kernel_lists_of(call, q, k, Tile()).bits

    first = bits()
    assert bits() is first
    size = 3
    assert not torch.equal(bits(), first)
    size = 4
    assert torch.equal(bits(), first)


def test_lists_of_a_captured_graph_outlive_the_block_mask(capturing: Any) -> None:
    mask = kit.block_mask(lambda b, h, q, k: q >= k, SHAPE, block=16)
    kernel_lists(mask)
    capturing(True)
    entries = weakref.ref(kernel_lists(mask).entries)
    capturing(False)
    del mask
    assert entries() is not None


def test_a_capture_without_an_earlier_call_warns(capturing: Any) -> None:
    mask = kit.block_mask(lambda b, h, q, k: q >= k, SHAPE, block=16)
    capturing(True)
    with pytest.warns(UserWarning, match="slow reference backward"), pytest.raises(cache.UnsupportedError):
        kernel_lists(mask)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("no kernel takes this call with a block mask; sm90: alignment", UnsupportedError),
        ("block_lists has shape (1, 2), expected four dimensions", ValueError),
    ],
)
@pytest.mark.parametrize("method", ["plan", "gradients"])
def test_only_the_refusal_of_all_kernels_leads_to_the_reference(
    message: str, expected: type[Exception], method: str
) -> None:
    def operator(*args: Any, **kwargs: Any) -> Any:
        raise ValueError(message)

    q, k, v = SHAPE.tensors(torch.float32)
    out, lse = torch.empty_like(q), q[..., 0]
    with pytest.raises(expected, match=message[:10]):
        getattr(KernelCall(operator, operator, {}, None), method)(out, q, k, v, out, lse, None)


def test_the_kernel_gets_a_contiguous_copy_of_an_expanded_gradient() -> None:
    def operator(dout: Tensor, *args: Any, **kwargs: Any) -> Any:
        assert dout.stride(-1) == 1
        return args[:3]

    q, k, v = SHAPE.tensors(torch.float32)
    dout = torch.ones(()).expand(q.shape)
    KernelCall(operator, operator, {}, None).gradients(dout, q, k, v, torch.empty_like(q), q[..., 0], None)


@pytest.mark.parametrize("attention", [flashbwd.flex_attention, flashbwd.flex_decoding])
@pytest.mark.parametrize("derive", [lambda w: w.view(2, 2), lambda w: (2 * w).sin().view(2, 2)], ids=["view", "sin"])
def test_captured_tensors_may_depend_on_each_other(derive: Any, attention: Any) -> None:
    q, k, v = SHAPE.tensors(torch.float64)
    w = torch.tensor([0.5, 1.0, 1.5, 2.0], dtype=torch.float64, requires_grad=True)
    other = derive(w)

    def mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s * w[h] + other[h // 2, 0] * torch.sin(i - j)

    dout = torch.randn_like(q)
    (got,) = torch.autograd.grad(attention(q, k, v, mod, enable_gqa=True), w, dout, retain_graph=True)
    (want,) = torch.autograd.grad(kit.oracle(SHAPE, q, k, v, mod)[0], w, dout)
    torch.testing.assert_close(got, want)


def test_vmap_over_keys_alone_agrees_with_separate_calls() -> None:
    q, k, v = SHAPE.tensors(torch.float32)
    keys = torch.stack([k, 2 * k])

    def attend(key: Tensor) -> Any:
        return flashbwd.flex_attention(q, key, v, enable_gqa=True)

    torch.testing.assert_close(torch.vmap(attend)(keys), torch.stack([attend(key) for key in keys]))


def test_torch_func_differentiates_with_a_captured_tensor() -> None:
    q, k, v = SHAPE.tensors(torch.float64)
    factor = torch.linspace(0.5, 1, 4, dtype=torch.float64)

    def total(factor: Tensor) -> Any:
        return flashbwd.flex_attention(q, k, v, lambda s, b, h, i, j: s * factor[h], enable_gqa=True).square().sum()  # type: ignore[union-attr]

    leaf = factor.clone().requires_grad_()
    torch.testing.assert_close(torch.func.grad(total)(factor), torch.autograd.grad(total(leaf), leaf)[0])


def test_a_captured_tensor_may_share_a_buffer_with_the_query() -> None:
    q, k, v = SHAPE.tensors(torch.float32)
    buffer = torch.cat([q.flatten(), torch.ones(4)])
    shared, factor = buffer[:-4].view(q.shape), buffer[-4:]
    got = flashbwd.flex_attention(shared, k, v, lambda s, b, h, i, j: s * factor[h], enable_gqa=True)
    torch.testing.assert_close(got, flashbwd.flex_attention(q, k, v, enable_gqa=True))


def test_pytorchs_forward_is_compiled_for_each_score_mod(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, real = CompileCounter(), torch.compile
    monkeypatch.setattr(forward, "pytorch_has_a_kernel", lambda query: True)
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: real(function, dynamic=dynamic, backend=compiled))
    torch.compiler.reset()
    query, key, value = (x.detach() for x in inputs())
    for n in range(10):
        names: dict[str, Any] = {}
        exec(f"def score_mod(score, b, h, q_idx, kv_idx):\n    return score * {n}.5", names)
        flashbwd.flex_attention(query, key, value, score_mod=names["score_mod"], enable_gqa=True)
    assert compiled.frame_count == 10


class NeedsStages:
    """Stands for a compiled forward that needs at most this number of pipeline stages."""

    def __init__(self, most: int, message: str = "No valid triton configs. OutOfMemoryError: out of resource") -> None:
        self.most, self.message = most, message
        self.tried: list[int | None] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, None]:
        options = rest[3] or {}
        self.tried.append(options.get("num_stages"))
        if options.get("num_stages", 3) > self.most:
            raise RuntimeError(self.message)
        return torch.zeros_like(query), query.new_zeros(query.shape[:3]), None


@pytest.fixture
def compiled_forward(monkeypatch: pytest.MonkeyPatch) -> Callable[[NeedsStages], NeedsStages]:
    """Replaces the compiled forward, which a GPU with Triton would run."""
    monkeypatch.setattr(forward, "pytorch_has_a_kernel", lambda query: True)
    monkeypatch.setattr(forward, "_attempts", {})

    def replace(by: NeedsStages) -> NeedsStages:
        monkeypatch.setattr(torch, "compile", lambda function, dynamic: by)
        return by

    return replace


def test_pytorchs_forward_gets_fewer_stages_if_it_does_not_start(compiled_forward: Any) -> None:
    kernel = compiled_forward(NeedsStages(1))
    q, k, v = (x.detach() for x in inputs())
    mod = lambda s, b, h, i, j: s * 2  # noqa: E731
    for _ in range(2):
        flashbwd.flex_attention(q, k, v, mod, enable_gqa=True)
    assert kernel.tried == [None, 2, 1, 1]


def test_only_the_same_kind_of_kernel_gets_fewer_stages_at_once(compiled_forward: Any) -> None:
    def adds(bias: Tensor) -> Any:
        return lambda s, b, h, i, j: s + bias[h]

    kernel = compiled_forward(NeedsStages(1))
    q, k, v = (x.detach() for x in inputs())
    bias, mod = torch.zeros(4), functools.partial(lambda s, b, h, i, j, factor: s * factor, factor=2)
    mask = kit.block_mask(lambda b, h, q, k: q >= k, SHAPE, block=16)
    others: list[dict[str, Any]] = [
        {},
        {"score_mod": adds(bias)},
        {"score_mod": adds(bias.half())},
        {"score_mod": mod},
        {"score_mod": adds(bias), "block_mask": mask},
    ]
    calls = [(q, k, v, options) for options in others] + [(q[..., :8].clone(), k[..., :8].clone(), v, {})]
    for query, key, value, options in calls:
        flashbwd.flex_attention(query, key, value, enable_gqa=True, **options)
    assert kernel.tried == [None, 2, 1] * len(calls)
    for query, key, value, options in calls:
        flashbwd.flex_attention(query, key, value, enable_gqa=True, **options)
    assert kernel.tried[3 * len(calls) :] == [1] * len(calls)


@pytest.mark.parametrize(
    ("kernel", "options", "tried"),
    [
        (NeedsStages(0), None, [None, 2, 1]),
        (NeedsStages(2), {"num_stages": 4}, [4]),
        (NeedsStages(2), {"fwd_num_stages": 4}, [None]),
        (NeedsStages(2, "another error"), None, [None]),
        (NeedsStages(2, "No valid triton configs. OutOfMemoryError: CUDA out of memory"), None, [None]),
    ],
    ids=["nothing starts", "the user chose", "the user chose for the forward", "another error", "no memory"],
)
def test_the_error_of_pytorchs_forward_is_raised(
    kernel: NeedsStages, options: dict[str, int] | None, tried: list[int | None], compiled_forward: Any
) -> None:
    compiled_forward(kernel)
    q, k, v = (x.detach() for x in inputs())
    with pytest.raises(RuntimeError, match=kernel.message):
        flashbwd.flex_attention(q, k, v, enable_gqa=True, kernel_options=options)
    assert kernel.tried == tried

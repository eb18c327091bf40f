"""Calls of FlexAttention after the first: what they skip, and changes that they must see nevertheless."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit import decoding as kit
from kit.decoding import Shape
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

import flashbwd
from flashbwd.flex import backends, block_mask_checks, check, modifications
from flashbwd.flex.kernel_lists import KernelLists
from flashbwd.flex.tile import Tile
from flashbwd.mods.captures import Recent

SHAPE = Shape(seqlen_q=40, seqlen_k=40)
BIAS = torch.zeros(4)


def operands(seed: int = 0) -> dict[str, Tensor]:
    names = ("query", "key", "value")
    return dict(zip(names, SHAPE.tensors(torch.float32, seed=seed), strict=True))


def captured(mod: Any, values: dict[str, Tensor] | None = None, name: str = "score_mod") -> list[int]:
    """The ids of the tensors that a call finds."""
    of_call = (torch.device("cpu"), torch.float32, values or operands())
    found = modifications.captured_of(name, mod, *of_call)
    return [id(tensor) for tensor in found.tensors]


def causal() -> BlockMask:
    return kit.block_mask(lambda b, h, q, k: q >= k, SHAPE, block=16)


def attend(mask: BlockMask, **changes: Any) -> Any:
    return flashbwd.flex_attention(**operands() | changes, block_mask=mask, enable_gqa=True)


# ---- modifications ----


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each time that a modification is called on scalars."""
    real, found = modifications._call_on_scalars, []

    def counted(*args: Any) -> Any:
        found.append(None)
        return real(*args)

    monkeypatch.setattr(modifications, "_call_on_scalars", counted)
    modifications._known.clear()
    return found


def by_head(first: Tensor, second: Tensor) -> Callable[..., Tensor]:
    return lambda s, b, h, q, k: s + second[h] * first[k % 4]


def test_a_known_modification_is_not_called_and_gives_the_tensors_of_the_call(runs: list[None]) -> None:
    one, two, three = (torch.zeros(4) for _ in range(3))
    assert captured(by_head(one, two)) == [id(two), id(one)]  # in the order of first use
    assert captured(by_head(two, three)) == [id(three), id(two)]
    assert len(runs) == 1


def test_a_tensor_that_a_modification_does_not_read_is_not_captured(runs: list[None]) -> None:
    unread, read = torch.zeros(4), torch.zeros(4)

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + (unread if 1 > 2 else read)[h]

    assert captured(mod) == captured(mod) == [id(read)]
    assert len(runs) == 1


def test_a_mask_mod_and_a_score_mod_are_known_apart(runs: list[None]) -> None:
    def mod(*arguments: Tensor) -> Tensor:
        return arguments[-1] > arguments[-2]

    captured(mod, name="mask_mod")
    with pytest.raises(ValueError, match="score_mod returned bool"):
        captured(mod)


def test_a_modification_that_reads_a_value_on_the_host_is_called_again(runs: list[None]) -> None:
    flag, one, two = torch.ones(()), torch.zeros(4), torch.zeros(4)

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + (one[h] if flag > 0 else two[h])

    assert captured(mod) == [id(flag), id(one)]
    flag.zero_()
    assert captured(mod) == [id(flag), id(two)]


def test_a_modification_that_reads_an_object_is_called_again(runs: list[None]) -> None:
    tables = deque([torch.zeros(4)])
    mod = lambda s, b, h, q, k: s + tables[0][h]  # noqa: E731
    assert captured(mod) == [id(tables[0])]
    tables[0] = torch.zeros(4)
    assert captured(mod) == [id(tables[0])]
    assert len(runs) == 2


def test_a_known_modification_captures_the_tensors_that_a_list_has_now(runs: list[None]) -> None:
    tables = [torch.zeros(4)]
    mod = lambda s, b, h, q, k: s + tables[0][h]  # noqa: E731
    assert captured(mod) == [id(tables[0])]
    tables[0] = torch.zeros(4)
    assert captured(mod) == [id(tables[0])]
    assert len(runs) == 1


def test_a_known_modification_may_not_capture_an_operand_of_a_later_call() -> None:
    values = operands()
    buffer = values["query"].flatten()
    mod = lambda tensor: lambda s, b, h, q, k: s + tensor[h]  # noqa: E731
    captured(mod(torch.zeros(4)), values)
    with pytest.raises(ValueError, match="score_mod reads query"):
        captured(mod(buffer[8:12]), values)


def test_a_change_of_a_constant_is_checked_again() -> None:
    bias: Any = BIAS
    exponent: Any = 1

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + bias[h] if exponent == 1 else bias

    captured(mod)
    exponent = 2
    with pytest.raises(ValueError, match=r"score_mod returned shape \(4,\)"):
        captured(mod)


def test_a_modification_that_failed_fails_again(runs: list[None]) -> None:
    def writes(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        BIAS[h] += 1
        return s

    for _ in range(2):
        with pytest.raises(ValueError, match="score_mod writes to a captured tensor"):
            captured(writes)
    assert len(runs) == 2 and not BIAS.any()


def test_gradients_follow_a_tensor_that_begins_to_require_one() -> None:
    bias = torch.zeros(4)
    mod = lambda s, b, h, q, k: s + bias[h]  # noqa: E731
    values = operands()
    out, lse = flashbwd.flex_attention(**values, score_mod=mod, enable_gqa=True, return_lse=True)
    options: dict[str, Any] = {"score_mod": mod, "enable_gqa": True}
    assert flashbwd.flex_attention_backward(out, *values.values(), out, lse, **options).captured == {}
    bias.requires_grad_()
    assert list(flashbwd.flex_attention_backward(out, *values.values(), out, lse, **options).captured) == ["bias"]


# ---- block masks ----


def test_a_known_block_mask_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = causal()
    attend(mask)
    monkeypatch.setattr(block_mask_checks, "check_block_mask", lambda *_: pytest.fail("checked again"))
    monkeypatch.setattr(block_mask_checks, "check_lists", lambda *_: pytest.fail("read again"))
    attend(mask)


def replaced(name: str, make: Callable[[Tensor], Any]) -> Callable[[BlockMask], None]:
    return lambda mask: setattr(mask, name, make(getattr(mask, name)))


def with_new_data(mask: BlockMask) -> None:
    mask.q_indices.data = torch.zeros(1, 1, 2, 3, dtype=torch.int32)  # type: ignore[union-attr]


# A change of a mask, and the error of the next call.
CHANGES: dict[str, tuple[Callable[[BlockMask], Any], str]] = {
    "an entry": (lambda mask: mask.kv_indices.fill_(9), "block_mask.kv_indices names block 9"),
    "a count": (lambda mask: mask.kv_num_blocks.fill_(7), "block_mask.kv_num_blocks holds the count 7"),
    "another list": (replaced("kv_indices", lambda t: t - 1), "block_mask.kv_indices names block -1"),
    "another shape": (replaced("q_indices", lambda t: t[:, :, :2]), "block_mask.q_indices has shape"),
    "another device": (replaced("q_indices", lambda t: t.to("meta")), "block_mask.q_indices is on meta"),
    "a shape in place": (lambda mask: mask.q_indices.resize_(1, 1, 2, 3), "block_mask.q_indices has shape"),  # type: ignore[union-attr]
    "new data": (with_new_data, "block_mask.q_indices has shape"),
    "block size": (replaced("BLOCK_SIZE", lambda _: (8, 16)), "block_mask.kv_num_blocks has shape"),
    "lengths": (replaced("seq_lengths", lambda _: (40, 48)), "block_mask was made for lengths"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_a_known_block_mask_is_checked(change: str) -> None:
    mask = causal()
    attend(mask)
    CHANGES[change][0](mask)
    with pytest.raises(ValueError, match=CHANGES[change][1]):
        attend(mask)


def test_a_known_block_mask_is_checked_against_each_shape() -> None:
    mask = causal()
    attend(mask)
    with pytest.raises(ValueError, match="block_mask was made for lengths"):
        attend(mask, query=operands()["query"][:, :, :24])
    counts, indices = (t.expand(2, -1, *t.shape[2:]) for t in (mask.kv_num_blocks, mask.kv_indices))
    lists = BlockMask.from_kv_blocks(counts, indices, None, None, 16, mask.mask_mod, (40, 40))
    attend(lists)
    with pytest.raises(ValueError, match=r"block_mask\.kv_num_blocks has shape"):
        attend(lists, **{name: tensor[:1].expand(3, -1, -1, -1) for name, tensor in operands().items()})


def test_lists_that_a_capture_could_not_read_are_checked_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = causal()
    mask.kv_indices.fill_(9)
    query: Any = SimpleNamespace(shape=(2, 4, 40, 16), device=torch.device("cpu"), is_cuda=True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    check._check_block_mask(mask, query, query)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with pytest.raises(ValueError, match=r"block_mask\.kv_indices names block 9"):
        check._check_block_mask(mask, query, query)


# ---- plans of score modifications that are compiled at run time ----


class Planned:
    """A kernel call whose plan names another kernel each time. It keeps the kernels that are launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(backends, "_kernels", Recent(16))
        self.plans = 0
        self.launched: list[int] = []

    def plan(self, *_: Any, **options: Any) -> str:
        assert options["plan_device"] is None  # of tensors on the CPU
        self.plans += 1
        return json.dumps({"backend": "sm90", "config": self.plans})

    def launch(self, _: Tensor, *tensors: Any, **options: Any) -> Any:
        self.launched.append(options["kernel"])
        return tensors[:3]

    def operands(self, _: Tensor, kernel: Any) -> Any:
        return {"kernel": kernel.tile}, []

    def __call__(self, rows: int = 16, dtype: torch.dtype = torch.float32, **changes: Any) -> int:
        sizes = changes.pop("sizes", (2, 4, rows, 8))
        x, lse = torch.zeros(sizes, dtype=dtype), torch.zeros(sizes[:3])
        x = x.transpose(1, 2).contiguous().transpose(1, 2) if changes.pop("rows_first", False) else x
        empty = torch.zeros(changes.pop("entries", 0), 4)
        lists = KernelLists(empty, empty, empty, changes.pop("covers", True), changes.pop("tile", Tile()))
        dlse = lse if changes.pop("dlse", False) else None
        options = {"softmax_scale": 1.0, "deterministic": False, "backend": "auto"} | changes
        score_mod: Any = self
        call = backends.KernelCall(self.launch, self.plan, options, lists, score_mod=score_mod)
        call.gradients(x, x, x, x, x, lse, dlse)
        return self.launched[-1]


def test_equal_calls_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Planned(monkeypatch)
    assert [call(), call(), call(48), call()] == [1, 1, 2, 1]


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 17},
        {"sizes": (4, 2, 16, 8)},
        {"dtype": torch.float16},
        {"rows_first": True},
        {"entries": 1},
        {"covers": False},
        {"tile": Tile(128, 128)},
        {"dlse": True},
        {"deterministic": True},
        {"backend": "sm80"},
        {"allow_tf32": True},
    ],
    ids=str,
)
def test_a_call_that_differs_is_planned_again(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    call = Planned(monkeypatch)
    assert [call(), call(**change), call()] == [1, 2, 1]


def test_a_refusal_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Planned(monkeypatch)
    plan = call.plan
    monkeypatch.setattr(call, "plan", lambda *_, **__: json.dumps({"backend": "reference", "refusals": {"sm90": "no"}}))
    with pytest.raises(backends.UnsupportedError, match="sm90: no"):
        call()
    monkeypatch.setattr(call, "plan", plan)
    assert call() == 1

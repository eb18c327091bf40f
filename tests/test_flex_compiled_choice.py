"""FlexAttention in compiled models: which backwards are replaced, what is counted, and what is kept between calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from kit import compiled as kit
from kit import decoding
from kit.compiled import OURS, PYTORCHS, Compiled, counted
from kit.decoding import Shape
from kit.emission import with_numbers
from torch import Tensor, fx
from torch._inductor import config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils._pytree import tree_map_only

import flashbwd
from flashbwd.flex import backends, graph_operator
from flashbwd.flex.backends import KernelCall
from flashbwd.flex.kernel_lists import KernelLists, UnsupportedError
from flashbwd.flex.score_change import Slopes, score_change_of
from flashbwd.flex.storages import ByStorage
from flashbwd.flex.tile import Tile
from flashbwd.integrations import flex_node, flex_override, flex_pass, inductor

Mod = Callable[..., Tensor]
SHAPE = Shape(batch=2, seqlen_q=96, seqlen_k=96)


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with kit.on_the_cpu(monkeypatch):
        yield


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def softcap(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return 5 * torch.tanh(s / 5)


def leaves(shape: Shape, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [tensor.requires_grad_() for tensor in shape.tensors(dtype)]


def run(compiled: Callable[..., Tensor], inputs: Sequence[Tensor], *others: Any) -> None:
    torch.autograd.grad(compiled(*inputs, *others).float().sin().sum(), inputs)


# ---- on a GPU, as far as a machine without one can tell ----


def as_on_a_gpu(graph: fx.Graph) -> None:
    """Run the pass on a graph whose tensors pretend to be on a GPU."""

    def moved(tensor: Tensor) -> Tensor:
        with FakeTensorMode():
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")

    for node in graph.nodes:
        node.meta["val"] = tree_map_only(Tensor, moved, node.meta.get("val"))
    flex_pass.replace_flex_backwards(graph)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[KernelCall, tuple[Any, ...]]]:
    """The calls that were planned; a kernel computes each."""
    calls: list[tuple[KernelCall, tuple[Any, ...]]] = []

    def plan(call: KernelCall, *arguments: Any) -> dict[str, Any]:
        calls.append((call, arguments))
        return {"backend": "sm90"}

    monkeypatch.setattr(KernelCall, "plan", plan)
    monkeypatch.setattr(backends, "_tile", lambda *_: Tile())
    monkeypatch.setattr(flex_pass, "_COMPUTED_BY_THE_REFERENCE", frozenset())
    return calls


def attention(mod: Any = None, masked: bool = True, shape: Shape = SHAPE, **options: Any) -> Compiled:
    mask = decoding.block_mask(causal, shape, block=32) if masked else None
    return Compiled(lambda *x: flex_attention(*x, mod, mask, enable_gqa=True, **options), as_on_a_gpu)


@pytest.mark.parametrize("masked", [True, False])
def test_a_call_that_a_kernel_computes_is_replaced(masked: bool, planned: list[Any]) -> None:
    compiled = attention(softcap, masked, scale=0.3)
    run(compiled, leaves(SHAPE))
    assert (compiled.count(OURS), compiled.count(PYTORCHS)) == (1, 0)
    assert counted() == (1, {})
    ((call, (*tensors, device)),) = planned
    name = "block_mask_attention_backward" if masked else "attention_backward"
    assert call.operator is getattr(torch.ops.flashbwd, name) and device == 0
    assert call.options == {"softmax_scale": 0.3, "softcap": 5.0}
    dout, query, key, value, out, lse, dlse = tensors
    assert query.shape == dout.shape == out.shape == (2, 4, 96, 16) and key.shape == value.shape == (2, 2, 96, 16)
    assert query.dtype == torch.bfloat16 and query.device.type == "meta"
    assert lse.shape == (2, 4, 96) and lse.dtype == torch.float32 and (dlse is None or dlse.shape == lse.shape)


@pytest.mark.parametrize("masked", [True, False])
def test_any_other_score_mod_is_replaced_and_compiled(masked: bool, planned: list[Any]) -> None:
    compiled = attention(lambda s, b, h, i, j: s * 2 + (i - j), masked)
    run(compiled, leaves(SHAPE))
    assert (compiled.count(OURS), compiled.count(PYTORCHS)) == (1, 0)
    ((call, _),) = planned
    assert call.operator is torch.ops.flashbwd.score_mod_attention_backward
    assert "times(static_cast<float>(score), static_cast<float>(2.0))" in with_numbers(call.score_mod.gradient)


ROUNDING = [{"emulate_precision_casts": True}, {"triton.codegen_upcast_to_fp32": False}]  # options of Inductor


def modified(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.nn.functional.silu(s)


@pytest.mark.parametrize("options", ROUNDING, ids=["emulated", "not_upcast"])
@pytest.mark.parametrize(
    ("mod", "dtype", "replaced"),
    [(modified, torch.bfloat16, 0), (modified, torch.float32, 1), (None, torch.bfloat16, 1)],
    ids=["modified_bf16", "modified_fp32", "causal"],
)
def test_a_forward_that_rounds_values_in_16_bits_keeps_its_backward(
    mod: Mod | None, dtype: torch.dtype, replaced: int, options: dict[str, bool], planned: list[Any]
) -> None:
    compiled = attention(mod)
    with config.patch(options):
        run(compiled, leaves(SHAPE, dtype))
    assert compiled.count(OURS) == replaced
    assert counted() == (replaced, {} if replaced else {"an option of Inductor lets it round values in 16 bits": 1})


# Inductor's passes run while FakeTensorMode is active, where new tensors have no values. With each score_mod: a number
# of the kernel that computes it without a mask.
NUMBERS: dict[str, tuple[Mod, str]] = {
    "hidden_scores": (lambda s, b, h, i, j: torch.where(i >= j, s, float("-inf")), "-FLASHBWD_INFINITY"),
    "hidden_windows": (
        lambda s, b, h, i, j: torch.where((i - j).abs() < 8, s, -torch.inf) * 0.5,
        "-FLASHBWD_INFINITY",
    ),
    "quotients": (lambda s, b, h, i, j: s / 3 + (i - j) / 7, "0.1428571492433548"),
    "slopes": (lambda s, b, h, i, j: s + (j - i) * torch.exp2(-((h + 1) * 8.0 / 5)), "0.20000000298023224"),
    "sixteen_bits": (lambda s, b, h, i, j: s + ((i - j).to(torch.bfloat16) / 3 * 0.3).float(), "0.3333333432674408"),
    "constants": (lambda s, b, h, i, j: s * torch.tensor(0.7) + torch.full((), 2), "0.699999988079071"),
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("masked", [True, False])
def test_the_numbers_of_a_score_mod_are_known_in_a_pass(name: str, masked: bool, planned: list[Any]) -> None:
    mod, number = NUMBERS[name]
    compiled = attention(mod, masked)
    run(compiled, leaves(SHAPE))
    assert counted() == (1, {})
    call = planned[-1][0]
    if masked and name == "slopes":
        assert call.slopes is not None  # an ALiBi of the build
    else:
        assert f"static_cast<float>({number})" in with_numbers(call.score_mod.gradient)


def test_a_score_mod_with_a_captured_tensor_that_requires_a_gradient_is_replaced(planned: list[Any]) -> None:
    bias = torch.zeros(4, requires_grad=True)
    compiled = attention(lambda s, b, h, i, j: s + bias[h])
    inputs = leaves(SHAPE)
    torch.autograd.grad(compiled(*inputs).float().sin().sum(), [*inputs, bias])
    assert (compiled.count(OURS), compiled.count(PYTORCHS)) == (1, 0)
    ((call, _),) = planned
    assert call.score_mod.gradient.slots == {0: 0}


def test_a_deterministic_gradient_of_a_captured_tensor_is_never_pytorchs(planned: list[Any]) -> None:
    """PyTorch's kernel adds it in any order. No kernel of this library computes it, so the reference does."""
    bias = torch.zeros(4, requires_grad=True)
    compiled = attention(lambda s, b, h, i, j: s + bias[h], kernel_options={graph_operator.DETERMINISTIC: True})
    inputs = leaves(SHAPE)
    torch.autograd.grad(compiled(*inputs).float().sin().sum(), [*inputs, bias])
    assert (compiled.count(OURS), compiled.count(PYTORCHS), planned) == (1, 0, [])


slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
ALIBI: dict[str, Mod] = {
    "captured": lambda s, b, h, i, j: s + slopes[h] * (j - i),
    "absolute": lambda s, b, h, i, j: s - (i - j).abs() * slopes[h],
    "formula": lambda s, b, h, i, j: s + (j - i) * torch.exp2(-((h + 1) * 8.0 / 16)),
    "number": lambda s, b, h, i, j: s - 0.05 * (i - j),
    "softcap": lambda s, b, h, i, j: 5 * torch.tanh(s / 5) - slopes[h].exp() * (i - j).abs(),
}
HEADS = torch.arange(1.0, 5.0)
SLOPES = dict.fromkeys(ALIBI, slopes)
SLOPES |= {"formula": torch.exp2(-HEADS / 2), "number": torch.full((4,), 0.05), "softcap": slopes.exp()}


@pytest.mark.parametrize("name", ALIBI)
def test_alibi_is_replaced_and_gets_its_slopes(name: str, planned: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    run_kernel: list[Tensor] = []
    real = graph_operator.gradients

    def gradients(call: Any, query: Tensor, *rest: Any) -> Any:
        change = score_change_of(call.score_mod)
        assert change is not None and change.alibi is not None
        run_kernel.append(Slopes(change.alibi, call.score_mod, query.shape[0], query.shape[1]).tensor(query.device))
        return real(call, query, *rest)

    monkeypatch.setattr(graph_operator, "gradients", gradients)
    compiled = attention(ALIBI[name])
    run(compiled, leaves(SHAPE))
    assert (compiled.count(OURS), compiled.count(PYTORCHS)) == (1, 0)
    ((call, _),) = planned
    assert call.options.get("softcap") == (5.0 if name == "softcap" else None) and call.slopes.shape == (4,)
    torch.testing.assert_close(run_kernel, [SLOPES[name]])


SMALL = Shape(batch=1, seqlen_q=24, seqlen_k=24)  # PyTorch's dense backward runs a cast element by element
PAIRS = torch.zeros(24, 24, requires_grad=True)
DECLINED: dict[str, tuple[str, dict[str, Any]]] = {
    "pairs": (
        "PyTorch's kernel is faster for the gradient of a tensor with an element per pair",
        {"mod": lambda s, b, h, i, j: s + PAIRS[i, j], "shape": SMALL},
    ),
    "prescale": ("PRESCALE_QK rounds the query", {"kernel_options": {"PRESCALE_QK": True}}),
    "backend": ("asks for BACKEND 'FLASH'", {"kernel_options": {"BACKEND": "FLASH"}}),
    "precision": (
        "sets FLOAT32_PRECISION",
        {"kernel_options": {"FLOAT32_PRECISION": "'ieee'"}, "dtype": torch.float32},
    ),
}


@pytest.mark.parametrize("case", sorted(DECLINED))
def test_other_calls_stay_pytorchs_and_are_counted_with_the_reason(case: str, planned: list[Any]) -> None:
    words, given = DECLINED[case]
    options = dict(given)
    inputs = leaves(options.get("shape", SHAPE), options.pop("dtype", torch.bfloat16))
    compiled = attention(**options)
    run(compiled, inputs)
    run(compiled, inputs)
    assert (compiled.count(OURS), compiled.count(PYTORCHS), planned) == (0, 1, [])
    hits, ((reason, times),) = counted().hits, counted().fallbacks.items()
    assert (hits, times) == (0, 1)
    assert words in reason


@pytest.mark.parametrize("head_dim", [16, 128])
def test_the_plan_refuses_with_its_reasons(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_pass, "_COMPUTED_BY_THE_REFERENCE", frozenset())
    shape = Shape(batch=1, seqlen_q=300, seqlen_k=500, head_dim=head_dim)  # several key blocks of the kernel
    compiled = attention(shape=shape)
    run(compiled, leaves(shape, torch.float64))
    assert compiled.count(PYTORCHS) == 1
    (reason,) = counted().fallbacks
    assert reason.startswith("no kernel takes this call with a block mask; short: ")
    assert "; sm90: " in reason and "; sm80: " in reason


def test_pytorch_keeps_masked_calls_if_inductor_records_cuda_graphs(planned: list[Any]) -> None:
    with config.patch({"triton.cudagraphs": True}):
        run(attention(), leaves(SHAPE))
        run(attention(masked=False), leaves(SHAPE))
        run(attention(lambda s, b, h, i, j: s * 2, masked=False), leaves(SHAPE))
    assert len(planned) == 1
    assert counted() == (1, {"CUDA graphs cannot compute the lists of block_mask (mode='reduce-overhead')": 2})


def test_a_graph_in_cpp_stays(planned: list[Any]) -> None:
    with config.patch({"cpp_wrapper": True}):
        run(attention(), leaves(SHAPE))
    assert counted() == (0, {"Inductor's cpp_wrapper calls no operators in Python": 1})


# ---- what the pass does not know ----


@pytest.mark.parametrize(
    ("module", "name", "value", "words"),
    [
        (flex_pass, "_COMPUTED_BY_THE_REFERENCE", frozenset(), "query is on the device cpu"),
        (flex_node, "_ARGUMENTS", ("query", "key"), "has other arguments than the known ones"),
        (flex_node, "_FIELDS_OF_MASK", flex_node._FIELDS_OF_MASK - {"q_indices"}, "has unknown fields: q_indices"),
        (flex_pass, "score_of", None, "the pass failed: TypeError"),
    ],
)
def test_no_graph_fails_because_of_the_pass(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, value: Any, words: str
) -> None:
    monkeypatch.setattr(module, name, value)
    mask = decoding.block_mask(causal, SHAPE, block=32)
    compiled = Compiled(lambda *x: flex_attention(*x, None, mask, enable_gqa=True))
    run(compiled, leaves(SHAPE))
    assert (compiled.count(OURS), compiled.count(PYTORCHS)) == (0, 1)
    (reason,) = counted().fallbacks
    assert words in reason


def test_a_mask_that_holds_a_constant_number_is_replaced() -> None:
    mask = decoding.block_mask(lambda b, h, q, k: q >= k - torch.tensor(3), SHAPE, block=32)
    compiled = Compiled(lambda *x: flex_attention(*x, None, mask, enable_gqa=True))
    run(compiled, leaves(SHAPE))
    assert (compiled.count(OURS), compiled.count(PYTORCHS)) == (1, 0)


def test_a_mask_that_holds_a_constant_tensor_of_several_numbers_stays() -> None:
    mask = decoding.block_mask(lambda b, h, q, k: q >= k - torch.tensor([3, 5])[b % 2], SHAPE, block=32)
    compiled = Compiled(lambda *x: flex_attention(*x, None, mask, enable_gqa=True))
    run(compiled, leaves(SHAPE))
    assert (compiled.count(OURS), compiled.count(PYTORCHS)) == (0, 1)
    (reason,) = counted().fallbacks
    assert "_tensor_constant" in reason


# ---- what is kept between calls ----


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[KernelLists | None]:
    """The lists of each backward, as a kernel would read them. The reference still computes the gradients."""
    found: list[KernelLists | None] = []
    real = graph_operator.gradients

    def gradients(call: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
        lists_of = rest[6]
        if call.block_mask is not None:
            found.append(lists_of(call, query, key, Tile()))
        return real(call, query, key, value, *rest)

    monkeypatch.setattr(graph_operator, "gradients", gradients)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


def documents(document: Tensor) -> BlockMask:
    n = document.numel()
    return create_block_mask(
        lambda b, h, q, k: (document[q] == document[k]) & (q >= k), None, None, n, n, device="cpu", BLOCK_SIZE=32
    )


def two_layers(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    out = flex_attention(q, k, v, None, mask, enable_gqa=True)
    return flex_attention(out.sin(), k, v, None, mask, enable_gqa=True)


def test_layers_and_steps_share_the_lists_of_a_mask(made: list[Any]) -> None:
    document = torch.arange(96) // 40
    mask, compiled = documents(document), Compiled(two_layers)
    for _ in range(2):
        run(compiled, leaves(SHAPE), mask)
    assert len(made) == 4 and all(lists is made[0] for lists in made)
    assert made[0].lists.shape[:2] == (1, 1)  # all batches and heads share them too


def test_lists_are_made_again_after_a_write_and_for_another_mask(made: list[Any]) -> None:
    document = torch.arange(96) // 40
    mask, compiled = documents(document), Compiled(two_layers)
    run(compiled, leaves(SHAPE), mask)
    document.copy_(torch.arange(96) // 33)
    run(compiled, leaves(SHAPE), mask)
    run(compiled, leaves(SHAPE), documents(torch.arange(96) // 50))
    first, second, third = made[0], made[2], made[4]
    assert made == [first, first, second, second, third, third]
    assert first is not second and second is not third
    assert not torch.equal(first.bits, second.bits)


def test_lists_that_the_backward_itself_computes_are_not_kept(made: list[Any]) -> None:
    """Inductor reuses the memory of such lists, and a storage then says nothing about its contents."""
    graph = fx.Graph()
    given = graph.placeholder("given")
    computed = graph.call_function(torch.ops.aten.clone.default, (given,))
    same = graph.call_function(torch.ops.aten.detach.default, (given,))
    assert [flex_pass._is_input(node) for node in (given, computed, same)] == [True, False, True]
    mask, compiled = documents(torch.arange(96) // 40), Compiled(two_layers, computing_lists)
    run(compiled, leaves(SHAPE), mask)
    assert len(made) == 2 and made[0] is not made[1]


def computing_lists(graph: fx.Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=PYTORCHS):
        block_mask = list(node.args[9])
        with graph.inserting_before(node):
            clone = graph.call_function(torch.ops.aten.clone.default, (block_mask[6],))
        clone.meta["val"] = block_mask[6].meta["val"]
        block_mask[6] = clone
        node.update_arg(9, tuple(block_mask))
    flex_pass.replace_flex_backwards(graph)


def test_values_by_storage() -> None:
    kept: ByStorage[object] = ByStorage(2)
    a, b = torch.zeros(4), torch.zeros(4)
    first = kept.get("key", [a, b], object)
    assert kept.get("key", [a.detach(), b], object) is first
    for other in ([b, a], [a[:2], b], [a.view(2, 2), b], [a.clone(), b]):
        assert kept.get("key", other, object) is not first
    first = kept.get("key", [a, b], object)
    assert kept.get("another", [a, b], object) is not first
    assert kept.get("key", [a, b], object) is first
    a.add_(1)
    assert kept.get("key", [a, b], object) is not first
    assert len(kept) == 2
    del a
    kept.get("key", [b], object)
    assert len(kept) == 1


# ---- the reference on a GPU ----


def test_a_call_that_the_reference_computes_after_all_is_counted_and_warned_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    query = torch.empty(1)
    refusal = graph_operator._Refusal(query)
    refusal(UnsupportedError("why"))
    assert not refusal.counted and counted() == (0, {})
    with FakeTensorMode():
        refusal = graph_operator._Refusal(torch.empty(1, device="cuda"))
    with pytest.warns(UserWarning, match="slow reference backward: why"):
        refusal(UnsupportedError("why"))
    assert refusal.counted
    assert counted() == (0, {"why; the reference ran instead of PyTorch's kernel": 1})


# ---- enable() ----


def test_enable_puts_the_pass_into_inductors_configuration() -> None:
    assert config.post_grad_custom_pre_pass is None
    with flashbwd.enable():
        with flashbwd.enable(norms=False):
            pass
        installed = config.post_grad_custom_pre_pass
        assert isinstance(installed, flex_override._Installed) and installed.uuid()
    assert config.post_grad_custom_pre_pass is None and not installed.active
    with flashbwd.enable(attention=False):
        assert config.post_grad_custom_pre_pass is None
    flashbwd.enable()
    flashbwd.disable()
    assert config.post_grad_custom_pre_pass is None


def test_the_pass_of_the_user_runs_first_and_comes_back() -> None:
    graphs: list[fx.Graph] = []
    with config.patch(post_grad_custom_pre_pass=graphs.append):
        with flashbwd.enable():
            installed = config.post_grad_custom_pre_pass
            assert installed.uuid() is None  # nor has the user's pass a key for the cache
            installed(fx.Graph())
            assert len(graphs) == 1
        assert config.post_grad_custom_pre_pass == graphs.append
    own = inductor.FlexGradients()
    with config.patch(post_grad_custom_pre_pass=own), flashbwd.enable():
        key = config.post_grad_custom_pre_pass.uuid()
        assert key and own.uuid() in key
    with config.patch(post_grad_custom_pre_pass=None):
        with flashbwd.enable():
            config.post_grad_custom_pre_pass = own
        assert config.post_grad_custom_pre_pass is own


def test_models_compiled_while_it_is_enabled_are_counted() -> None:
    inputs = leaves(Shape(batch=1, seqlen_q=32, seqlen_k=32), torch.float32)
    with flashbwd.enable():
        compiled = torch.compile(
            lambda *x: flex_attention(*x, enable_gqa=True), backend=kit.inductors_backward(), fullgraph=True
        )
        run(compiled, inputs)
    assert counted() == (1, {})
    run(compiled, inputs)  # it was compiled before disable()
    assert counted() == (2, {})


def test_the_pass_has_a_key_for_inductors_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    key = inductor.FlexGradients().uuid()
    assert key and key == inductor.FlexGradients().uuid()
    monkeypatch.setattr(flex_pass, "_COMPUTED_BY_THE_REFERENCE", frozenset())
    assert inductor.FlexGradients().uuid() != key


def test_the_key_of_the_pass_has_the_forced_backend() -> None:
    key = inductor.FlexGradients().uuid()
    with flashbwd.use_backend("sm90"):
        assert inductor.FlexGradients().uuid() != key
    assert inductor.FlexGradients().uuid() == key

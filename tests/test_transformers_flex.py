"""Models of Transformers with attn_implementation="flex_attention_bwd" agree with eager models."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kit import compiled, tolerance
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import flashbwd.flex.attention as flex
from flashbwd.integrations import transformers as integration
from flashbwd.integrations import transformers_flex
from flashbwd.mods.captures import Captures
from flashbwd.mods.trace import trace

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from test_transformers import (  # noqa: E402
    PACKED,
    VOCABULARY,
    assert_same,
    attention_tensors,
    gradients,
    llama,
    padding_mask,
    tokens,
)

FLEX = integration.FLEX_NAME
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
LAYERS = ["sliding_attention", "full_attention"]


def build(model: str, implementation: str, **settings: Any) -> Any:
    """A model with random weights, which do not depend on the implementation."""
    integration.register()
    torch.manual_seed(0)
    kind = getattr(transformers, model)
    return kind(kind.config_class(**settings, attn_implementation=implementation))


def gemma2(implementation: str) -> Any:
    window = {"sliding_window": 4, "layer_types": LAYERS, "attn_logit_softcapping": 0.05, "query_pre_attn_scalar": 5}
    return build("Gemma2ForCausalLM", implementation, **SIZES, **HEADS, **window, head_dim=8, pad_token_id=0)


def gpt_oss(implementation: str) -> Any:
    window = {"sliding_window": 4, "layer_types": LAYERS, "num_local_experts": 2, "num_experts_per_tok": 1}
    model = build("GptOssForCausalLM", implementation, **SIZES, **HEADS, **window, head_dim=8, pad_token_id=0)
    for layer in model.model.layers:
        nn.init.normal_(layer.self_attn.sinks)
    return model


def llama4(implementation: str) -> Any:
    """Its first layer attends within chunks of 5 tokens; its second layer to all earlier tokens."""
    settings: dict[str, Any] = {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 5}
    settings |= {"num_local_experts": 2, "intermediate_size_mlp": 48, "head_dim": 8, "pad_token_id": 0}
    return build("Llama4ForCausalLM", implementation, **SIZES, **HEADS, **settings)


@pytest.fixture
def backwards(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The block mask of each call whose gradients this library computes."""
    calls = []
    right = flex.gradients

    def counted(call: Any, *args: Any) -> Any:
        calls.append(call.block_mask)
        return right(call, *args)

    monkeypatch.setattr(flex, "gradients", counted)
    return calls


# ---- models ----


def test_a_model_without_padding_agrees_with_eager_in_float64(backwards: list[Any]) -> None:
    assert_same(llama(FLEX).double(), llama("eager").double(), input_ids=tokens())
    assert len(backwards) == 2 and isinstance(backwards[0], BlockMask)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("build", [llama, gemma2, gpt_oss, llama4])
def test_a_model_with_padding_agrees_with_eager(build: Callable[[str], Any], side: str) -> None:
    mask = torch.ones(3, 12, dtype=torch.int64)
    for row, padded in enumerate((0, 5, 11)):
        mask[row, slice(0, padded) if side == "left" else slice(12 - padded, 12)] = 0
    assert_same(build(FLEX), build("eager"), input_ids=tokens(3), attention_mask=mask)


@pytest.mark.parametrize(("build", "masks"), [(llama, 1), (gemma2, 2), (gpt_oss, 2)])
def test_all_layers_with_the_same_kind_of_mask_share_one_block_mask(
    build: Callable[..., Any], masks: int, backwards: list[Any]
) -> None:
    model = build(FLEX, num_hidden_layers=3) if build is llama else build(FLEX)
    gradients(model, model(input_ids=tokens()).logits.sum())
    assert len(backwards) == model.config.num_hidden_layers
    assert len({id(mask) for mask in backwards}) == masks


@pytest.mark.parametrize("build", [llama, gemma2])
def test_position_ids_define_packed_sequences(build: Callable[[str], Any]) -> None:
    positions = torch.cat([torch.arange(5), torch.arange(1), torch.arange(6)])[None]
    ids, model = tokens(1), build(FLEX)
    packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    actual = gradients(model, packed.logsumexp(-1).square().sum())
    apart = torch.cat([build("eager")(input_ids=part).logits for part in ids.split([5, 1, 6], dim=1)], 1)
    torch.testing.assert_close(packed, apart, atol=1e-5, rtol=1e-4)
    eager = build("eager")
    logits = torch.cat([eager(input_ids=part).logits for part in ids.split([5, 1, 6], dim=1)], 1)
    for name, grad in gradients(eager, logits.logsumexp(-1).square().sum()).items():
        torch.testing.assert_close(actual[name], grad, atol=1e-4, rtol=1e-3)


def test_an_encoder_attends_in_both_directions() -> None:
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[1, 8:] = 0
    models = [build("BertForMaskedLM", name, **SIZES, num_attention_heads=4).eval() for name in (FLEX, "eager")]
    assert_same(*models, input_ids=tokens(), attention_mask=mask)


def test_a_position_bias_gets_its_gradient() -> None:
    def t5(name: str) -> Any:
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
        return build("T5ForConditionalGeneration", name, vocab_size=VOCABULARY, **sizes, decoder_start_token_id=0)

    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[1, 8:] = 0
    models = (t5(FLEX), t5("eager"))
    grads = [gradients(m, m(input_ids=tokens(), attention_mask=mask, labels=tokens(2, 5)).loss) for m in models]
    assert any("relative_attention_bias" in name for name in grads[0])
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], atol=1e-5, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


def test_a_block_mask_of_the_caller_is_used(backwards: list[Any]) -> None:
    def prefix(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx <= q_idx) | (kv_idx < 5)

    mask = create_block_mask(prefix, None, None, 12, 12, device="cpu")
    visible = torch.ones(12, 12).tril().bool()
    visible[:, :5] = True
    bias = torch.zeros(1, 1, 12, 12).masked_fill(~visible, -torch.inf)
    grads = []
    for name, given in ((FLEX, mask), ("eager", bias)):
        model = llama(name)
        grads.append(gradients(model, model(input_ids=tokens(), attention_mask=given).logits.logsumexp(-1).sum()))
    assert all(used is mask for used in backwards) and len(backwards) == 2
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], atol=1e-5, rtol=1e-3)


def test_a_mask_function_of_the_caller_is_used() -> None:
    from transformers.masking_utils import create_causal_mask

    image = torch.tensor([0, 0, 1, 1, 1, 0, 0, 2, 2, 0, 0, 0])

    def same_image(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (image[q_idx] == image[kv_idx]) & (image[q_idx] > 0)

    results = []
    for name in (FLEX, "eager"):
        model, ids = llama(name), tokens()
        arguments = {"inputs_embeds": model.model.embed_tokens(ids), "attention_mask": None, "past_key_values": None}
        mask = create_causal_mask(config=model.config, **arguments, or_mask_function=same_image)
        results.append(model(input_ids=ids, attention_mask=mask).logits)
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)


def test_generation_with_a_cache_and_left_padding_agrees_with_eager() -> None:
    ids, mask = tokens(2, 7), torch.ones(2, 7, dtype=torch.int64)
    mask[0, :3] = 0
    kwargs = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    generated = [llama(name).eval().generate(ids, **kwargs) for name in (FLEX, "eager")]
    assert torch.equal(*generated)


def test_a_static_cache_agrees_with_one_forward() -> None:
    """The cache passes its counter as the offset of the queries, and adds to it before the attention runs."""
    ids, model = tokens(2, 12), llama(FLEX).eval()
    cache = transformers.StaticCache(config=model.config, max_cache_len=20)
    with torch.no_grad():
        parts = [model(input_ids=part, past_key_values=cache).logits for part in ids.split([7, 4, 1], dim=1)]
        whole = llama("eager")(input_ids=ids).logits
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("padded", [0, 3])
def test_a_compiled_model_agrees_with_eager(padded: int, backwards: list[Any]) -> None:
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[0, :padded] = 0
    model = torch.compile(llama(FLEX), backend="aot_eager")
    inputs = {"attention_mask": mask} if padded else {}
    results = []
    for each in (model, llama("eager")):
        logits = each(input_ids=tokens(), use_cache=False, **inputs).logits[mask.bool()]
        results.append(gradients(each, logits.logsumexp(-1).square().sum()))
    assert len(backwards) == 2
    for name, grad in results[1].items():
        torch.testing.assert_close(results[0][f"_orig_mod.{name}"], grad, atol=1e-4, rtol=1e-3)


def test_a_compiled_attention_on_a_cpu_runs_between_two_graphs(backwards: list[Any]) -> None:
    graphs = []

    def recorded(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append([node.target for node in module.graph.nodes if node.op == "call_function"])
        return module

    module = nn.Module()

    def doubled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return 2 * transformers_flex.attention_forward(module, 2 * q, k, v, None)[0].transpose(1, 2)

    q, k, v = (tensor.requires_grad_() for tensor in attention_tensors(9, 9))
    out = torch.compile(doubled, backend=recorded)(q, k, v)
    assert_gradients(out, 2 * dense(2 * q, k, v, hidden(torch.ones(9, 9).tril().bool())), q, k, v)
    assert [graph.count(operator.mul) for graph in graphs] == [1, 1] and len(backwards) == 1


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile the attention on the CPU as on a GPU, where it is a part of the graph."""
    monkeypatch.setattr(transformers_flex, "_attend_in_eager_mode", transformers_flex._attend)
    with compiled.on_the_cpu(monkeypatch):
        yield


def assert_in_graph(function: compiled.Compiled, calls: int) -> None:
    assert (function.count(compiled.OURS), function.count(compiled.PYTORCHS)) == (calls, 0)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_model_compiled_for_a_gpu_has_the_gradients_in_its_graph() -> None:
    model, positions = llama(FLEX), torch.cat([torch.arange(5), torch.arange(7)])[None]
    inputs = {"position_ids": positions, "use_cache": False}
    function = compiled.Compiled(lambda ids: model(input_ids=ids, **inputs).logits, fullgraph=False)
    actual = gradients(model, function(tokens(1)).logsumexp(-1).square().sum())
    assert_in_graph(function, 2)
    eager = llama("eager")
    expected = gradients(eager, eager(input_ids=tokens(1), **inputs).logits.logsumexp(-1).square().sum())
    for name, grad in expected.items():
        torch.testing.assert_close(actual[name], grad, atol=1e-4, rtol=1e-3)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("masked", [False, True])
def test_an_attention_compiled_for_a_gpu_is_one_graph(masked: bool) -> None:
    q, k, v = (tensor.requires_grad_() for tensor in attention_tensors(9, 9))
    sinks = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
    visible = torch.ones(1, 1, 9, 9).tril().bool()
    function = compiled.Compiled(
        lambda q, k, v, sinks: attend(visible if masked else None, q, k, v, softcap=0.8, s_aux=sinks)
    )
    expected = dense(q, k, v, hidden(visible), sinks, softcap=0.8)
    assert_gradients(function(q, k, v, sinks), expected, q, k, v, sinks)
    assert_in_graph(function, 1)


@pytest.mark.parametrize("name", [integration.NAME, FLEX])
def test_inference_mode_supports_padding(name: str) -> None:
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[0, :3] = 0
    with torch.inference_mode():
        logits = [llama(n)(input_ids=tokens(), attention_mask=mask).logits[mask.bool()] for n in (name, "eager")]
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-4)


# ---- the attention alone ----


def attend(mask: Any, *tensors: Tensor, **options: Any) -> Tensor:
    out, weights = transformers_flex.attention_forward(nn.Module(), *tensors, mask, **options)
    assert weights is None and out.is_contiguous()
    return out.transpose(1, 2)


def dense(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor | None = None, **options: Any) -> Tensor:
    """The plain formula, with the sinks as one more key whose value is 0."""
    scores = options.get("scaling", q.shape[-1] ** -0.5) * q @ k.mT
    if (softcap := options.get("softcap")) is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + bias
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., : k.shape[2]] @ v


def hidden(visible: Tensor) -> Tensor:
    return torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, -torch.inf)


def assert_gradients(actual: Tensor, expected: Tensor, *tensors: Tensor) -> None:
    torch.testing.assert_close(actual, expected)
    grads = [torch.autograd.grad(out.square().sum(), tensors) for out in (actual, expected)]
    torch.testing.assert_close(*grads)


def test_scaling_softcap_and_sinks_get_the_right_gradients() -> None:
    q, k, v = (tensor.requires_grad_() for tensor in attention_tensors(9, 9))
    v = v[..., :5]
    sinks = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
    options = {"scaling": 0.7, "softcap": 0.8}
    out = attend(None, q, k, v, s_aux=sinks, **options)
    bias = hidden(torch.ones(9, 9).tril().bool())
    assert_gradients(out, dense(q, k, v, bias, sinks, **options), q, k, v, sinks)


def test_sinks_take_everything_of_a_row_that_sees_no_key() -> None:
    q, k, v = (tensor.requires_grad_() for tensor in attention_tensors(4, 4))
    sinks = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    visible = torch.ones(1, 1, 4, 4).tril().bool()
    visible[..., 2, :] = False
    out = attend(visible, q, k, v, s_aux=sinks)
    assert_gradients(out, dense(q, k, v, hidden(visible), sinks), q, k, v, sinks)


@pytest.mark.parametrize("window", [None, 3])
def test_without_a_mask_the_last_query_is_aligned_with_the_last_key(window: int | None) -> None:
    q, k, v = attention_tensors(5, 9)
    visible = torch.ones(5, 9).tril(4).bool()
    if window is not None:
        visible &= torch.ones(5, 9).triu(4 - window + 1).bool()
    out = attend(None, q, k, v, sliding_window=window)
    torch.testing.assert_close(out, dense(q, k, v, hidden(visible)))
    out = attend(None, q, k, v, is_causal=False)
    torch.testing.assert_close(out, dense(q, k, v, torch.zeros(5, 9, dtype=torch.float64)))


MASK_SHAPES = [(2, 2, 5, 9), (1, 1, 5, 9), (2, 1, 1, 9), (1, 2, 5, 16)]


@pytest.mark.parametrize("shape", MASK_SHAPES)
def test_a_boolean_mask_becomes_one_block_mask(shape: tuple[int, ...], backwards: list[Any]) -> None:
    q, k, v = (tensor.requires_grad_() for tensor in attention_tensors(5, 9))
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(3)) > 0.3
    mask[..., 0] = True
    for _ in range(2):
        assert_gradients(attend(mask, q, k, v), dense(q, k, v, hidden(mask[..., :9])), q, k, v)
    assert len({id(used) for used in backwards}) == 1
    mask[..., 4] = ~mask[..., 4]
    assert_gradients(attend(mask, q, k, v), dense(q, k, v, hidden(mask[..., :9])), q, k, v)


@pytest.mark.parametrize("shape", MASK_SHAPES)
def test_any_other_mask_is_added_to_the_scores(shape: tuple[int, ...]) -> None:
    q, k, v = (tensor.requires_grad_() for tensor in attention_tensors(5, 9))
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64, requires_grad=True)
    assert_gradients(attend(bias, q, k, v, is_causal=True), dense(q, k, v, bias[..., :9]), q, k, v, bias)


@pytest.mark.parametrize("shape", MASK_SHAPES)
def test_a_kernel_can_compute_every_score_mod(shape: tuple[int, ...]) -> None:
    """It can be traced, because it reads single elements of what it captures, and has a key, so it is traced once."""
    bias = torch.empty(shape, device="meta")
    for biases in ([bias], [bias, bias[..., :9].contiguous()]):
        mod = transformers_flex._score_mod(0.8, biases)
        assert Captures(mod).key is not None
        trace("score_mod", mod, True)


def test_keys_beyond_the_mask_are_not_read() -> None:
    q, k, v = attention_tensors(5, 16)
    k[:, :, 9:], v[:, :, 9:] = torch.nan, torch.nan
    mask = create_block_mask(lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + 4, None, None, 5, 9, device="cpu")
    expected = dense(q, k[:, :, :9], v[:, :, :9], hidden(torch.ones(5, 9).tril(4).bool()))
    torch.testing.assert_close(attend(mask, q, k, v), expected)


# ---- errors ----


def test_dropout_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dropout is 0\.1, expected 0.*attn_implementation='flashbwd'"):
        attend(None, *attention_tensors(4, 4), dropout=0.1)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2, 4), r"attention_mask has shape \(2, 4\), expected \(1 or 2, 1 or 2, 1 or 4, keys\)"),
        (torch.ones(2, 1, 3, 4), r"attention_mask has shape \(2, 1, 3, 4\), expected \(1 or 2"),
        ([1, 1], "attention_mask is a list, expected a BlockMask, a tensor or None"),
    ],
)
def test_a_mask_of_another_kind_is_an_error(mask: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attend(mask, *attention_tensors(4, 4))


def test_a_transformers_without_block_masks_is_named_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama(FLEX)
    monkeypatch.delattr(transformers.masking_utils, "flex_attention_mask")
    integration.register()  # the other implementation does not need it
    with pytest.raises(ImportError, match=f"Transformers {transformers.__version__} does not have it"):
        model(input_ids=tokens())


def test_a_model_without_flex_attention_is_refused_by_transformers() -> None:
    class Other(transformers.LlamaForCausalLM):
        _supports_flex_attn = False

    integration.register()
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    with pytest.raises(ValueError, match="does not support an attention implementation through torch's flex_attention"):
        Other._from_config(transformers.LlamaConfig(vocab_size=VOCABULARY, **sizes), attn_implementation=FLEX)


# ---- on a GPU, in bf16, where the kernels run ----


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["whole", "left", "right", "packed"])
def test_gradients_on_a_gpu_agree_with_eager(kind: str, device: str = "cuda") -> None:
    ids = tokens(3, 160).to(device)
    mask = padding_mask(ids, kind)
    positions = torch.cat([torch.arange(n, device=device) for n in PACKED]).expand(3, -1)

    def logits(model: Any, name: str) -> Tensor:
        if kind == "packed" and name == FLEX:
            return model(input_ids=ids, position_ids=positions, use_cache=False).logits
        if kind == "packed":
            return torch.cat([model(input_ids=part).logits for part in ids.split(PACKED, dim=1)], dim=1)
        return model(input_ids=ids, attention_mask=None if kind == "whole" else mask).logits

    def run(name: str, dtype: torch.dtype) -> dict[str, Tensor]:
        model = llama(name, hidden_size=256, intermediate_size=256).to(device, dtype)
        return gradients(model, logits(model, name)[mask.bool()].double().logsumexp(-1).sum())

    actual = run(FLEX, torch.bfloat16)
    naive = [run(name, torch.bfloat16) for name in ("eager", "sdpa")]
    for name, expected in run("eager", torch.float32).items():
        tolerance.assert_close(actual[name], expected.double(), [grads[name].double() for grads in naive], name)

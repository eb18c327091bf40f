"""Models of Transformers with attn_implementation="flashbwd" and with swapped norms agree with eager models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit import tolerance
from torch import Tensor, nn

import flashbwd
from flashbwd.integrations import transformers as integration

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

VOCABULARY = 61


def llama(implementation: str, **changes: Any) -> Any:
    integration.register()
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**(sizes | heads | changes), attn_implementation=implementation)
    return transformers.LlamaForCausalLM(config)


def tokens(batch: int = 2, length: int = 12) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(model: Any, other: Any, **inputs: Any) -> None:
    """Assert equal logits of the tokens in use, and equal gradients of a loss over these logits."""
    results = []
    counted = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    for m in (model, other):
        logits = m(**inputs).logits[counted]
        results.append((logits.detach(), gradients(m, logits.logsumexp(-1).square().sum())))
    (logits, grads), (other_logits, other_grads) = results
    torch.testing.assert_close(logits, other_logits, atol=1e-5, rtol=1e-4)
    assert grads.keys() == other_grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, other_grads[name], atol=1e-4, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


def test_a_model_without_padding_agrees_with_eager() -> None:
    assert_same(llama("flashbwd"), llama("eager"), input_ids=tokens())


def test_each_layer_calls_the_attention_of_this_library(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["causal"])
        return flashbwd.attention(*args, **kwargs)

    monkeypatch.setattr(integration, "attention", counted)
    llama("flashbwd")(input_ids=tokens())
    assert calls == [True, True]


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_model_with_a_padding_mask_agrees_with_eager(side: str) -> None:
    mask = torch.ones(3, 12, dtype=torch.int64)
    for row, padded in enumerate((0, 5, 11)):
        mask[row, slice(0, padded) if side == "left" else slice(12 - padded, 12)] = 0
    assert_same(llama("flashbwd"), llama("eager"), input_ids=tokens(3), attention_mask=mask)


@pytest.mark.parametrize("batch", [1, 2])
def test_position_ids_define_packed_sequences(batch: int) -> None:
    positions = torch.cat([torch.arange(5), torch.arange(1), torch.arange(6)])
    ids = tokens(batch)
    model = llama("flashbwd")
    packed = model(input_ids=ids, position_ids=positions.expand(batch, -1)).logits
    apart = [model(input_ids=part).logits for part in ids.split([5, 1, 6], dim=1)]
    torch.testing.assert_close(packed, torch.cat(apart, 1), atol=1e-5, rtol=1e-4)


def test_cu_seq_lens_define_packed_sequences() -> None:
    ids, cu_seqlens = tokens(1), torch.tensor([0, 5, 12], dtype=torch.int32)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    model = llama("flashbwd")
    lengths = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "max_length_q": 7, "max_length_k": 7}
    packed = model(input_ids=ids, position_ids=positions, **lengths).logits
    apart = [model(input_ids=part).logits for part in ids.split([5, 7], dim=1)]
    torch.testing.assert_close(packed, torch.cat(apart, 1), atol=1e-5, rtol=1e-4)


def test_a_mask_of_four_dimensions_is_applied_as_a_bias() -> None:
    mask = torch.ones(12, 12).tril().bool()
    mask[7:, :4] = False
    ids = tokens()
    results = [llama(name)(input_ids=ids, attention_mask=mask[None, None]).logits for name in ("flashbwd", "sdpa")]
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)


def attention_of(mask: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The integration's attention; tensors are (batch, heads, rows, dim)."""
    return integration.attention_forward(nn.Module(), q, k, v, mask)[0].transpose(1, 2)


def attention_tensors(seqlen_q: int, seqlen_k: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(2, 2, n, 8, generator=generator, dtype=torch.float64) for n in (seqlen_q, seqlen_k, seqlen_k)]


def visible_to_causal(mask: Tensor) -> Tensor:
    """The causal mask (batch, 1, rows, rows) of a padding mask."""
    return mask[:, None, None].bool() & torch.ones(mask.shape[1], mask.shape[1]).tril().bool()


def test_a_padding_mask_that_changes_in_place_is_read_again() -> None:
    q, k, v = attention_tensors(9, 9)
    mask = torch.ones(2, 9, dtype=torch.int64)
    for padded in (0, 4, 2):
        mask.fill_(1)
        mask[0, :padded] = 0
        expected = nn.functional.scaled_dot_product_attention(q, k, v, visible_to_causal(mask))
        rows = mask.bool()[:, None, :, None].expand_as(expected)
        torch.testing.assert_close(attention_of(mask, q, k, v)[rows], expected[rows])


def test_position_ids_that_change_in_place_are_read_again() -> None:
    q, k, v = attention_tensors(9, 9)
    positions = torch.arange(9).expand(2, 9).clone()
    for length in (4, 6):  # length of the first of two sequences
        positions.copy_(torch.cat([torch.arange(length), torch.arange(9 - length)]).expand(2, 9))
        out = integration.attention_forward(nn.Module(), q, k, v, None, position_ids=positions)[0].transpose(1, 2)
        parts = [[x.split((length, 9 - length), dim=2)[part] for x in (q, k, v)] for part in (0, 1)]
        expected = [nn.functional.scaled_dot_product_attention(*part, is_causal=True) for part in parts]
        torch.testing.assert_close(out, torch.cat(expected, dim=2))


@pytest.mark.parametrize("kind", ["bool", "bias"])
def test_a_mask_of_four_dimensions_may_be_longer_than_a_static_cache(kind: str) -> None:
    q, k, v = attention_tensors(5, 9)
    mask = torch.ones(2, 1, 5, 16).tril(4).bool()
    mask[1, ..., :2] = False
    expected = nn.functional.scaled_dot_product_attention(q, k, v, mask[..., :9])
    given = mask if kind == "bool" else torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(attention_of(given, q, k, v), expected)


def test_a_static_cache_may_be_longer_than_a_padding_mask() -> None:
    q, k, v = attention_tensors(5, 16)
    k[:, :, 9:], v[:, :, 9:] = torch.nan, torch.nan  # these entries of the cache are not written yet
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[0, :3] = 0
    visible = visible_to_causal(mask)[:, :, -5:]
    expected = nn.functional.scaled_dot_product_attention(q, k[:, :, :9], v[:, :, :9], visible)
    torch.testing.assert_close(attention_of(mask, q, k, v), expected)


def test_generation_with_a_cache_and_left_padding_agrees_with_eager() -> None:
    ids, mask = tokens(2, 7), torch.ones(2, 7, dtype=torch.int64)
    mask[0, :3] = 0
    kwargs = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    generated = [llama(name).eval().generate(ids, **kwargs) for name in ("flashbwd", "eager")]
    assert torch.equal(*generated)


def test_a_sliding_window_is_applied() -> None:
    def mistral(implementation: str) -> Any:
        torch.manual_seed(0)
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 4}
        config = transformers.MistralConfig(**sizes, **heads, attn_implementation=implementation)
        return transformers.MistralForCausalLM(config)

    integration.register()
    assert_same(mistral("flashbwd"), mistral("eager"), input_ids=tokens())


def test_an_encoder_attends_in_both_directions() -> None:
    def bert(implementation: str) -> Any:
        torch.manual_seed(0)
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        config = transformers.BertConfig(**sizes, num_attention_heads=4, attn_implementation=implementation)
        return transformers.BertForMaskedLM(config).eval()

    integration.register()
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[1, 8:] = 0
    assert_same(bert("flashbwd"), bert("eager"), input_ids=tokens(), attention_mask=mask)


def test_register_may_be_called_twice_and_keeps_other_implementations() -> None:
    integration.register()
    integration.register()
    llama("sdpa")
    llama("flashbwd")


def test_softcap_and_sinks_reach_the_attention() -> None:
    q, k, v = (torch.randn(2, 3, 6, 8) for _ in range(3))
    sink = torch.randn(3)
    module = nn.Module()
    out, weights = integration.attention_forward(module, q, k, v, None, softcap=5.0, s_aux=sink, scaling=0.3)
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    expected = flashbwd.attention(*rows, causal=True, softcap=5.0, sink=sink, softmax_scale=0.3)
    assert weights is None and torch.equal(out, expected)


def test_swapped_norms_give_the_same_gradients() -> None:
    model, plain = llama("eager"), llama("eager")
    names = [name for name, module in model.named_modules() if type(module).__name__ == "LlamaRMSNorm"]
    state = list(model.state_dict())
    assert integration.swap_norms(model) == len(names) == 5
    assert list(model.state_dict()) == state
    assert_same(model, plain, input_ids=tokens())
    assert integration.swap_norms(model) == 0


def test_zero_centred_norms_are_recognised() -> None:
    module = transformers.models.gemma.modeling_gemma.GemmaRMSNorm(16)
    nn.init.normal_(module.weight, std=0.2)
    x = torch.randn(3, 16, requires_grad=True)
    (expected,) = torch.autograd.grad(module(x).square().sum(), x)
    assert integration.swap_norms(module) == 1
    (actual,) = torch.autograd.grad(module(x).square().sum(), x)
    torch.testing.assert_close(actual, expected)


def test_torch_norms_are_swapped_and_unknown_norms_are_not() -> None:
    class OddRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return x * x.square().mean(-1, keepdim=True) * self.weight

    model = nn.Sequential(nn.LayerNorm(8), nn.RMSNorm(8), OddRMSNorm(), nn.Linear(8, 8))
    x = torch.randn(5, 8)
    before = model(x)
    assert integration.swap_norms(model) == 2
    assert [type(m) for m in model[:2]] == [flashbwd.LayerNorm, flashbwd.RMSNorm]
    assert type(model[2]) is OddRMSNorm
    torch.testing.assert_close(model(x), before)


# ---- on a GPU, in bf16, where the kernels run ----


PACKED = (70, 1, 89)  # lengths of sequences that share a row


def padding_mask(ids: Tensor, kind: str) -> Tensor:
    """A mask with a different number of padded columns per row, on the left or right; None for any other side."""
    mask = torch.ones_like(ids)
    for row, padded in enumerate((0, 33, 159) if kind in ("left", "right") else ()):
        mask[row, slice(0, padded) if kind == "left" else slice(160 - padded, 160)] = 0
    return mask


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["whole", "left", "right", "packed"])
def test_gradients_on_a_gpu_agree_with_eager(kind: str, device: str = "cuda") -> None:
    ids = tokens(3, 160).to(device)
    mask = padding_mask(ids, kind)
    positions = torch.cat([torch.arange(n, device=device) for n in PACKED]).expand(3, -1)

    def logits(model: Any, name: str) -> Tensor:
        if kind == "packed" and name == "flashbwd":
            return model(input_ids=ids, position_ids=positions).logits
        if kind == "packed":
            return torch.cat([model(input_ids=part).logits for part in ids.split(PACKED, dim=1)], dim=1)
        return model(input_ids=ids, attention_mask=None if kind == "whole" else mask).logits

    def run(name: str, dtype: torch.dtype) -> dict[str, Tensor]:
        model = llama(name, hidden_size=256, intermediate_size=256).to(device, dtype)
        return gradients(model, logits(model, name)[mask.bool()].double().logsumexp(-1).sum())

    actual = run("flashbwd", torch.bfloat16)
    naive = [run(name, torch.bfloat16) for name in ("eager", "sdpa")]
    for name, expected in run("eager", torch.float32).items():
        tolerance.assert_close(actual[name], expected.double(), [grads[name].double() for grads in naive], name)

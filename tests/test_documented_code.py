"""The code in README and docs runs, and computes and prints the right values."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import oracle
from kit.ranks import Ranks
from torch import Tensor

import flashbwd

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

Names = dict[str, Any]
CODE = {
    f"{page.relative_to(ROOT)}-{number}": code
    for page in PAGES
    for number, code in enumerate(BLOCK.findall(page.read_text()))
}


def run(code: str) -> tuple[Names, str]:
    """The variables after a block has run, and its output."""
    names: Names = {"__name__": "documentation"}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "documentation", "exec"), names)
    return names, printed.getvalue()


def close(value: Tensor, reference: Tensor, tolerance: float) -> None:
    error = (value.detach().double() - reference).norm() / reference.norm()
    assert error < tolerance, f"off by {error:.1e} of its norm"


def right_gradients(names: Names, printed: str) -> None:
    """grads.dq, .dk and .dv are the gradients of causal attention for q, k, v and dout."""
    want = oracle.attention(*(names[name] for name in ("q", "k", "v", "dout")), causal=True)
    tolerance = 1e-5 if names["q"].dtype == torch.float32 else 2e-2
    for name in ("dq", "dk", "dv"):
        close(getattr(names["grads"], name), getattr(want, name), tolerance)


def right_gradients_and_shapes(names: Names, printed: str) -> None:
    right_gradients(names, printed)
    assert printed == " ".join(["torch.Size([2, 512, 8, 64])"] * 3) + "\n"


def right_gradients_in_the_workspace(names: Names, printed: str) -> None:
    right_gradients(names, printed)
    assert names["workspace"].nbytes == names["plan"].workspace_bytes


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def right_gradient_of_q(names: Names, printed: str) -> None:
    q, k, v = (names[name].detach().double() for name in "qkv")
    (want,) = torch.autograd.grad(plain_attention(q.requires_grad_(), k, v).square().sum(), q)
    close(names["q"].grad, want, 1e-4)
    assert printed == "torch.Size([2, 512, 8, 64])\n"


def every_backend_named(names: Names, printed: str) -> None:
    plan, lines = names["plan"], printed.splitlines()
    assert lines[0] == f"{plan.backend} {plan.workspace_bytes}"
    refused = dict(re.fullmatch(r"not (\w+): (.+)", line).groups() for line in lines[1:])  # type: ignore[union-attr]
    assert refused == dict(plan.reasons)
    assert {plan.backend, *refused} == {"short", "sm90", "sm80", "reference"}


def counted_by_operator(names: Names, printed: str) -> None:
    listed = re.findall(r"^\| `(_?\w+_backward)` \|", (ROOT / "docs" / "integrations.md").read_text(), re.MULTILINE)
    names = {f"higher_order::{name}" if name.startswith("flex") else f"aten::{name}" for name in listed}
    assert names == flashbwd.stats().keys()
    assert printed == f"{flashbwd.stats()}\n"


def right_gradients_of_the_compiled_model(names: Names, printed: str) -> None:
    model = names["model"]
    got = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    want = torch.autograd.grad(model.double()(torch.ones(8, 64).double()).sum(), list(model.parameters()))
    for gradient, reference in zip(got, want, strict=True):
        torch.testing.assert_close(gradient.double(), reference, atol=1e-4, rtol=1e-4)


def right_gradients_of_the_llama(names: Names, printed: str) -> None:
    model = names["model"]
    assert printed == "5 norms\n"  # two per layer, and the last norm
    got = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.set_attn_implementation("eager")
    model(input_ids=names["tokens"], labels=names["tokens"]).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, atol=1e-5, rtol=1e-3)


def right_gradients_of_the_packed_llama(names: Names, printed: str) -> None:
    """The loss is the mean over the tokens after the first; the documents do not see each other."""
    model = names["model"]
    got = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.set_attn_implementation("eager")
    logits = torch.cat([model(input_ids=document[None]).logits[0] for document in names["documents"]])
    torch.nn.functional.cross_entropy(logits[:-1], names["tokens"][0, 1:]).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, atol=1e-5, rtol=1e-3)


def right_gradients_of_the_shards(names: Names, printed: str) -> None:
    assert printed == "(Shard(dim=2),) (Shard(dim=2),)\n"
    q, k, v = (names[name].full_tensor().detach().double() for name in "qkv")
    (want,) = torch.autograd.grad(plain_attention(q.requires_grad_(), k, v).sum(), q)
    close(names["q"].grad.full_tensor(), want, 1e-4)


def right_gradients_of_the_layer(names: Names, printed: str) -> None:
    assert printed == f"{flashbwd.stats()}\n"
    flashbwd.disable()
    layer = names["layer"]
    got = [parameter.grad.clone() for parameter in layer.parameters()]
    assert all(bool(gradient.isfinite().all()) for gradient in got)
    assert sum(gradient.abs().sum().item() for gradient in got) > 0


def right_gradient_in_a_window(names: Names, printed: str) -> None:
    q, k, v = (names[name].detach() for name in "qkv")
    want = oracle.attention(q, k, v, torch.ones_like(q), causal=True, window_size=(128, 0))
    close(names["q"].grad, want.dq.double(), 1e-4)


def right_shape_of_the_block(names: Names, printed: str) -> None:
    assert names["block"](names["x"]).shape == (2, 128, 64)
    assert all(parameter.grad is not None for parameter in names["block"].parameters())


def losses_that_fall(names: Names, printed: str) -> None:
    losses = names["losses"]
    assert len(losses) == 5 and losses[-1] < losses[0]
    assert re.findall(r"^(\w+::\w+):", printed, re.MULTILINE) == list(flashbwd.stats())


def packed_output_of_each_document(names: Names, printed: str) -> None:
    assert printed == "torch.Size([256, 64])\n"
    alone = names["layer"](names["x"][70:75][None])[0]
    torch.testing.assert_close(names["out"][70:75], alone, atol=1e-5, rtol=1e-4)
    assert names["x"].grad is not None


def equal_gradients(names: Names, printed: str) -> None:
    assert printed == "True\n"


def right_gradient_of_the_bias(names: Names, printed: str) -> None:
    assert printed == "torch.Size([1, 4, 128, 128])\n"
    q, k, v, out = (names[name].detach() for name in ("q", "k", "v", "out"))
    want = oracle.attention(q, k, v, 2 * out, attn_bias=names["bias"].detach())
    close(names["bias"].grad, want.dbias.double(), 1e-4)


def right_gradient_of_the_triangle_bias(names: Names, printed: str) -> None:
    assert printed == "torch.Size([1, 1, 4, 16, 16])\n"
    q, k, v, out = (names[name].detach()[0].transpose(1, 2) for name in ("q", "k", "v", "out"))
    mask, bias = names["mask"][0, :, 0, 0], names["bias"].detach()[0]
    want = oracle.attention(q, k, v, 2 * out, attn_bias=bias, key_mask=mask)
    close(names["bias"].grad[0], want.dbias.double(), 1e-4)


def right_gradient_of_the_evoformer_pairs(names: Names, printed: str) -> None:
    assert printed == "torch.Size([1, 1, 4, 16, 16])\n"
    q, k, v, out = (names[name].detach()[0] for name in ("q", "k", "v", "out"))
    shown, bias = names["hidden"][0, :, 0, 0] == 0, names["pairs"].detach()[0]
    want = oracle.attention(q, k, v, 2 * out, attn_bias=bias, key_mask=shown)
    close(names["pairs"].grad[0], want.dbias.double(), 1e-4)


def scores_of_the_keys_in_use(names: Names, printed: str) -> None:
    assert printed == "torch.Size([2, 8, 1, 64])\n"
    query, key, value, slopes = (names[name].double() for name in ("query", "key", "value", "slopes"))
    keys, values = (x[:, :, :300].repeat_interleave(4, 1) for x in (key, value))
    scores = query @ keys.transpose(2, 3) / 8 - slopes.view(1, 8, 1, 1) * (299 - torch.arange(300))
    close(names["out"], scores.softmax(-1) @ values, 1e-4)


def right_gradient_of_both_alibis(names: Names, printed: str) -> None:
    """The first call has no mask and the second is causal; their gradients are added."""
    q, k, v, slopes = (names[name].detach().double() for name in ("q", "k", "v", "slopes"))
    scores = q.requires_grad_() @ k.transpose(2, 3) / 32**0.5
    distance = torch.arange(256).view(-1, 1) - torch.arange(256)
    alibi = scores - slopes.view(4, 1, 1) * distance.abs()
    out = alibi.softmax(-1) @ v + alibi.masked_fill(distance < 0, -math.inf).softmax(-1) @ v
    (want,) = torch.autograd.grad(out.sum(), q)
    close(names["q"].grad, want, 1e-4)


def right_attention_of_packed_documents(names: Names, printed: str) -> None:
    """The gathered output and the gradients equal those of one device for these documents."""
    rows = names["hidden"].view(-1, 4, 16)
    lengths = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), names["cu_seqlens"].int())
    want = oracle.attention(rows, rows, rows, torch.ones_like(rows), causal=True, **lengths)
    close(names["whole"], want.out, 1e-5)
    for name in ("dq", "dk", "dv"):
        close(names[name[1]].grad, names["split"].take(getattr(want, name)), 1e-5)


def right_attention_of_a_split_prefix(names: Names, printed: str) -> None:
    """The gathered output and the gradients equal those of one device for this mask."""
    rows = names["hidden"].detach().double()
    q, k, v = (rows.clone().requires_grad_() for _ in range(3))
    index = torch.arange(1024)
    visible = (index[:, None] >= index) | (index < 300)
    want = (q @ k.transpose(2, 3) / 4.0).masked_fill(~visible, -torch.inf).softmax(-1) @ v
    want.sum().backward()
    close(names["whole"], want, 1e-5)
    for name, whole in (("q", q), ("k", k), ("v", v)):
        close(names[name].grad, names["split"].take(whole.grad, 2), 1e-5)


def gradients_of_squares(names: Names, wanted: Tensor, score: Callable[[Tensor], Tensor]) -> Tensor:
    """The gradient of the sum of squares of softmax(score(q k^T)) v in a float64 tensor, by autograd."""
    q, k, v = (names[name].detach().double() for name in ("q", "k", "v"))
    q = wanted if wanted.shape == q.shape else q
    probabilities = score(q @ k.transpose(-1, -2) / 32**0.5).softmax(-1)
    return torch.autograd.grad((probabilities @ v).square().sum(), wanted)[0]


def right_gradient_within_documents(names: Names, printed: str) -> None:
    same = names["document"][:, None] == names["document"]
    mask = same & torch.ones(256, 256, dtype=torch.bool).tril()
    q = names["q"].detach().double().requires_grad_()
    close(names["q"].grad, gradients_of_squares(names, q, lambda s: s.masked_fill(~mask, -torch.inf)), 1e-5)
    assert printed == "torch.Size([1, 4, 256, 32])\n"


def right_gradient_of_relative_positions(names: Names, printed: str) -> None:
    distance = torch.arange(256)[:, None] - torch.arange(256) + 255
    bias = names["bias"].detach().double().requires_grad_()
    close(names["bias"].grad, gradients_of_squares(names, bias, lambda s: s + bias[:, distance]), 1e-5)
    assert printed == "torch.Size([4, 511])\n"


def right_gradients_of_a_bias(names: Names, printed: str) -> None:
    bias, q = (names[name].detach().double().requires_grad_() for name in ("bias", "q"))
    scores = q @ names["k"].double().mT * q.shape[-1] ** -0.5 + bias
    want = torch.autograd.grad((scores.softmax(-1) @ names["v"].double()).square().sum(), [bias, q])
    close(names["bias"].grad, want[0], 1e-5)
    close(names["q"].grad, want[1], 1e-5)


def right_gradient_of_a_compiled_mask(names: Names, printed: str) -> None:
    q, k, v = (names[name].detach().double() for name in "qkv")
    hidden = torch.ones(1024, 1024, dtype=torch.bool, device=q.device).triu(1)
    scores = q.requires_grad_() @ k.mT * q.shape[-1] ** -0.5
    out = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    close(names["q"].grad, torch.autograd.grad(out.square().sum(), q)[0], 2e-2)
    assert printed.startswith("OperatorStats(hits=")


CHECKS: dict[str, Callable[[Names, str], None]] = {
    "README.md-0": right_gradients_of_the_layer,
    "README.md-1": right_gradient_in_a_window,
    "docs/getting_started.md-0": right_gradient_of_q,
    "docs/getting_started.md-1": right_shape_of_the_block,
    "docs/how_to/backward_alone.md-0": right_gradients_and_shapes,
    "docs/how_to/backward_alone.md-1": right_gradients,
    "docs/how_to/backward_alone.md-2": right_gradients,
    "docs/how_to/backward_alone.md-3": every_backend_named,
    "docs/integrations.md-0": counted_by_operator,
    "docs/integrations.md-1": right_gradients_of_the_compiled_model,
    "docs/integrations.md-2": right_gradients_of_the_shards,
    "docs/integrations.md-3": right_gradients_of_the_llama,
    "docs/integrations.md-4": right_gradients_of_the_packed_llama,
    "docs/tutorials/bias_gradients.md-0": right_gradient_of_the_bias,
    "docs/tutorials/bias_gradients.md-1": right_gradient_of_the_triangle_bias,
    "docs/tutorials/bias_gradients.md-2": right_gradient_of_the_evoformer_pairs,
    "docs/tutorials/decoding.md-0": scores_of_the_keys_in_use,
    "docs/tutorials/deterministic.md-0": equal_gradients,
    "docs/tutorials/flex_attention.md-0": right_gradient_within_documents,
    "docs/tutorials/flex_attention.md-1": right_gradient_of_relative_positions,
    "docs/tutorials/flex_attention.md-2": right_gradients_of_a_bias,
    "docs/tutorials/flex_attention.md-3": right_gradient_of_both_alibis,
    "docs/tutorials/flex_attention.md-4": right_gradient_of_a_compiled_mask,
    "docs/tutorials/packed_documents.md-0": packed_output_of_each_document,
    "docs/tutorials/transformers.md-0": losses_that_fall,
    "docs/scale.md-0": right_attention_of_packed_documents,
    "docs/scale.md-1": right_attention_of_a_split_prefix,
    "docs/workspace.md-0": right_gradients_in_the_workspace,
}
NEEDED_PACKAGES = ("flash_attn", "transformers")


def blocks(distributed: bool) -> list[Any]:
    found = []
    for name, code in CODE.items():
        missing = [p for p in NEEDED_PACKAGES if f"import {p}" in code or f"from {p}" in code]
        marks = [
            pytest.mark.skip(reason=f"needs the package {package}")
            for package in missing
            if importlib.util.find_spec(package) is None
        ]
        if 'device="cuda"' in code:
            marks.append(pytest.mark.gpu)  # type: ignore[arg-type]
        if ("torchrun" in code) == distributed:
            found.append(pytest.param(name, id=name, marks=marks))
    return found


def test_every_block_has_a_check_of_what_it_computes():
    assert CHECKS.keys() == CODE.keys()


@pytest.mark.parametrize("name", blocks(distributed=False))
def test_a_python_block_computes_what_the_page_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    CHECKS[name](*run(CODE[name]))


def _on_a_rank(name: str) -> None:
    torch.manual_seed(0)
    # The processes communicate through gloo, so the block must run on the CPU.
    code = CODE[name].replace('"cuda" if torch.cuda.is_available() else "cpu"', '"cpu"')
    CHECKS[name](*run(code))


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo")
@pytest.mark.parametrize("name", blocks(distributed=True))
def test_a_python_block_for_two_devices_computes_what_the_page_says(name: str, tmp_path: Path) -> None:
    with Ranks(2, tmp_path) as ranks:
        ranks.run(_on_a_rank, name)


def test_the_block_for_compiled_models_compiles_with_all_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the passes replace nothing, so the gradients do not show whether the block uses them."""
    given: Names = {}

    def eager(model: Any, **arguments: Any) -> Any:
        given.update(arguments)
        return model

    monkeypatch.setattr(torch, "compile", eager)
    names, _ = run(CODE["docs/integrations.md-1"])
    assert {type(each) for each in given["options"].values()} == {
        names["inductor"].NormsOfBranches,
        names["inductor"].FlexGradients,
        names["inductor"].GradientsInOne,
    }


def test_no_python_code_is_outside_of_the_blocks_that_run() -> None:
    for page in PAGES:
        text = BLOCK.sub("", page.read_text())
        assert re.findall(r"^    (?:import [\w.]+|from [\w.]+ import .+)$", text, re.MULTILINE) == [], page.name


def test_the_readme_starts_with_enable_and_calls_nothing_private() -> None:
    shown = [code for name, code in CODE.items() if name.startswith("README.md")]
    assert "flashbwd.enable()" in shown[0] and "flashbwd.stats()" in shown[0]
    assert not any("torch.ops" in code or "._" in code for code in shown)

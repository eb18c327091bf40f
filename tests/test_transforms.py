"""Forward mode and torch.func: every function and operator has the derivative or raises. None ignores a tangent."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import flashbwd
import flashbwd.integrations.inductor  # defines an operator

Function = Callable[..., Any]

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# vmap has no rule for the operators, so it calls them once per sample and warns that this is slow.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


def some(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def attention_inputs() -> dict[str, Tensor]:
    q, k, v = some(2, 4, 2, 8), some(2, 5, 2, 8), some(2, 5, 2, 6)
    return {"q": q, "k": k, "v": v, "attn_bias": some(1, 2, 4, 5), "sink": some(2)}


def attention_backward_inputs() -> dict[str, Tensor]:
    given = attention_inputs()
    out, lse = flashbwd.attention(**given, return_lse=True)
    return {"dout": torch.ones_like(out), **given, "out": out, "softmax_lse": lse, "dlse": torch.ones_like(lse)}


X, GAMMA, ROWS = some(3, 8), some(8), some(3)
NORM = {"x": X, "gamma": GAMMA, "beta": GAMMA + 1}
DROPOUT = {"x": X, "residual": X * 2, "gamma": GAMMA}

# Each public function of tensors, with its differentiable arguments. GRADIENTS has the functions that give gradients.
DIFFERENTIABLE: dict[str, tuple[Function, dict[str, Tensor]]] = {
    "attention": (flashbwd.attention, attention_inputs()),
    "attention_key_mask": (
        lambda **a: flashbwd.attention(**a, key_mask=torch.tensor([[True, False, True, True, False]] * 2)),
        attention_inputs(),
    ),
    "attention_lse": (lambda **a: flashbwd.attention(**a, return_lse=True, causal=True), attention_inputs()),
    "layer_norm": (flashbwd.layer_norm, NORM),
    "layer_norm_from_output": (lambda **a: flashbwd.layer_norm(**a, memory_efficient=True), NORM),
    "rms_norm": (flashbwd.rms_norm, {"x": X, "gamma": GAMMA}),
    "rms_norm_from_output": (lambda **a: flashbwd.rms_norm(**a, memory_efficient=True), {"x": X, "gamma": GAMMA}),
    "dropout_add_layer_norm": (flashbwd.dropout_add_layer_norm, {**DROPOUT, "beta": GAMMA + 1}),
    "dropout_add_rms_norm": (flashbwd.dropout_add_rms_norm, DROPOUT),
    "LayerNorm": (flashbwd.LayerNorm(8, dtype=torch.float64), {"x": X}),
    "RMSNorm": (flashbwd.RMSNorm(8, dtype=torch.float64), {"x": X}),
}
GRADIENTS: dict[str, tuple[Function, dict[str, Tensor]]] = {
    "attention_backward": (flashbwd.attention_backward, attention_backward_inputs()),
    "attention_backward_out": (
        lambda **a: flashbwd.attention_backward(**a, dq=torch.empty_like(a["q"].detach())),
        attention_backward_inputs(),
    ),
    "layer_norm_backward": (flashbwd.layer_norm_backward, {"dz": X, "x": X, "mu": ROWS, "rs": ROWS, "gamma": GAMMA}),
    "rms_norm_backward": (flashbwd.rms_norm_backward, {"dz": X, "x": X, "rs": ROWS, "gamma": GAMMA}),
    "layer_norm_backward_from_output": (
        flashbwd.layer_norm_backward_from_output,
        {"dz": X, "z": X, "rs": ROWS, "gamma": GAMMA, "beta": GAMMA},
    ),
    "rms_norm_backward_from_output": (
        flashbwd.rms_norm_backward_from_output,
        {"dz": X, "z": X, "rs": ROWS, "gamma": GAMMA},
    ),
    "dropout_add_layer_norm_backward": (
        flashbwd.dropout_add_layer_norm_backward,
        {"dz": X, "h": X, "mu": ROWS, "rs": ROWS, "gamma": GAMMA, "dresidual": X},
    ),
    "dropout_add_rms_norm_backward": (
        flashbwd.dropout_add_rms_norm_backward,
        {"dz": X, "h": X, "rs": ROWS, "gamma": GAMMA, "dresidual": X},
    ),
}
ALL = DIFFERENTIABLE | GRADIENTS


def tensors_of(results: Any) -> list[Tensor]:
    results = results if isinstance(results, tuple) else (results,)
    return [tensor for tensor in results if tensor is not None]


def loss_of(function: Function, names: list[str]) -> Function:
    return lambda *values: sum(
        (t**3).sum() for t in tensors_of(function(**dict(zip(names, values, strict=True)))) if t.is_floating_point()
    )


# ---- forward mode ----


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "argument"), [(name, argument) for name, (_, given) in ALL.items() for argument in given]
)
def test_a_tangent_of_any_argument_is_refused(name: str, argument: str, device: str) -> None:
    function, given = ALL[name]
    given = {key: value.to(device) for key, value in given.items()}
    if isinstance(function, torch.nn.Module):
        function = copy.deepcopy(function).to(device)  # other tests use the module on the CPU
    refused = pytest.raises(RuntimeError, match=r"^flashbwd: \w+ has no forward-mode derivative$")

    def of_one(value: Tensor) -> list[Tensor]:
        return tensors_of(function(**{**given, argument: value}))

    with forward_ad.dual_level(), refused:
        function(**{**given, argument: forward_ad.make_dual(given[argument], torch.ones_like(given[argument]))})
    with refused:
        jvp(of_one, (given[argument],), (given[argument],))
    with refused:
        vmap(lambda value: jvp(of_one, (value,), (value,))[1])(given[argument].expand(2, *given[argument].shape))


def dummy(argument: Any) -> Any:
    """A value of an argument's type. No operator would accept it as a valid argument."""
    kind = str(argument.type)
    if "List[Tensor]" in kind:
        return [torch.ones(1)]
    if "Tensor" in kind:
        return torch.ones(1)
    if kind.startswith("Optional"):
        return None
    scalars = {"int": 0, "SymInt": 0, "float": 0.0, "bool": False, "str": "", "List[bool]": [], "List[int]": []}
    return scalars[kind]


def operators() -> list[str]:
    """Operators that return or write tensors, except the internal ones of flex_decoding."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("flashbwd::")]
    return sorted(
        name.removeprefix("flashbwd::")
        for name in names
        if not name.startswith(("flashbwd::decoding_", "flashbwd::flex_decoding_in_graph"))
        and (
            (schema := torch._C._get_schema(name, "")).is_mutable
            or any("Tensor" in str(returned.type) for returned in schema.returns)
        )
    )


@pytest.mark.parametrize("name", operators())
def test_every_operator_refuses_a_tangent_of_any_argument(name: str) -> None:
    operator = getattr(torch.ops.flashbwd, name).default
    arguments = operator._schema.arguments
    assert any("Tensor" in str(argument.type) for argument in arguments)
    for chosen in arguments:
        if "Tensor" not in str(chosen.type):
            continue
        values = {argument.name: dummy(argument) for argument in arguments}
        with (
            forward_ad.dual_level(),
            pytest.raises(RuntimeError, match=f"^flashbwd: {name} has no forward-mode derivative$"),
        ):
            dual = forward_ad.make_dual(torch.ones(1), torch.ones(1))
            values[chosen.name] = [dual] if "List[Tensor]" in str(chosen.type) else dual
            operator(**values)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_calls_without_a_tangent_run_inside_a_dual_level(name: str) -> None:
    function, given = DIFFERENTIABLE[name]
    expected = tensors_of(function(**given))
    with forward_ad.dual_level():
        for result, want in zip(tensors_of(function(**given)), expected, strict=True):
            assert forward_ad.unpack_dual(result).tangent is None
            torch.testing.assert_close(result, want)


# ---- reverse mode through torch.func ----


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_func_grad_agrees_with_autograd(name: str) -> None:
    function, given = DIFFERENTIABLE[name]
    loss, values = loss_of(function, list(given)), tuple(given.values())
    every = tuple(range(len(values)))
    leaves = [value.clone().requires_grad_() for value in values]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    torch.testing.assert_close(grad(loss, every)(*values), expected)
    torch.testing.assert_close(vjp(loss, *values)[1](torch.ones((), dtype=torch.float64)), expected)
    torch.testing.assert_close(jacrev(loss, every)(*values), expected)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_of_each_sample_agree_with_a_loop(name: str) -> None:
    function, given = DIFFERENTIABLE[name]
    loss = loss_of(function, list(given))
    every = tuple(range(len(given)))
    batches = [torch.stack([value, value + 1, value * 2]) for value in given.values()]
    together = vmap(grad(loss, every))(*batches)
    for i in range(3):
        torch.testing.assert_close(tuple(t[i] for t in together), grad(loss, every)(*(batch[i] for batch in batches)))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_second_derivatives_are_refused(name: str) -> None:
    function, given = DIFFERENTIABLE[name]
    loss, values = loss_of(function, list(given)), tuple(given.values())
    with pytest.raises(RuntimeError, match=r"^flashbwd: \w+ has no gradient: double backward is not supported$"):
        grad(lambda *v: (grad(loss)(*v) ** 2).sum())(*values)
    with pytest.raises(RuntimeError, match=r"^flashbwd: \w+ has no forward-mode derivative$"):
        hessian(loss)(*values)
    with pytest.raises(RuntimeError, match=r"^flashbwd: \w+ has no forward-mode derivative$"):
        grad(lambda first: jvp(lambda x: loss(x, *values[1:]), (first,), (first,))[1])(values[0])


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_not_differentiated_silently(name: str) -> None:
    function, given = GRADIENTS[name]
    refused = pytest.raises(RuntimeError, match=r"^flashbwd: \w+ has no gradient: double backward is not supported$")
    for chosen, value in given.items():
        loss = loss_of(lambda **a: function(**{**given, **a}), [chosen])
        with refused:
            grad(loss)(value)
        leaf = value.clone().requires_grad_()
        with refused:
            torch.autograd.grad(loss(leaf), leaf)


# ---- flex_decoding and flex_attention: under every transform, PyTorch's operators compute them ----


def flex(function: Function, device: str) -> tuple[Function, tuple[Tensor, ...]]:
    slopes = some(4)

    def loss(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Tensor:
        out, lse = function(
            query, key, value, lambda s, b, h, i, j: s * 2 + slopes[h] * j, enable_gqa=True, return_lse=True
        )
        return (out**3).sum() + (lse**2).sum()

    return loss, tuple(t.to(device) for t in (some(1, 4, 3, 8), some(1, 2, 20, 8), some(1, 2, 20, 6), slopes))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["flex_decoding", "flex_attention"])
def test_flex_functions_are_differentiable_under_every_transform(name: str, device: str) -> None:
    loss, values = flex(getattr(flashbwd, name), device)
    every = (0, 1, 2, 3)
    leaves = [value.clone().requires_grad_() for value in values]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    torch.testing.assert_close(grad(loss, every)(*values), expected)
    tangents = tuple(torch.randn_like(value) for value in values)
    along = sum((g * t).sum() for g, t in zip(expected, tangents, strict=True))
    torch.testing.assert_close(jvp(loss, values, tangents)[1], along)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(v, t) for v, t in zip(values, tangents, strict=True)]
        torch.testing.assert_close(forward_ad.unpack_dual(loss(*duals)).tangent, along)
    torch.testing.assert_close(jacfwd(loss, every)(*values), expected)
    batches = [torch.stack([value, value + 1]) for value in values]
    together = vmap(grad(loss, every))(*batches)
    for i in range(2):
        torch.testing.assert_close(tuple(t[i] for t in together), grad(loss, every)(*(batch[i] for batch in batches)))


@pytest.mark.gpu
@pytest.mark.parametrize("with_mod", [False, True])
def test_warm_calls_of_flex_decoding_do_not_drop_a_tangent(with_mod: bool) -> None:
    """A kernel supports these tensors. After the first calls, a call would go directly to the kernel."""
    query, tangent, key, value = (torch.randn(1, 2, n, 64, device="cuda") for n in (4, 4, 128, 128))
    mod = (lambda s, b, h, i, j: s * 0.5 + j * 0.01) if with_mod else None

    def decode(query: Tensor) -> Tensor:
        out: Tensor = flashbwd.flex_decoding(query, key, value, mod)
        return out

    for _ in range(4):
        decode(query)
    double = [t.double() for t in (query, tangent, key, value)]
    expected = jvp(lambda q: flashbwd.flex_decoding(q, double[2], double[3], mod), (double[0],), (double[1],))[1]
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(decode(forward_ad.make_dual(query, tangent))).tangent
    torch.testing.assert_close(found, expected.float(), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(jvp(decode, (query,), (tangent,))[1], expected.float(), rtol=1e-3, atol=1e-4)

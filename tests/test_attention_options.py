"""The options of attention: the operators, AttentionOptions and the public functions declare the same ones."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashbwd
from flashbwd import _ops
from flashbwd.options import AttentionOptions

FIELDS = AttentionOptions._fields
DEFAULTS = AttentionOptions()._asdict()
TYPES = {name: annotation.__forward_arg__ for name, annotation in AttentionOptions.__annotations__.items()}
NOT_OPTIONS = ("workspace", "dq", "dk", "dv", "return_lse")
# Public arguments that have another form, and the options that hold them.
TRANSLATED = {
    "causal": ("causal",),
    "window_size": ("window_left", "window_right"),
    "rng_state": ("rng_seed", "rng_offset", "rng_layout"),
}
WITHOUT_ARGUMENT = ("need_dbias", "backend", "allow_tf32")
ONLY_BACKWARD = ("dlse", "rng_state", "seqused_q", "seqused_k")


def arguments_of(operator: str) -> list[Any]:
    arguments: list[Any] = getattr(torch.ops.flashbwd, operator).default._schema.arguments
    return arguments


def options_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters
    keywords = {name: p for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    return {name: p for name, p in keywords.items() if name not in NOT_OPTIONS}


@pytest.mark.parametrize("operator", ["attention_backward", "attention_backward_out", "plan_attention_backward"])
def test_a_backward_operator_has_every_option_with_its_type_and_default(operator: str) -> None:
    options = arguments_of(operator)[6 : 6 + len(FIELDS)]
    types = [re.sub(r"Optional\[(\w+)\]", r"\1 | None", str(argument.type)) for argument in options]
    assert [argument.name for argument in options] == list(FIELDS)
    assert dict(zip(FIELDS, types, strict=True)) == TYPES
    assert {argument.name: argument.default_value for argument in options} == DEFAULTS


@pytest.mark.parametrize("operator", ["attention", "check_attention_inputs", "attention_backward_reference"])
def test_every_other_operator_has_its_options_in_the_same_order(operator: str) -> None:
    options = [argument.name for argument in arguments_of(operator) if argument.name in FIELDS]
    assert options == [name for name in FIELDS if name in options]


def test_the_public_backward_has_an_argument_for_every_option() -> None:
    public = options_of(flashbwd.attention_backward)
    options = [option for name in public for option in TRANSLATED.get(name, (name,))]
    assert sorted([*options, *WITHOUT_ARGUMENT]) == sorted(FIELDS)


def test_public_arguments_have_the_types_and_defaults_of_the_options() -> None:
    public = {name: p for name, p in options_of(flashbwd.attention_backward).items() if name not in TRANSLATED}
    assert {name: p.annotation for name, p in public.items()} == {name: TYPES[name] for name in public}
    assert {name: p.default for name, p in public.items()} == {name: DEFAULTS[name] for name in public}


def test_the_public_forward_has_the_options_of_the_backward() -> None:
    backward = options_of(flashbwd.attention_backward)
    expected = [parameter for name, parameter in backward.items() if name not in ONLY_BACKWARD]
    assert list(options_of(flashbwd.attention).values()) == expected


@pytest.mark.parametrize(
    "function", [flashbwd.attention, flashbwd.attention_backward, flashbwd.plan_attention_backward]
)
def test_a_public_function_passes_its_options_to_the_operator(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class CalledError(Exception):
        pass

    def record(operator: Any, *args: Any, **kwargs: Any) -> Any:
        names = [argument.name for argument in operator.default._schema.arguments]
        raise CalledError(dict(zip(names, args, strict=False)) | kwargs)

    of_forward = function is flashbwd.attention
    public = options_of(flashbwd.attention if of_forward else flashbwd.attention_backward)
    values = {name: object() for name in public if name not in (*TRANSLATED, "sink", "deterministic")}
    for name in ("call", "call_below_autograd"):
        monkeypatch.setattr(_ops, name, record)
    x = torch.zeros(1, 2, 1, 4)
    translated: dict[str, Any] = {"causal": "top_left", "window_size": (3, 5), "deterministic": True, "sink": x}
    with pytest.raises(CalledError) as called:
        function(*[x] * (3 if of_forward else 6), **values, **translated)
    values |= {"causal": "top_left", "window_left": 3, "window_right": 5, "deterministic": True, "sink": x}
    passed = called.value.args[0]
    assert {name: passed[name] for name in values} == values

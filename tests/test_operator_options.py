"""Options that have the operators' default values are not passed to the operators, because reading each takes time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import flashbwd
from flashbwd import _ops

Options = dict[str, Any]


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Options]]:
    """The keyword arguments of each call of an operator."""
    calls: list[Options] = []
    call = _ops.call_below_autograd

    def record(operator: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return call(operator, *args, **kwargs)

    monkeypatch.setattr(_ops, "call_below_autograd", record)
    yield calls


def attention_tensors() -> list[torch.Tensor]:
    q, k, v, dout = (torch.randn(1, 4, 2, 8) for _ in range(4))
    out, lse = flashbwd.attention(q, k, v, return_lse=True)
    return [dout, q, k, v, out, lse]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"softcap": 0.0, "dropout_p": 0.0, "causal": False, "deterministic": False}, {}),
        ({"causal": True, "softcap": 2.0}, {"causal": "bottom_right", "softcap": 2.0}),
        ({"window_size": (1, 2), "deterministic": True}, {"window_left": 1, "window_right": 2, "deterministic": True}),
        ({"softmax_scale": 0.5}, {"softmax_scale": 0.5}),
    ],
)
def test_attention_passes_the_options_that_differ_from_the_defaults(passed, given, expected):
    flashbwd.attention_backward(*attention_tensors(), **given)
    assert passed == [expected]


def test_a_forced_backend_and_tensors_are_passed(passed):
    bias = torch.randn(1, 2, 4, 4)
    tensors = attention_tensors()
    with flashbwd.use_backend("reference"):
        flashbwd.attention_backward(*tensors, attn_bias=bias)
    assert passed[0].pop("attn_bias") is bias
    assert passed == [{"backend": "reference"}]


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [("softcap", None, "None"), ("dropout_p", None, "None"), ("causal", "up", "up"), ("softcap", -1.0, "-1")],
)
def test_an_option_of_a_wrong_type_or_value_is_still_refused(name, value, shown):
    with pytest.raises(ValueError, match=rf"flashbwd: {name} is {shown}"):
        flashbwd.attention_backward(*attention_tensors(), **{name: value})


def test_a_tensor_in_place_of_a_number_is_refused():
    with pytest.raises(ValueError, match="flashbwd: softmax_scale is a Tensor"):
        flashbwd.attention_backward(*attention_tensors(), softmax_scale=torch.ones(2))


def norm_tensors(rms: bool) -> list[torch.Tensor]:
    dz, x = torch.randn(2, 3, 8)
    return [dz, x, *([] if rms else [x.mean(-1)]), torch.ones(3), torch.ones(8)]


@pytest.mark.parametrize(("rms", "masks"), [(False, (True, True, True)), (True, (True, True))])
def test_norms_pass_a_mask_only_if_it_excludes_a_gradient(passed, rms, masks):
    backward = flashbwd.rms_norm_backward if rms else flashbwd.layer_norm_backward
    partial = (*masks[:-1], False)
    every = backward(*norm_tensors(rms), output_mask=masks)
    some = backward(*norm_tensors(rms), output_mask=partial)
    backward(*norm_tensors(rms), zero_centered_gamma=True)
    assert passed == [{}, {"output_mask": list(partial)}, {"zero_centered_gamma": True}]
    assert [grad is not None for grad in every] == list(masks)
    assert [grad is not None for grad in some] == list(partial)


def test_the_defaults_of_the_operators_are_those_that_are_not_passed():
    operators = torch.ops.flashbwd
    names = ("layer_norm_backward", "rms_norm_backward", "norm_backward_from_output")
    for schema in (getattr(operators, name).default._schema for name in names):
        defaults = {argument.name: argument.default_value for argument in schema.arguments}
        assert defaults["zero_centered_gamma"] is False
        assert defaults["output_mask"] == [True] * (2 if "rms_norm" in schema.name else 3)

"""What every operator does beyond reverse mode: forward mode is refused, and torch.func transforms are served.

PyTorch gives an operator a zero tangent where its autograd kernel does not look at tangents, and refuses to transform a
rule whose context is set up inside its forward. Both are decided here, in the one kernel that each operator has for
autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

Rule = Callable[..., Any]


class OperatorLibrary(torch.library.Library):
    """A library whose autograd kernels refuse tangents, however they are registered."""

    def __init__(self, namespace: str) -> None:
        super().__init__(namespace, "FRAGMENT")
        self._transformed: dict[str, type[torch.autograd.Function]] = {}

    def impl(self, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> None:
        if dispatch_key == "Autograd":
            name = op_name if isinstance(op_name, str) else op_name._schema.name.partition("::")[2]
            fn = _kernel(self._overload(name), fn, self._transformed.get(name))
        super().impl(op_name, fn, dispatch_key, **options)

    def register_autograd(self, name: str, backward: Rule, setup_context: Rule | None = None) -> None:
        """As :func:`torch.library.register_autograd`, for torch.func too."""
        self._transformed[name] = _transformed(self._overload(name), backward, setup_context)
        torch.library.register_autograd(f"{self.ns}::{name}", backward, setup_context=setup_context, lib=self)

    def refuse_derivatives(self, name: str) -> None:
        """An operator without a derivative; results of such an operator must not pass for constants."""
        operator = self._overload(name)
        schema = operator._schema
        if not schema.is_mutable and not any("Tensor" in str(result.type) for result in schema.returns):
            return None
        if not schema.is_mutable:
            return self.register_autograd(name, refuse_double_backward(name))

        def below_autograd(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                results = operator.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)
            wanted = [t for t in _tensors(args, kwargs) if t.requires_grad] if torch.is_grad_enabled() else []
            if not results or not wanted:
                return results
            with enable_single_level_autograd_function():
                return _Refused.apply(name, *results, *wanted)[: len(results)]  # type: ignore[attr-defined]

        self.impl(name, below_autograd, "Autograd", with_keyset=True)

    def _overload(self, name: str) -> torch._ops.OpOverload:
        packet, _, overload = name.partition(".")
        operator: torch._ops.OpOverload = getattr(getattr(getattr(torch.ops, self.ns), packet), overload or "default")
        return operator


def refuse_double_backward(name: str) -> Rule:
    """An autograd rule for an operator that is itself a gradient and has none of its own."""

    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(f"flashbwd: {name} has no gradient: double backward is not supported")

    return backward


def transforms_are_active() -> bool:
    """Whether tensors may have tangents or be those of a torch.func transform."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


class _Refused(torch.autograd.function._SingleLevelFunction):
    """Results of an operator without a gradient, as functions of what it read."""

    @staticmethod
    def forward(ctx: Any, name: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.name = name
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return refuse_double_backward(ctx.name)(ctx, *grads)


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, Tensor):
                yield item


def _kernel(operator: Any, rule: Rule, transformed: type[torch.autograd.Function] | None) -> Rule:
    """The autograd kernel of an operator around its rule for reverse mode."""
    schema = operator._schema
    name = schema.name.partition("::")[2]

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if forward_ad._current_level >= 0:
            for tensor in _tensors(args, kwargs):
                if forward_ad.unpack_dual(tensor).tangent is not None:
                    raise RuntimeError(f"flashbwd: {name} has no forward-mode derivative")
        if transformed is not None and torch._C._are_functorch_transforms_active():
            with enable_single_level_autograd_function():
                return transformed.apply(*_in_order(schema, args, kwargs))
        return rule(keyset, *args, **kwargs)

    return kernel


def _in_order(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """All arguments of a call in the order of the schema, with those that the dispatcher left out as defaults."""
    rest = schema.arguments[len(args) :]
    return [*args, *(kwargs.get(argument.name, argument.default_value) for argument in rest)]


def _transformed(operator: Any, backward: Rule, setup_context: Rule | None) -> type[torch.autograd.Function]:
    """The rule at one level of torch.func, whose other levels see the operator below. vmap calls it for each sample."""
    schema = operator._schema
    positional = sum(not argument.kwarg_only for argument in schema.arguments)
    names = [argument.name for argument in schema.arguments[positional:]]

    def forward(ctx: Any, *inputs: Any) -> Any:
        # PyTorch runs a forward without gradients; the levels below may want theirs.
        with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            results = operator(*inputs[:positional], **dict(zip(names, inputs[positional:], strict=True)))
        if setup_context is not None:
            setup_context(ctx, inputs, results)
        return results

    return type(
        f"Transformed_{schema.name.partition('::')[2]}",
        (torch.autograd.function._SingleLevelFunction,),
        {"forward": staticmethod(forward), "backward": staticmethod(backward)},
    )

"""Autograd kernels that raise for forward mode and support torch.func transforms.

If an operator's autograd kernel ignores tangents, PyTorch silently assumes that the tangent of the result is zero.
torch.func cannot transform a rule that ``torch.library.register_autograd`` registers. The kernels of this module handle
both cases for every operator. They are also faster: a kernel of ``register_autograd`` reads the schema in every call,
which takes 10 us per argument.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from flashbwd._eager import untraced

Rule = Callable[..., Any]


class OperatorLibrary(torch.library.Library):
    """A library whose autograd kernels raise if an input has a tangent, whichever method registered the kernel."""

    def __init__(self, namespace: str) -> None:
        super().__init__(namespace, "FRAGMENT")
        self._transformed: dict[str, type[torch.autograd.Function]] = {}

    def impl(self, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> None:
        if dispatch_key == "Autograd":
            name = op_name if isinstance(op_name, str) else op_name._schema.name.partition("::")[2]
            fn = _kernel(self._overload(name), fn, self._transformed.get(name))
        super().impl(op_name, fn, dispatch_key, **options)

    def register_autograd(self, name: str, backward: Rule, setup_context: Rule | None = None) -> None:
        """Register an autograd rule as :func:`torch.library.register_autograd` does, but also for torch.func."""
        operator = self._overload(name)
        self._transformed[name] = _transformed(operator, backward, setup_context)
        self.impl(name, _rule(operator, backward, setup_context), "Autograd", with_keyset=True)

    def refuse_derivatives(self, name: str) -> None:
        """Make differentiating an operator an error. Without this, autograd would treat its results as constants."""
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
            return refuse_to_differentiate(name, results, wanted)

        self.impl(name, below_autograd, "Autograd", with_keyset=True)

    def _overload(self, name: str) -> torch._ops.OpOverload:
        packet, _, overload = name.partition(".")
        operator: torch._ops.OpOverload = getattr(getattr(getattr(torch.ops, self.ns), packet), overload or "default")
        return operator


def refuse_double_backward(name: str) -> Rule:
    """Return an autograd rule that raises, for an operator that computes gradients."""

    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(f"flashbwd: {name} has no gradient: double backward is not supported")

    return backward


def refuse_to_differentiate(name: str, results: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Connect the gradients that ``name`` computed to its ``inputs``, so that differentiating them raises."""
    with enable_single_level_autograd_function():
        refused: tuple[Tensor, ...] = _Refused.apply(name, *results, *inputs)  # type: ignore[attr-defined]
    return refused[: len(results)]


def differentiable_once(name: str) -> Callable[[Rule], Rule]:
    """Decorate the ``backward`` of an autograd Function: differentiating the gradients of ``name`` raises.

    So do gradients that ``is_grads_batched`` batches, for which PyTorch would need a batching rule. The function gets
    ``ctx``, what it saved, and the gradients: a checkpoint lets a backward read that only once.
    PyTorch's ``once_differentiable`` raises only where a derivative reaches the gradients by ``backward()``;
    ``torch.autograd.grad`` then leaves their part out.
    """

    def decorate(backward: Rule) -> Rule:
        @functools.wraps(backward)
        def once(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            _refuse_batched(name, grads)
            saved = ctx.saved_tensors
            with torch.no_grad():
                found = backward(ctx, saved, *grads)
            if not torch.is_grad_enabled():
                return tuple(found)
            read = [t for t in (*grads, *saved) if t is not None and t.requires_grad]
            refused = iter(refuse_to_differentiate(name, [t for t in found if t is not None], read))
            return tuple(None if t is None else next(refused) for t in found)

        return untraced(once)

    return decorate


def is_last_backward() -> bool:
    """Return whether the backward that runs now frees what its nodes saved, so that no other one can follow."""
    return not torch._C._autograd._get_current_graph_task_keep_graph()


def _refuse_batched(name: str, grads: Sequence[Tensor | None]) -> None:
    if any(grad is not None and torch._C._functorch.is_legacy_batchedtensor(grad) for grad in grads):
        raise RuntimeError(
            f"flashbwd: {name} has no batching rule: is_grads_batched=True is not supported; call torch.autograd.grad "
            "once for each gradient, or use torch.func.vjp and torch.func.vmap"
        )


def hidden_from_modes() -> AbstractContextManager[Any]:
    """Hide operators from the caller's dispatch modes, for computations that only the first call makes.

    A selective checkpoint counts the operators of its forward, and expects the same ones when it repeats it. Dynamo
    compiles nothing while such a mode is active; without it, it would begin to, within functions that are not for it.
    """
    keys = torch._C._TorchDispatchModeKey
    needed = (keys.FAKE, keys.FUNCTIONAL, keys.PROXY)
    if not torch._C._len_torch_dispatch_stack() or any(torch._C._get_dispatch_mode(key) for key in needed):
        return nullcontext()
    return _without_modes()


@contextmanager
def _without_modes() -> Iterator[None]:
    set_callback = torch._C._dynamo.eval_frame.set_eval_frame  # of this thread
    before = set_callback(None)
    try:
        with _disable_current_modes():
            yield
    finally:
        set_callback(before)


def transforms_are_active() -> bool:
    """Return whether forward mode or a torch.func transform is active."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def may_be_refused(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the autograd kernel of an operator without a gradient could raise, now or in a backward."""
    return transforms_are_active() or (torch.is_grad_enabled() and torch._C._any_requires_grad(*args, **kwargs))


class _OneLevel(torch.autograd.function._SingleLevelFunction):
    """An autograd Function that does not search its arguments for torch.func transforms."""

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> tuple[int, ...]:
        """As ``torch.autograd.Function`` has it: what distinguishes the node for compiled autograd."""
        return (ctx._autograd_function_id,)


class _Refused(_OneLevel):
    """Connects the results of an operator to its inputs, so that differentiating them raises."""

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


class _Arguments:
    """The order and the defaults of an operator's arguments, which are read from its schema once."""

    def __init__(self, schema: Any) -> None:
        self._defaults = [(argument.name, argument.default_value) for argument in schema.arguments]

    def in_order(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return all arguments in schema order. The dispatcher omits arguments that have their default values."""
        return (*args, *(kwargs.get(name, default) for name, default in self._defaults[len(args) :]))


def _rule(operator: Any, backward: Rule, setup_context: Rule | None) -> Rule:
    """Return the autograd kernel of an operator for reverse mode."""
    arguments = _Arguments(operator._schema)

    def below_autograd(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)

    def forward(ctx: Any, *args_and_call: Any) -> Any:
        args, (keyset, kwargs) = args_and_call[:-1], args_and_call[-1]
        results = below_autograd(keyset, args, kwargs)
        if setup_context is not None:
            setup_context(ctx, arguments.in_order(args, kwargs), results)
        return results

    def backward_of_all(ctx: Any, *grads: Any) -> Any:
        return (*backward(ctx, *grads), None)  # the last input is the pair (keyset, kwargs)

    # autograd.Function would search every argument for torch.func transforms, which _kernel has already handled.
    function: Any = type(
        f"Gradient_{operator._schema.name.partition('::')[2]}",
        (_OneLevel,),
        {"forward": staticmethod(forward), "backward": staticmethod(backward_of_all)},
    )

    def rule(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            return function.apply(*args, (keyset, kwargs))
        return below_autograd(keyset, args, kwargs)

    return rule


def _kernel(operator: Any, rule: Rule, transformed: type[torch.autograd.Function] | None) -> Rule:
    """Wrap an operator's reverse-mode rule in the autograd kernel that also handles tangents and transforms."""
    name = operator._schema.name.partition("::")[2]
    arguments = _Arguments(operator._schema)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if forward_ad._current_level >= 0:
            for tensor in _tensors(args, kwargs):
                if forward_ad.unpack_dual(tensor).tangent is not None:
                    raise RuntimeError(f"flashbwd: {name} has no forward-mode derivative")
        if transformed is not None and torch._C._are_functorch_transforms_active():
            with enable_single_level_autograd_function():
                return transformed.apply(*arguments.in_order(args, kwargs))
        return rule(keyset, *args, **kwargs)

    return kernel


def _transformed(operator: Any, backward: Rule, setup_context: Rule | None) -> type[torch.autograd.Function]:
    """Return the rule as a Function for one torch.func level.

    The forward of this Function calls the operator at the levels below. vmap calls the operator once per sample.
    """
    schema = operator._schema
    positional = sum(not argument.kwarg_only for argument in schema.arguments)
    names = [argument.name for argument in schema.arguments[positional:]]

    def forward(ctx: Any, *inputs: Any) -> Any:
        # PyTorch disables gradients inside a forward, but the levels below may need them.
        with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            results = operator(*inputs[:positional], **dict(zip(names, inputs[positional:], strict=True)))
        if setup_context is not None:
            setup_context(ctx, inputs, results)
        return results

    return type(
        f"Transformed_{schema.name.partition('::')[2]}",
        (_OneLevel,),
        {"forward": staticmethod(forward), "backward": staticmethod(backward)},
    )

"""Traces a modification to a graph of aten operators on scalars.

The function runs once under a dispatch mode that records every operator. Its arguments are 0-d CPU tensors with the
right dtypes (stand-ins). Indices are int32, as in PyTorch's compiled kernels, and become int64 beside an int64
scalar. Tracing neither reads captured tensors nor uses the GPU. It does not import PyTorch's compiler, because the
import alone takes half a second.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from flashbwd.mods.captures import CannotEmitError
from flashbwd.reference.modes import GatherByIndex
from flashbwd.reference.modifications import Mod

aten = torch.ops.aten

READS = frozenset({aten._local_scalar_dense, aten.is_nonzero, aten.equal, aten.nonzero})
_HOST_METHODS = frozenset({Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.data_ptr})
# Operators that select a part of a captured tensor. Any other operator would need the whole tensor.
_CHOOSES = frozenset({aten.index, aten.select, aten.detach, aten.alias})

# Operators that raise if they divide an integer by 0. Their stand-ins are 1; stand-ins of indices are otherwise 0.
_DIVISIONS = frozenset({aten.floor_divide, aten.remainder, aten.fmod, aten.div})


@dataclass
class Trace:
    """The operators that a function calls.

    Attributes
    ----------
    graph : fx.Graph
        ``placeholder`` nodes are the arguments. ``get_attr`` nodes name a tensor in ``tensors``. ``meta["val"]`` of a
        node is a CPU tensor with the dtype and the number of dimensions of its result.
    tensors : dict of str to Tensor
        Captured tensors, and constants that the function made.
    changes_gradients : bool
        Whether some operators ran without gradients, as under ``torch.no_grad()``, or in a
        ``torch.autograd.Function``, which has a derivative of its own. The graph does not show which.
    """

    graph: fx.Graph = field(default_factory=fx.Graph)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    changes_gradients: bool = False


@unset_fake_temporarily()  # the recorder would also see the operators that a fake kernel calls
def trace(name: str, mod: Mod, with_score: bool) -> Trace:
    """Trace ``score_mod`` (``with_score``) or ``mask_mod``.

    Raises
    ------
    CannotEmitError
        If the function reads a value back from the device, or passes a whole captured tensor to an operator.
    RuntimeError
        If the function raises, or does not return a tensor. The message contains ``name``.
    ValueError
        If the result has the wrong dtype.
    """
    recorder = _Recorder(name)
    names = ["score", "b", "h", "q_idx", "kv_idx"] if with_score else ["b", "h", "q_idx", "kv_idx"]
    arguments = [recorder.argument(n, torch.float32 if n == "score" else torch.int32) for n in names]
    try:
        # inference_mode(False) enables forward gradients, which the recorder expects, whatever the caller did.
        with torch.inference_mode(False), torch.no_grad(), GatherByIndex(), _Host(recorder), recorder:
            result = mod(*arguments)
    except CannotEmitError:
        raise
    except Exception as error:
        raise RuntimeError(f"flashbwd: {name} failed: {error}") from error
    if not isinstance(result, Tensor):
        raise RuntimeError(f"flashbwd: {name} returned a {type(result).__name__}, expected a tensor")
    if with_score and not result.is_floating_point():
        raise ValueError(f"flashbwd: {name} returned {_name_of(result.dtype)}, expected a floating-point score")
    if not with_score and result.dtype != torch.bool:
        raise ValueError(f"flashbwd: {name} returned {_name_of(result.dtype)}, expected bool")
    recorder.trace.graph.output(recorder.node_of(result))
    return recorder.trace


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Host(TorchFunctionMode):
    """Sees what a function does without calling an operator.

    Raises for methods that would read the value of a stand-in on the host.
    """

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HOST_METHODS:
            name = self.recorder.name
            raise CannotEmitError(f"{name} calls Tensor.{func.__name__}, which reads a value back from the device")
        if func is torch._C._set_grad_enabled and not args[0]:
            self.recorder.trace.changes_gradients = True
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.trace = Trace()
        self.nodes: dict[int, fx.Node] = {}
        self.alive: list[Tensor] = []  # keeps ids unique
        self.captured: set[fx.Node] = set()  # captured tensors, and parts of them that are not 0-d yet

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import PyTorch's compiler

    def argument(self, name: str, dtype: torch.dtype) -> Tensor:
        value = torch.zeros((), dtype=dtype)
        self._keep(value, self.trace.graph.placeholder(name), value)
        return value

    def node_of(self, tensor: Tensor) -> fx.Node:
        node = self.nodes.get(id(tensor))
        if node is None:
            name = f"tensor{len(self.trace.tensors)}"
            self.trace.tensors[name] = tensor
            node = self.trace.graph.create_node("get_attr", name)
            self._keep(tensor, node, torch.zeros((), dtype=tensor.dtype).expand(tensor.shape))
            if tensor.dim() > 0:
                self.captured.add(node)
        return node

    def _keep(self, tensor: Tensor, node: fx.Node, stand_in: Tensor) -> None:
        node.meta["val"] = stand_in
        self.nodes[id(tensor)] = node
        self.alive.append(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in READS:
            raise CannotEmitError(
                f"{self.name} calls {func}, which reads a value back from the device, as a branch on a value does"
            )
        if not torch._C._is_fwd_grad_enabled():  # in inference mode, and in the forward of a torch.autograd.Function
            self.trace.changes_gradients = True
        arguments, options = tree_map_only(Tensor, self.node_of, (tuple(args), dict(kwargs or {})))
        node = self.trace.graph.call_function(func, arguments, options)
        source = arguments[0] if arguments else None
        if isinstance(source, fx.Node) and source in self.captured and func.overloadpacket in _CHOOSES:
            result = _chosen(func, source.meta["val"], arguments)
            if result.dim() > 0:
                self.captured.add(node)
        else:
            self._refuse_whole(func, node)
            if "device" in options:
                options = {**options, "device": torch.device("cpu")}
            stand_in = _divisible if func.overloadpacket in _DIVISIONS else _stand_in
            values, keywords = fx.node.map_aggregate((arguments, options), stand_in)
            result = func(*values, **keywords)
        if isinstance(result, Tensor):
            self._keep(result, node, result)
        return result

    def _refuse_whole(self, func: Any, node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if source in self.captured:
                shape = tuple(source.meta["val"].shape)
                raise CannotEmitError(f"{self.name} calls {func} on a captured tensor of shape {shape} as a whole")


def _chosen(func: Any, source: Tensor, arguments: tuple[Any, ...]) -> Tensor:
    """Return a stand-in for a part of a captured tensor. ``source`` has the tensor's shape, but not its memory."""
    if func is not aten.index.Tensor:
        return func(source, *arguments[1:])
    indices = [*arguments[1], *[None] * (source.dim() - len(arguments[1]))]
    sizes = [size for size, index in zip(source.shape, indices, strict=True) if index is None]
    return torch.zeros((), dtype=source.dtype).expand(sizes)


def _stand_in(value: Any) -> Any:
    return value.meta["val"] if isinstance(value, fx.Node) else value


def _divisible(value: Any) -> Any:
    return torch.ones_like(value.meta["val"]) if isinstance(value, fx.Node) else value

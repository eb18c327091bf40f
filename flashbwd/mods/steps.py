"""Calls of a decoding loop: what one has found out serves the next, which a few comparisons tell to be of its kind.

It is of its kind when the functions have the same code, whose names stand for the same constants and modules, for
functions and tuples of which the same holds, and for tensors where they did; and when the BlockMask is the same object
with the same lists. The tensors that the functions capture are read anew in each call. Everything else goes the longer
way of :mod:`run`.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flashbwd._ops import library
from flashbwd.mods.captures import code_of, is_constant
from flashbwd.reference.decoding import Mod

_MOST_OF_A_KIND = 8  # of the same code and BlockMask, with other constants or lists
_MOST_KINDS = 512
_DEEPEST = 4  # functions that reach one another

# By the number of captured tensors: those that return the output, and those that return the statistics beside it.
_step = torch.ops.flashbwd.decoding_step
_operators = [_step.default._op, *(getattr(_step, f"captured_{n}")._op for n in range(1, 5))]
_operators_of_all = [_step.all._op, *(getattr(_step, f"all_{n}")._op for n in range(1, 5))]
# Under autocast the arguments have yet to be cast. Told to the dispatcher, this costs a call without autocast nothing.
for _name in _step.overloads():
    _nothing: Any = [] if _name.startswith("all") else None
    library.impl(getattr(_step, _name), lambda *_, nothing=_nothing: nothing, "AutocastCUDA")

# enable_gqa, splits (0: as many as serve best), need_lse, need_max_scores, need_exact_out; enable_gqa alone for a call
# that wants the output and no more.
Wanted = tuple[bool, int, bool, bool, bool]
_OUTPUT_ALONE = (0, False, False, False)
_Kind = tuple[int, int, float | None, bool | Wanted]  # score_mod's code, BlockMask, scale, wanted
_Step = Callable[..., Tensor | list[Tensor] | None]
_steps: dict[_Kind, list[tuple[_Step, int]]] = {}  # with its number
_met: dict[int, weakref.ref[Tensor]] = {}  # of BlockMasks seen once: a list of theirs


def run_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None,
    block_mask: BlockMask | None,
    scale: float | None,
    wanted: bool | Wanted,
) -> Any:
    """The output, or a list that begins with it where more is wanted; None when the call is not of a known kind, or the
    operator cannot launch it as it is."""
    code = None if score_mod is None else getattr(score_mod, "__code__", score_mod)
    for step, _ in _steps.get((id(code), id(block_mask), scale, wanted), ()):
        if type(query) is not Tensor or type(key) is not Tensor or type(value) is not Tensor or not query.is_cuda:
            break
        try:
            out = step(query, key, value, score_mod, block_mask)
        except ValueError:  # a name in a closure stands for nothing any more
            continue
        if out is not None:
            return out
    return None


def remember(
    score_mod: Mod | None,
    block_mask: BlockMask | None,
    scale: float | None,
    wanted: Wanted,
    settings: int,
    captured: list[Tensor],
    places: list[int | Tensor],
) -> None:
    """Makes a step of a call that the operator has just launched, where it can be recognised again.

    ``captured`` are the tensors that the kernel takes; ``places``, of each, where among those of the functions it is
    found.
    """
    if (
        len(captured) >= len(_operators)
        or any(isinstance(place, Tensor) for place in places)
        or not (scale is None or type(scale) in (float, int))
    ):
        return
    if block_mask is not None and not _met_before(block_mask):
        return
    code = None if score_mod is None else getattr(score_mod, "__code__", score_mod)
    alone = wanted[1:] == _OUTPUT_ALONE
    kind = (id(code), id(block_mask), scale, wanted[0] if alone else wanted)
    known = _steps.get(kind)
    if known is not None and len(known) >= _MOST_OF_A_KIND:
        return
    writer = _Writer()
    try:
        if score_mod is not None:
            writer.recognise("score_mod", score_mod, 5)
        if block_mask is not None:
            writer.recognise("block_mask.mask_mod", block_mask.mask_mod, 4)
            for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
                writer.expect(f"block_mask.{name}", getattr(block_mask, name))
            writer.expect("block_mask.BLOCK_SIZE", block_mask.BLOCK_SIZE)
            writer.expect("block_mask.seq_lengths", block_mask.seq_lengths)
    except _NotPlainError:
        return
    lists = [] if block_mask is None else mask_lists(block_mask)
    lengths = () if block_mask is None else block_mask.seq_lengths
    number = torch.ops.flashbwd.decoding_remember(settings, scale, lists, lengths, captured)
    if known is None:
        if len(_steps) >= _MOST_KINDS:
            _forget(list(_steps))
        known = _steps[kind] = []
        if block_mask is not None:
            weakref.finalize(block_mask, _forget, [kind]).atexit = False
    known.append((writer.step(number, places, alone), number))


def mask_lists(mask: Any) -> list[Tensor]:
    """Counts and indices of the partial blocks, and of the full ones where there are any."""
    lists = [mask.kv_num_blocks, mask.kv_indices]
    if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
        lists += [mask.full_kv_num_blocks, mask.full_kv_indices]
    return lists


def _met_before(block_mask: BlockMask) -> bool:
    """False where its lists are met for the first time: those that are made for each call are not worth a step."""
    met = _met.get(id(block_mask))
    if met is not None and met() is block_mask.kv_num_blocks:
        return True
    if len(_met) >= _MOST_KINDS:
        _met.clear()
    _met[id(block_mask)] = weakref.ref(block_mask.kv_num_blocks)
    return False


def _forget(kinds: list[_Kind]) -> None:
    """Until then the operator holds the lists of the BlockMask."""
    for kind in kinds:
        for _, number in _steps.pop(kind, ()):
            torch.ops.flashbwd.decoding_forget(number)


class _NotPlainError(Exception):
    """A function has or reaches something that comparing identities does not tell about."""


class _Writer:
    """Writes a step as a function of Python: comparisons, one after the other, and the operator's call."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._objects: dict[str, Any] = {"Tensor": Tensor, "Function": types.FunctionType}
        self._tensors: dict[int, str] = {}  # by id: their names
        self._depth = 0

    def expect(self, expression: str, value: Any) -> None:
        name = f"expected_{len(self._objects)}"
        self._objects[name] = value
        self._lines.append(f"if {expression} is not {name}: return None")

    def recognise(self, expression: str, function: Any, arguments: int | None = None) -> None:
        """``arguments``: how many it is called with; any, where another function calls it."""
        if type(function) is not types.FunctionType or function.__kwdefaults__:
            raise _NotPlainError
        if self._depth == _DEEPEST:
            raise _NotPlainError
        defaults = function.__defaults__
        if arguments is not None and function.__code__.co_argcount - len(defaults or ()) > arguments:
            raise _NotPlainError
        self._depth += 1
        name = self._name("function")
        self._lines += [f"{name} = {expression}", f"if type({name}) is not Function: return None"]
        self.expect(f"{name}.__code__", function.__code__)
        if defaults is not None:
            self._recognise_value(f"{name}.__defaults__", defaults)
        if function.__closure__:
            cells = self._name("cells")
            self._lines.append(f"{cells} = {name}.__closure__")
            for i, cell in enumerate(function.__closure__):
                try:
                    self._recognise_value(f"{cells}[{i}].cell_contents", cell.cell_contents)
                except ValueError as error:  # an empty cell
                    raise _NotPlainError from error
        if names := code_of(function).global_names:
            found = self._name("names")
            self._lines.append(f"{found} = {name}.__globals__")
            for variable in names:
                self._recognise_value(f"{found}.get({variable!r})", function.__globals__.get(variable))
        self._depth -= 1

    def _recognise_value(self, expression: str, value: Any) -> None:
        if type(value) is Tensor:
            name = f"tensor_{len(self._tensors)}"
            if self._tensors.setdefault(id(value), name) != name:  # the kernel has one place for its two names
                raise _NotPlainError
            self._lines += [f"{name} = {expression}", f"if type({name}) is not Tensor: return None"]
        elif is_constant(value):
            self.expect(expression, value)
        elif type(value) is types.FunctionType:
            self.recognise(expression, value)
        elif type(value) is tuple:
            name = self._name("items")
            self._lines += [
                f"{name} = {expression}",
                f"if type({name}) is not tuple or len({name}) != {len(value)}: return None",
            ]
            for i, item in enumerate(value):
                self._recognise_value(f"{name}[{i}]", item)
        else:
            raise _NotPlainError

    def _name(self, what: str) -> str:
        return f"{what}_{len(self._lines)}"

    def step(self, number: int, places: list[Any], alone: bool) -> _Step:
        inputs = ["query", "key", "value"]
        found = list(self._tensors.values())
        tensors = [found[place] for place in places]
        needs_grad = " or ".join(f"{tensor}.requires_grad" for tensor in inputs + tensors)
        self._objects |= {
            "is_grad_enabled": torch.is_grad_enabled,
            "operator": (_operators if alone else _operators_of_all)[len(tensors)],
            "number": number,
        }
        lines = [
            "def step(query, key, value, score_mod, block_mask):",
            *self._lines,
            f"if is_grad_enabled() and ({needs_grad}): return None",
            f"return operator({', '.join([*inputs, 'number', *tensors])}){'' if alone else ' or None'}",
        ]
        exec(_compiled("\n    ".join(lines)), self._objects)
        step: _Step = self._objects["step"]
        return step


@functools.lru_cache(maxsize=_MOST_KINDS)
def _compiled(source: str) -> types.CodeType:
    return compile(source, "<step of flex_decoding>", "exec")

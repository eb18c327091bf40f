"""Calls of a decoding loop: what one has found out serves the next, which a few comparisons tell to be of its kind.

It is of its kind when the functions have the same code, whose names stand for the same constants and modules, for
functions, tuples and attributes of which the same holds, and for tensors where they did; and when the BlockMask is the
same object with the same lists, or another of the same blocks, whose lists are then passed. The tensors that the
functions capture are read anew in each call. Everything else goes the longer way of :mod:`run`.
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

from flashbwd._ops import library, past_dispatcher
from flashbwd.mods.captures import code_of, is_constant, plain_attributes
from flashbwd.reference.decoding import Mod

_MOST_OF_A_KIND = 8  # of the same code and BlockMask, with other constants or lists
_MOST_KINDS = 512
_LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
_DEEPEST = 4  # functions that reach one another

_MOST_PASSED, _MOST_RESULTS = 8, 3

# By the number of tensors beside query, key and value, then by that of results less one: out, and the statistics.
_step = torch.ops.flashbwd.decoding_step
_operators = [
    [getattr(_step, f"passed_{passed}_results_{results}")._op for results in range(1, _MOST_RESULTS + 1)]
    for passed in range(_MOST_PASSED + 1)
]
# Under autocast the arguments have yet to be cast. Told to the dispatcher, this costs a call without autocast nothing.
for _name in _step.overloads():
    _results = int(_name.rpartition("_")[2])
    _nothing: Any = None if _results == 1 else (None,) * _results
    library.impl(getattr(_step, _name), lambda *_, nothing=_nothing: nothing, "AutocastCUDA")

# The same past the dispatcher, which takes longer to hand tensors over than a step to check them.
_at_once: Callable[..., Any] | None = getattr(past_dispatcher, "decoding_step", None)

# enable_gqa, splits (0: as many as serve best), need_lse, need_max_scores, need_exact_out
Wanted = tuple[bool, int, bool, bool, bool]
# What is wanted but for enable_gqa; False for the output alone, True for the lse too.
_More = bool | tuple[int, bool, bool, bool]
_USUAL: dict[Any, _More] = {(0, False, False, False): False, (0, True, False, False): True}
# score_mod's code; the BlockMask, or mask_mod's code where any may come; scale, enable_gqa
_Kind = tuple[int, int, float | None, bool, _More]
_Step = Callable[..., Any]
_steps: dict[_Kind, list[tuple[_Step, int]]] = {}  # with its number
# What a step raises when a name, an attribute or a dimension is not there any more.
_NOT_THERE = (ValueError, AttributeError, LookupError)
_MET = "_flashbwd_met"  # an attribute of BlockMasks that were met: a list of theirs


def run_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None,
    block_mask: BlockMask | None,
    scale: float | None,
    enable_gqa: bool,
    more: _More,
) -> Any:
    """The output, or a tuple that begins with it where more is wanted; None when the call is not of a known kind, or
    the operator cannot launch it as it is."""
    code = id(None if score_mod is None else getattr(score_mod, "__code__", score_mod))
    mask = id(block_mask)
    for any_mask in (False, True):
        if any_mask:
            if type(block_mask) is not BlockMask:
                break
            mask = id(getattr(block_mask.mask_mod, "__code__", block_mask))
        known = _steps.get((code, mask, scale, enable_gqa, more))
        if known is None or (any_mask and _met_before(block_mask)):  # one that comes again gets a step of its own
            continue
        for step, _ in known:
            try:
                out = step(query, key, value, score_mod, block_mask)
            except _NOT_THERE:
                continue
            if out is not None:
                return out
        if any_mask:
            delattr(block_mask, _MET)
    return None


def beside_the_output(wanted: Wanted) -> _More:
    more = wanted[1:]
    return _USUAL.get(more, more)


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
    if any(isinstance(place, Tensor) for place in places) or not (scale is None or type(scale) in (float, int)):
        return
    code = None if score_mod is None else getattr(score_mod, "__code__", score_mod)
    lists = [] if block_mask is None else mask_lists(block_mask)
    any_mask = block_mask is not None and not _met_before(block_mask)
    if len(captured) + (len(lists) if any_mask else 0) > _MOST_PASSED:
        return
    mask = getattr(block_mask.mask_mod, "__code__", block_mask) if block_mask is not None and any_mask else block_mask
    kind = (id(code), id(mask), scale, wanted[0], beside_the_output(wanted))
    known = _steps.get(kind)
    if known is not None and len(known) >= _MOST_OF_A_KIND:
        return
    writer = _Writer()
    try:
        if score_mod is not None:
            writer.recognise("score_mod", score_mod, 5)
        if block_mask is not None:
            writer.recognise("block_mask.mask_mod", block_mask.mask_mod, 4)
            if any_mask:
                writer.take_lists(block_mask)
            else:
                for name in _LISTS:
                    writer.expect(f"block_mask.{name}", getattr(block_mask, name))
                writer.expect("block_mask.BLOCK_SIZE", block_mask.BLOCK_SIZE)
                writer.expect("block_mask.seq_lengths", block_mask.seq_lengths)
    except _NotPlainError:
        return
    lengths = () if block_mask is None else block_mask.seq_lengths
    number = torch.ops.flashbwd.decoding_remember(settings, scale, [] if any_mask else lists, lengths, captured)
    if known is None:
        if len(_steps) >= _MOST_KINDS:
            _forget(list(_steps))
        known = _steps[kind] = []
        if block_mask is not None and not any_mask:
            weakref.finalize(block_mask, _forget, [kind]).atexit = False
    known.append((writer.step(number, places, 1 + sum(wanted[2:4])), number))


def mask_lists(mask: Any) -> list[Tensor]:
    """Counts and indices of the partial blocks, and of the full ones where there are any."""
    lists = [mask.kv_num_blocks, mask.kv_indices]
    if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
        lists += [mask.full_kv_num_blocks, mask.full_kv_indices]
    return lists


def _met_before(block_mask: Any) -> bool:
    """False where its lists are met for the first time: those made for one call are not worth a step of their own."""
    counts = block_mask.kv_num_blocks
    if getattr(block_mask, _MET, None) is counts:
        return True
    setattr(block_mask, _MET, counts)
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
        self._lists: list[str] = []
        self._depth = 0

    def take_lists(self, block_mask: BlockMask) -> None:
        """The lists are those of each call's BlockMask, whose blocks are like this one's."""
        for i, name in enumerate(_LISTS):
            value = getattr(block_mask, name)
            if value is None and i >= 2:
                self._lines.append(f"if block_mask.{name} is not None: return None")
            else:
                self._lists.append(f"list_{i}")
                self._lines.append(f"list_{i} = block_mask.{name}")
        if len(self._lists) == 3:
            raise _NotPlainError
        self._objects["blocks"] = block_mask.BLOCK_SIZE
        self._lines.append("if block_mask.BLOCK_SIZE != blocks: return None")

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
        code = code_of(function)
        attributes = code.attributes
        name = self._name("function")
        self._lines += [f"{name} = {expression}", f"if type({name}) is not Function: return None"]
        self.expect(f"{name}.__code__", function.__code__)
        if defaults is not None:
            self._recognise_value(f"{name}.__defaults__", defaults)
        if function.__closure__:
            cells = self._name("cells")
            self._lines.append(f"{cells} = {name}.__closure__")
            for i, cell in enumerate(function.__closure__):
                read = attributes.get(function.__code__.co_freevars[i])
                try:
                    self._recognise_value(f"{cells}[{i}].cell_contents", cell.cell_contents, read)
                except ValueError as error:  # an empty cell
                    raise _NotPlainError from error
        if names := code.global_names:
            found = self._name("names")
            self._lines.append(f"{found} = {name}.__globals__")
            for variable in names:
                value = function.__globals__.get(variable)
                place = f"{found}[{variable!r}]" if variable in function.__globals__ else f"{found}.get({variable!r})"
                self._recognise_value(place, value, attributes.get(variable))
        self._depth -= 1

    def _recognise_value(self, expression: str, value: Any, attributes: tuple[str, ...] | None = None) -> None:
        """``attributes``: that are read of the value, where it is not used otherwise."""
        if type(value) is Tensor:
            name = f"tensor_{len(self._tensors)}"
            known = self._tensors.setdefault(id(value), name)
            if known != name:  # the kernel has one place for its two names
                self._lines.append(f"if {expression} is not {known}: return None")
                return
            self._lines.append(f"{name} = {expression}")
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
        elif attributes is not None and (read := plain_attributes(value, attributes)) is not None:
            name = self._name("object")
            self._lines.append(f"{name} = {expression}")
            self.expect(f"type({name})", type(value))
            for attribute, item in read.items():
                self._recognise_value(f"{name}.{attribute}", item)
        else:
            raise _NotPlainError

    def _name(self, what: str) -> str:
        return f"{what}_{len(self._lines)}"

    def step(self, number: int, places: list[Any], results: int) -> _Step:
        found = list(self._tensors.values())
        tensors = ["query", "key", "value", *self._lists, *(found[place] for place in places)]
        lengths = "block_mask.seq_lengths" if self._lists else "None"
        self._objects |= {
            "is_grad_enabled": torch.is_grad_enabled,
            "at_once": _at_once,
            "operator": _operators[len(tensors) - 3][results - 1],
            "number": number,
        }
        lines = [
            "def step(query, key, value, score_mod, block_mask):",
            *self._lines,
            *(f"if type({tensor}) is not Tensor: return None" for tensor in found if tensor not in tensors),
        ]
        if _at_once is not None:
            lines += [
                f"results = at_once(number, {lengths}, {', '.join(tensors)})",
                "if results is not NotImplemented: return results",
            ]
        lines += [f"if type({tensor}) is not Tensor: return None" for tensor in tensors]
        if self._lists:
            lines.append(f"if {lengths} != (query.size(2), key.size(2)): return None")
        lines += [
            f"if is_grad_enabled() and ({' or '.join(f'{tensor}.requires_grad' for tensor in tensors)}): return None",
            f"results = operator({', '.join([*tensors[:3], 'number', *tensors[3:]])})",
            "return results" if results == 1 else "return None if results[0] is None else results",
        ]
        exec(_compiled("\n    ".join(lines)), self._objects)
        step: _Step = self._objects["step"]
        return step


@functools.lru_cache(maxsize=_MOST_KINDS)
def _compiled(source: str) -> types.CodeType:
    return compile(source, "<step of flex_decoding>", "exec")

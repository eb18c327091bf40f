"""What the code of a Python function looks up: names, and attributes of variables."""

from __future__ import annotations

import dis
import types
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Code", "Path", "read_code"]

Path = tuple[str, ...]  # attributes that are read one after another: ("config", "window") of layer.config.window

_READS = frozenset({"LOAD_DEREF", "LOAD_GLOBAL"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})


@dataclass(frozen=True, eq=False, slots=True)
class Code:
    """A code object and what it looks up. It keeps the code object alive, so that its id stays unique.

    Attributes
    ----------
    names : tuple of str
        All global variables, builtins, attributes and imports of the code and of the functions in it. A code object
        does not tell which kind a name is.
    paths : dict of str to tuple of Path
        The closure and global variables that the code uses only to read attributes, and what it reads of them.
    readers : dict of str to set of str
        Attributes that the code reads only of closure and global variables, and these variables.
    """

    code: types.CodeType
    names: tuple[str, ...]
    paths: dict[str, tuple[Path, ...]]
    readers: dict[str, set[str]]


def read_code(code: types.CodeType) -> Code:
    """Disassemble a code object."""
    paths: dict[str, set[Path]] = defaultdict(set)
    readers: dict[str, set[str]] = defaultdict(set)
    others = set(_names_of_inner_functions(code))  # attributes of other values, and variables that are used as a whole
    for name, path in _uses(code):
        if path:
            paths[name].add(path)
        else:
            others.add(name)
        for attribute in path or ():
            readers[attribute].add(name)
    only_read = {name: tuple(sorted(found)) for name, found in paths.items() if name not in others}
    elsewhere = others | paths.keys()  # a name can also be a builtin's
    only_there = {name: of for name, of in readers.items() if name not in elsewhere}
    return Code(code, tuple(dict.fromkeys(_names(code))), only_read, only_there)


def _uses(code: types.CodeType) -> Iterator[tuple[str, Path | None]]:
    """Yield each variable that is read, with the attributes that are read of it; every other name with None."""
    instructions = list(dis.get_instructions(code))
    position = 0
    while position < len(instructions):
        instruction = instructions[position]
        position += 1
        if instruction.opname in _READS:
            path = []
            # Another value can arrive at the target of a jump.
            while (follower := instructions[position]).opname in _ATTRIBUTES and not follower.is_jump_target:
                path.append(follower.argval)
                position += 1
            yield instruction.argval, tuple(path)
        elif isinstance(instruction.argval, str) and not _is_local(instruction):
            yield instruction.argval, None


def _is_local(instruction: dis.Instruction) -> bool:
    """Return whether an instruction names a local variable or loads a string."""
    return "FAST" in instruction.opname or instruction.opname == "LOAD_CONST"


def _names(code: types.CodeType) -> list[str]:
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _names(constant)
    return names


def _names_of_inner_functions(code: types.CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
            yield from constant.co_freevars
            yield from _names_of_inner_functions(constant)

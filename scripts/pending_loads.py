"""Lists arrivals at barriers that do not wait for earlier loads from shared memory.

Usage: pending_loads.py FILE

FILE is an object or cubin (cuobjdump must be on the PATH) or the text that ``cuobjdump -sass`` printed for it.

ptxas expects a load and a later arrival of the same warp to execute in order, so it lets the arrival go before the
loaded value is there. That is right if those that wait for the barrier write with ordinary stores. It is wrong if TMA
or another CTA (``st.async``) then overwrites what is being read: the load may get the new value. So each line of the
output needs an answer to the question who may overwrite these addresses after this arrival. Often another arrival at
the same barrier depends on the value, and protects the load.

The script follows the scoreboards in the control codes of Hopper's instructions over all paths of a kernel. It prints
for each kernel the arrivals with the loads that may be under way: address and text of each instruction.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

SCOREBOARDS = 6
NONE = 7  # the number of no scoreboard
_LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s*/\* 0x[0-9a-f]{16} \*/")
_UPPER = re.compile(r"\s*/\* (0x[0-9a-f]{16}) \*/\s*$")
_PREDICATE = r"(?:@!?U?P\w+ )?"
_LOAD = re.compile(_PREDICATE + r"LDSM?\b")
_ARRIVAL = re.compile(_PREDICATE + r"(?:SYNCS\.ARRIVE|BAR\.ARV|UCGABAR_ARV)")
_WAITS_FOR_ALL = re.compile(_PREDICATE + r"(?:MEMBAR|FENCE)\b")
_WAITS_FOR_ONE = re.compile(_PREDICATE + r"DEPBAR\.LE SB(\d), 0x0\b")
_BRANCH = re.compile(r"(@!?U?P\w+ )?(BRA|JMP)\b(.*)")
_END = re.compile(r"(@!?U?P\w+ )?(EXIT|RET)\b")


class Instruction(NamedTuple):
    """An instruction of a kernel.

    Attributes
    ----------
    waits : int
        A bit for each scoreboard that the instruction waits for.
    sets : int
        The scoreboard that says when its result is there, or ``NONE``.
    """

    address: int
    text: str
    waits: int
    sets: int


#: For each scoreboard, the places of the loads for which it has not been waited. The last element: loads without a
#: scoreboard of their own, which complete before the next load that has one.
State = tuple[frozenset[int], ...]


def kernels_of(dump: str) -> dict[str, list[Instruction]]:
    """Return the instructions of each function of a dump, by its symbol."""
    kernels: dict[str, list[Instruction]] = {}
    kernel: list[Instruction] = []
    begun: tuple[int, str] | None = None
    for line in dump.splitlines():
        if "Function :" in line:
            kernel = kernels.setdefault(line.split(":")[1].strip(), [])
        elif match := _LINE.match(line):
            begun = int(match[1], 16), " ".join(match[2].split())
        elif begun is not None and (match := _UPPER.match(line)):
            control = int(match[1], 16)
            kernel.append(Instruction(*begun, control >> 52 & 0x3F, control >> 46 & 7))
            begun = None
    return kernels


def successors(kernel: list[Instruction]) -> list[list[int]]:
    """Return, for each instruction, the places of those that may follow it."""
    places = {instruction.address: place for place, instruction in enumerate(kernel)}
    following = []
    for place, (_, text, _, _) in enumerate(kernel):
        branch, end = _BRANCH.match(text), _END.match(text)
        targets = [places[int(t, 16)] for t in re.findall(r"0x([0-9a-f]+)$", branch[3])] if branch else []
        always = (branch is not None and not branch[1] and "," not in branch[3]) or (end is not None and not end[1])
        following.append(targets if always or place + 1 == len(kernel) else [*targets, place + 1])
    return following


def after(state: State, place: int, instruction: Instruction) -> State:
    """Return the state after an instruction."""
    pending = list(waited(state, instruction))
    if _LOAD.match(instruction.text):
        if instruction.sets == NONE:
            pending[-1] |= {place}
        else:
            pending[instruction.sets] |= pending[-1] | {place}
            pending[-1] = frozenset()
    return tuple(pending)


def waited(state: State, instruction: Instruction) -> State:
    """Return the state when an instruction begins."""
    if _WAITS_FOR_ALL.match(instruction.text):
        return (frozenset(),) * len(state)
    waits = instruction.waits
    if match := _WAITS_FOR_ONE.match(instruction.text):
        waits |= 1 << int(match[1])
    return tuple(frozenset() if waits >> i & 1 else loads for i, loads in enumerate(state))


def pending_loads(kernel: list[Instruction]) -> dict[int, list[int]]:
    """Return the places of arrivals, each with the places of the loads that may be under way."""
    following = successors(kernel)
    states: list[State | None] = [None] * len(kernel)
    found: dict[int, set[int]] = {}
    work: list[tuple[int, State]] = [(0, (frozenset(),) * (SCOREBOARDS + 1))] if kernel else []
    while work:
        place, state = work.pop()
        known = states[place]
        if known is not None:
            state = tuple(a | b for a, b in zip(known, state, strict=True))
            if state == known:
                continue
        states[place] = state
        instruction = kernel[place]
        if _ARRIVAL.match(instruction.text):
            found.setdefault(place, set()).update(*waited(state, instruction))
        work += [(next_place, after(state, place, instruction)) for next_place in following[place]]
    return {place: sorted(loads) for place, loads in sorted(found.items()) if loads}


def dump_of(path: Path) -> str:
    """Return the text of ``cuobjdump -sass``: read the file, or run cuobjdump on it."""
    data = path.read_bytes()
    if b"\0" not in data:
        return data.decode()
    return subprocess.run(["cuobjdump", "-sass", str(path)], check=True, capture_output=True, text=True).stdout


def main(path: str) -> int:
    for name, kernel in kernels_of(dump_of(Path(path))).items():
        print(f"{name}: {len(kernel)} instructions")
        for arrival, loads in pending_loads(kernel).items():
            print(f"  {kernel[arrival].address:05x} {kernel[arrival].text}")
            for load in loads:
                print(f"    {kernel[load].address:05x} {kernel[load].text}")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))

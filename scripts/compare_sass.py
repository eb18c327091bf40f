"""Compares the machine code of two builds of a unit, to show that a restructured kernel is still the same program.

Usage: compare_sass.py BEFORE AFTER

Each argument is an object or cubin (cuobjdump and nvdisasm must be on the PATH) or the text that ``cuobjdump -sass``
printed for it. Kernels are paired in the order in which they appear, because a rename changes their symbols. For each
pair the script prints the number of instructions, how many differ, and the opcodes whose counts differ. The exit status
is 1 if the counts of any opcode differ.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")


def kernels_of(dump: str) -> list[list[str]]:
    """Return the instructions of each function of a dump, without addresses and encodings."""
    kernels: list[list[str]] = []
    for line in dump.splitlines():
        if "Function :" in line:
            kernels.append([])
        elif kernels and (match := INSTRUCTION.match(line)):
            kernels[-1].append(" ".join(match.group(1).split()))
    return kernels


def opcodes_of(kernel: list[str]) -> Counter[str]:
    """Count each opcode, without predicates and modifiers."""
    return Counter(re.sub(r"^@\S+ ", "", instruction).split()[0].split(".")[0] for instruction in kernel)


def compare(before: list[str], after: list[str]) -> tuple[bool, str]:
    """Return whether two kernels have the same opcodes, and a line that says what differs."""
    if before == after:
        return True, f"{len(before)} instructions, equal"
    counts = opcodes_of(before), opcodes_of(after)
    changed = {op: (counts[0][op], counts[1][op]) for op in sorted(counts[0] | counts[1])}
    changed = {op: pair for op, pair in changed.items() if pair[0] != pair[1]}
    different = sum(x != y for x, y in zip(before, after, strict=False)) + abs(len(before) - len(after))
    words = ", ".join(f"{op} {old} -> {new}" for op, (old, new) in changed.items()) or "the same opcodes"
    return not changed, f"{len(before)} -> {len(after)} instructions, {different} differ: {words}"


def dump_of(path: Path) -> str:
    """Return the text of ``cuobjdump -sass``: read the file, or run cuobjdump on it."""
    data = path.read_bytes()
    if b"\0" not in data:
        return data.decode()
    return subprocess.run(["cuobjdump", "-sass", str(path)], check=True, capture_output=True, text=True).stdout


def main(before: str, after: str) -> int:
    pairs = [kernels_of(dump_of(Path(path))) for path in (before, after)]
    if len(pairs[0]) != len(pairs[1]):
        print(f"{len(pairs[0])} kernels before, {len(pairs[1])} after")
        return 1
    same = True
    for number, (old, new) in enumerate(zip(*pairs, strict=True)):
        fits, words = compare(old, new)
        same &= fits
        print(f"kernel {number}: {words}")
    return 0 if same else 1


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))

"""Runs one compiler command. Records its CPU seconds and warnings, and the registers and spills of every kernel.

Usage: compile_unit.py REPORT SOURCE COMMAND...
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

_ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\w+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_REPORT_LINE = re.compile(r"^ptxas info |^\s+\d+ bytes stack frame")


def parse_ptxas(text: str) -> list[dict[str, Any]]:
    """Return the kernels of a `ptxas -v` report, with their architecture, registers, stack and spilled bytes."""
    kernels: list[dict[str, Any]] = []
    for line in text.splitlines():
        if match := _ENTRY.search(line):
            kernels.append({"name": match.group(1), "arch": match.group(2)})
        elif kernels and (match := _FRAME.search(line)) and "stack" not in kernels[-1]:
            kernels[-1]["stack"] = int(match.group(1))
            kernels[-1]["spills"] = int(match.group(2)) + int(match.group(3))
        elif kernels and (match := _USED.search(line)):
            kernels[-1]["registers"] = int(match.group(1))
    return kernels


def main() -> int:
    report, source, *command = sys.argv[1:]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    kernels = parse_ptxas(done.stdout)
    for line in done.stdout.splitlines():
        if not _REPORT_LINE.match(line):
            print(line)
    for kernel in kernels:
        if kernel.get("spills"):
            print(f"warning: {source}: {kernel['name']} spills {kernel['spills']} bytes on {kernel['arch']}")
    if done.returncode == 0:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = round(usage.ru_utime + usage.ru_stime, 1)
        warnings = [line for line in done.stdout.splitlines() if re.search(r"\bwarning\b", line)]
        record = {"source": source, "cpu_seconds": seconds, "warnings": warnings, "kernels": kernels}
        Path(report).write_text(json.dumps(record))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())

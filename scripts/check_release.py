"""Fails unless a record of GPU tests and compute-sanitizer runs on the current kernel sources in csrc exists.

Usage: check_release.py [FOLDER]

FOLDER is benchmarks/acceptance by default. benchmarks/gpu_run.py writes such a record into OUT/acceptance/.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flashbwd.bench import acceptance, machine  # noqa: E402


def main(arguments: list[str]) -> int:
    folder = Path(arguments[0]) if arguments else ROOT / "benchmarks" / "acceptance"
    sources = machine.kernel_sources_hash()
    found = {name: acceptance.problems(record, sources) for name, record in acceptance.load(folder).items()}
    accepted = [name for name, problems in found.items() if not problems]
    for name, problems in found.items():
        print(f"{name}: {'accepted' if not problems else '; '.join(problems)}")
    if not accepted:
        print(f"no record in {folder} is complete and belongs to these kernel sources ({sources})")
    return 0 if accepted else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

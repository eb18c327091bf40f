"""The environment variables of flashbwd, and a warning about unknown ones.

The build also runs this file, without the package around it, so it imports nothing from flashbwd.
"""

from __future__ import annotations

import os
import warnings

PREFIX = "FLASHBWD_"
BUILD = (
    "FLASHBWD_CUDA",
    "FLASHBWD_CUDA_ARCHS",
    "FLASHBWD_FAMILIES",
    "FLASHBWD_HEAD_DIMS",
)
RUN = ("FLASHBWD_CACHE_DIR", "FLASHBWD_COMMIT")
TESTS = ("FLASHBWD_TEST_SUMMARY",)


def complaints() -> list[str]:
    """Return one message for each variable with the prefix FLASHBWD_ that nothing reads, such as a misspelled one."""
    unknown = sorted(name for name in os.environ if name.startswith(PREFIX) and name not in BUILD + RUN + TESTS)
    return [
        f"flashbwd: the environment variable {name} is unknown and has no effect, expected one of "
        f"{', '.join(RUN)}, or for a build {', '.join(BUILD)}"
        for name in unknown
    ]


def warn_about_unknown_variables() -> None:
    for complaint in complaints():
        warnings.warn(complaint, stacklevel=3)

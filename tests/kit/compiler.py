"""A marker for tests that need NVRTC to compile modifications."""

from __future__ import annotations

import pytest

from flashbwd.mods import nvrtc


def _has_nvrtc() -> bool:
    try:
        nvrtc.nvrtc_version()
    except nvrtc.CompilationError:
        return False
    return True


needs_nvrtc = pytest.mark.skipif(not _has_nvrtc(), reason="this PyTorch comes without NVRTC")

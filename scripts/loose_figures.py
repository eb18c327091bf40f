"""Finds measured figures in prose, which scripts/figures.py allows only in its generated blocks."""

from __future__ import annotations

import re

UNITS = r"(?:ms|us|ns|TFLOP/s|GB/s|MB/s|MiB|GiB|J|W|MHz|s)"
MEASURED = re.compile(
    rf"\b\d+\.\d\d+\b|\b\d[\d.]* {UNITS}\b|\b\d+(?:\.\d+)? times (?:as|faster)\b|\b\d+(?:\.\d+)? %|\b\d\.\d to \d"
)
VERSIONS = re.compile(
    r"\b(?:torch|PyTorch|Python|CUDA|cuDNN|Transformers|driver|versions?)(?: from)?[\s=<>(]*"
    r"[\d.]+(?:(?: to|,)\s[\d.]+)*"
)


def loose_figures(text: str, blocks: re.Pattern[str]) -> list[str]:
    """Return the measured figures of a page outside of its generated blocks and its code."""
    prose = VERSIONS.sub("", re.sub(r"`[^`\n]*`|^```.*?^```|^    .*?$", "", blocks.sub("", text), flags=re.M | re.S))
    return MEASURED.findall(prose)

"""First calls of flex_decoding, and what a warm one costs the host: ``python -m flashbwd.bench.first_calls``.

Each first call is that of a fresh process with an empty cache on disk, tensors and CUDA context ready; "again" is one
with the cache that "new" left. The host's time is the median over calls one behind the other, the device keeping up.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

import flashbwd
from flashbwd.bench.report import table

CALLS = {
    "none": "flashbwd, no modification",
    "softcap": "flashbwd, softcap",
    "alibi": "flashbwd, ALiBi",
    "causal": "flashbwd, causal BlockMask",
    "window": "flashbwd, ALiBi and window BlockMask",
    "new": "flashbwd, a modification to compile",
    "again": "flashbwd, the same from the cache on disk",
    "sdpa": "torch SDPA, no modification",
    "flex": "torch.compile(flex_attention), ALiBi",
}
LENGTH = 8192


def _call(name: str, device: torch.device) -> Callable[[], Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    query = torch.randn(1, 32, 1, 128, device=device, dtype=dtype)
    key, value = (torch.randn(1, 8, LENGTH, 128, device=device, dtype=dtype) for _ in range(2))
    slopes = 2.0 ** -torch.arange(1, 33, device=device).clamp(max=16)
    score_mods: dict[str, Callable[..., Any]] = {
        "softcap": lambda s, b, h, q, k: 30 * torch.tanh(s / 30),
        "alibi": lambda s, b, h, q, k: s + slopes[h] * (k - q),
        "new": lambda s, b, h, q, k: s * 0.75 + torch.sin(k * slopes[h]),
    }
    masks: dict[str, Callable[..., Any]] = {
        "causal": lambda b, h, q, k: q + LENGTH - 100 >= k,
        "window": lambda b, h, q, k: (q + LENGTH - 100 >= k) & (q + LENGTH - k < 1000),
    }
    score_mod = score_mods.get({"window": "alibi", "flex": "alibi", "again": "new"}.get(name, name))
    mask = None if name not in masks else create_block_mask(masks[name], None, None, 1, LENGTH, device=device)
    if name == "sdpa":
        return lambda: torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    attend: Callable[..., Any] = torch.compile(flex_attention) if name == "flex" else flashbwd.flex_decoding
    return lambda: attend(query, key, value, score_mod, mask, enable_gqa=True)


def measure(name: str, device: torch.device) -> tuple[float, float]:
    """Milliseconds of the first call, and microseconds of the host for a warm one, in this process."""

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    with torch.no_grad():
        call = _call(name, device)
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        first = time.perf_counter() - start
        warm = []
        for _ in range(7):
            start = time.perf_counter()
            for _ in range(200 if device.type == "cuda" else 2):
                call()
            warm.append((time.perf_counter() - start) / (200 if device.type == "cuda" else 2))
            synchronize()
    return first * 1e3, statistics.median(warm) * 1e6


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="First calls and host time of flex_decoding.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--one", choices=CALLS, help="measure this call in this process")
    options = parser.parse_args(argv)
    if options.one:
        print(*measure(options.one, torch.device(options.device)))
        return 0
    rows = []
    with tempfile.TemporaryDirectory() as shared:
        for name, meaning in CALLS.items():
            with tempfile.TemporaryDirectory() as own:
                folder = shared if name in ("new", "again") else own
                environment = {**os.environ, "FLASHBWD_CACHE_DIR": folder, "TORCHINDUCTOR_CACHE_DIR": own}
                command = [sys.executable, "-m", "flashbwd.bench.first_calls", "--one", name]
                done = subprocess.run(
                    [*command, "--device", options.device], env=environment, capture_output=True, text=True, check=False
                )
            if done.returncode:
                print(done.stderr, file=sys.stderr)
                return 1
            first, warm = map(float, done.stdout.split()[-2:])
            rows.append([meaning, f"{first:.1f}", f"{warm:.1f}"])
    print(table(["call", "first call, ms", "warm call, host us"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

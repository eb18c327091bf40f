"""Measures the host time of flex_decoding calls: ``python -m flashbwd.bench.host_time`` on a machine with a GPU.

Warm calls are timed in bursts. A burst starts with an idle GPU and is short enough to fit into its launch queue, so the
host never waits for the GPU. Machines differ and may be busy, so the script spreads the bursts of a row over the run.
Two rows of the table serve as a comparison: PyTorch's addition of two numbers on the GPU (an operator, an allocation
and a launch) and SDPA. A first call is the first call of a new process; its time includes the GPU work, but not the
creation of the inputs.

``--warm`` skips the first calls. ``--only NAME`` prints the time of the first call of one row, in milliseconds.
``--backward`` measures small backwards of attention and norms instead (``backward_time``), also on a CPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask
from torch.nn.functional import scaled_dot_product_attention

import flashbwd
from flashbwd.bench import backward_time, machine
from flashbwd.bench.measure import host_bursts

SEQLEN_K, PAGE = 8192, 128
CALLS, BURSTS, PASSES = 150, 4, 10  # calls per burst, bursts per pass, passes per run
SDPA, ADDITION = "PyTorch's SDPA", "PyTorch's addition of two numbers"


def modifications() -> dict[str, tuple[Any, ...]]:
    """Return (score_mod, mask_mod, other options of flex_decoding) by row name."""
    slopes, offsets = torch.rand(2, 32, device="cuda")
    table = torch.rand(32, SEQLEN_K, device="cuda")

    def alibi(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + slopes[h] * (k - q)

    length = torch.tensor(SEQLEN_K - 9, device="cuda")

    def scaled_and_moved(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * slopes[h] + offsets[h] + table[h, k]

    gain = argparse.Namespace(value=0.5)

    def by_object(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + gain.value * table[h, k]

    gains = [0.5]
    mods = flashbwd.compile_mods(lambda s, b, h, q, k, *, table: s + gains[0] * table[h, k])

    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q + SEQLEN_K - 9 >= k

    return {
        "none": (None, None),
        "softcap": (lambda s, b, h, q, k: 30 * torch.tanh(s / 30), None),
        "ALiBi": (alibi, None),
        "causal BlockMask": (None, causal),
        "ALiBi and causal BlockMask": (alibi, causal),
        "a table of biases": (lambda s, b, h, q, k: s + table[h, k], None),
        "two masks by and_masks": (None, and_masks(causal, lambda b, h, q, k: k < length)),
        "three tensors, and a length by mask": (scaled_and_moved, lambda b, h, q, k: k < length),
        "an attribute of an object": (by_object, None),
        "a list, traced at each call": (lambda s, b, h, q, k: s + gains[0] * table[h, k], None),
        "a list, by compile_mods": (mods(table=table).score_mod, None),
        "pages of PyTorch's PagedAttention": (None, causal, {}),
        "none; the lse too": (None, None, {"return_lse": True}),
        "ALiBi and causal BlockMask; the lse too": (alibi, causal, {"return_lse": True}),
        "none; SPLIT_KV": (None, None, {"kernel_options": {"SPLIT_KV": 16}}),
        "causal BlockMask, another each call": (None, causal, {}),
    }


def call_of(name: str) -> Callable[[], Any]:
    """Return the call of a row: one query per head, 32 query heads and 8 KV heads."""
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = ((1, 32, 1, 128), (1, 8, SEQLEN_K, 128), (1, 8, SEQLEN_K, 128))
    q, k, v = (torch.randn(size, generator=generator, device="cuda", dtype=torch.bfloat16) for size in sizes)
    if name == SDPA:
        return lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True)
    if name == ADDITION:
        number = torch.ones((), device="cuda")
        return lambda: torch.add(number, number)
    score_mod, mask_mod, *more = modifications()[name]
    options = more[0] if more else {}
    block_mask = None
    if mask_mod is not None:
        block_mask = create_block_mask(mask_mod, 1, None, 1, SEQLEN_K, device="cuda")
    if block_mask is not None and "another" in name:
        masks = [copy_of(block_mask) for _ in range(CALLS * (BURSTS * PASSES + 1))]
        others = iter(masks)
        return lambda: flashbwd.flex_decoding(q, k, v, score_mod, next(others), enable_gqa=True)
    if block_mask is not None and "pages" in name:
        pages = PagedAttention(SEQLEN_K // PAGE, PAGE, 1, device="cuda")
        pages.reserve(torch.tensor([0], device="cuda"), torch.tensor([SEQLEN_K], device="cuda"))
        block_mask = pages.convert_logical_block_mask(block_mask)
    return lambda: flashbwd.flex_decoding(q, k, v, score_mod, block_mask, enable_gqa=True, **options)


def copy_of(mask: BlockMask) -> BlockMask:
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    counts, indices, full_counts, full_indices = (getattr(mask, name).clone() for name in names)
    return BlockMask.from_kv_blocks(
        counts, indices, full_counts, full_indices, mask.BLOCK_SIZE, mask.mask_mod, mask.seq_lengths
    )


@torch.no_grad()
def warm_calls(names: Sequence[str]) -> dict[str, list[float]]:
    """Return microseconds per call by name, one value per burst."""
    calls = {name: call_of(name) for name in names}
    for call in calls.values():
        host_bursts(call, 1, CALLS)
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(PASSES):
        for name, call in calls.items():
            times[name] += host_bursts(call, BURSTS, CALLS)
    return times


@torch.no_grad()
def first_call(name: str) -> float:
    """Return the milliseconds of the first call in this process, which must not have called flex_decoding before."""
    call = call_of(name)
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def first_call_of_a_process(name: str, cache: str) -> float:
    command = [sys.executable, "-m", "flashbwd.bench.host_time", "--only", name]
    environment = os.environ | {"FLASHBWD_CACHE_DIR": cache}
    return float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m flashbwd.bench.host_time", allow_abbrev=False)
    parser.add_argument("--warm", action="store_true", help="skip the first calls")
    parser.add_argument("--only", metavar="NAME", help="print the time of the first call of one row, in milliseconds")
    parser.add_argument("--backward", action="store_true", help="compare small backwards with PyTorch's instead")
    options = parser.parse_args(arguments)
    if not options.backward and not torch.cuda.is_available():
        parser.error("flex_decoding is timed on a GPU, and there is none; only --backward also runs on a CPU")
    if options.backward:
        backward_time.main(machine.default_device())
        return
    if options.only:
        print(first_call(options.only))
        return
    columns = ["warm call, us", "median, us", "first call, ms", "with the cache on disk, ms"]
    columns = columns[: 2 if options.warm else 4]
    print(f"| modification | {' | '.join(columns)} |\n| --- {'| --- ' * len(columns)}|")
    with tempfile.TemporaryDirectory() as cache:
        for name, times in warm_calls([*modifications(), SDPA, ADDITION]).items():
            figures = [f"{time:.1f}" for time in (min(times), statistics.median(times))]
            if not options.warm:
                figures += [f"{first_call_of_a_process(name, cache):.0f}" for _ in range(2)]
            print(f"| {name} | {' | '.join(figures)} |", flush=True)
    addition = min(timeit.repeat("x += 1", "x = 0", number=1_000_000, repeat=5))
    print(f"\none addition in Python: {addition * 1e3:.1f} ns")


if __name__ == "__main__":
    main()

"""What a call of flex_decoding costs the host: ``python -m flashbwd.bench.host_time`` on a machine with a GPU.

Warm calls are timed in bursts that begin with an idle GPU and are short enough for its queue to take them all, so that
nobody waits for it. First calls are those of new processes, up to the finished result, with the inputs already made.
An addition of Python's is timed beside them: machines differ, and others may keep one busy.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask
from torch.nn.functional import scaled_dot_product_attention

import flashbwd
from flashbwd.bench.measure import host_bursts

SEQLEN_K, PAGE = 8192, 128
CALLS, ROUNDS = 150, 25  # of a burst; bursts


def modifications() -> dict[str, tuple[Any, ...]]:
    """score_mod and mask_mod by name, and what else is asked for."""
    slopes, offsets = torch.rand(2, 32, device="cuda")
    table = torch.rand(32, SEQLEN_K, device="cuda")

    def alibi(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + slopes[h] * (k - q)

    length = torch.tensor(SEQLEN_K - 9, device="cuda")

    def scaled_and_moved(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * slopes[h] + offsets[h] + table[h, k]

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
        "causal BlockMask, another each call": (None, causal, {}),
        "pages of PyTorch's PagedAttention": (None, causal, {}),
        "none; the lse too": (None, None, {"return_lse": True}),
        "ALiBi and causal BlockMask; the lse too": (alibi, causal, {"return_lse": True}),
        "none; SPLIT_KV": (None, None, {"kernel_options": {"SPLIT_KV": 16}}),
    }


def call_of(name: str) -> Callable[[], Any]:
    """One query a head, 32 heads over 8 of keys; "SDPA" is PyTorch's."""
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = ((1, 32, 1, 128), (1, 8, SEQLEN_K, 128), (1, 8, SEQLEN_K, 128))
    q, k, v = (torch.randn(size, generator=generator, device="cuda", dtype=torch.bfloat16) for size in sizes)
    if name == "SDPA":
        return lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True)
    score_mod, mask_mod, *more = modifications()[name]
    options = more[0] if more else {}
    block_mask = None
    if mask_mod is not None:
        block_mask = create_block_mask(mask_mod, 1, None, 1, SEQLEN_K, device="cuda")
    if block_mask is not None and "another" in name:
        masks = [copy_of(block_mask) for _ in range(CALLS * (ROUNDS + 1))]
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
def warm_call(name: str) -> tuple[float, float]:
    """Microseconds, of the quickest burst and the median."""
    call = call_of(name)
    for _ in range(CALLS):
        call()
    times = host_bursts(call, ROUNDS, CALLS)
    return min(times), statistics.median(times)


@torch.no_grad()
def first_call(name: str) -> float:
    """Milliseconds; of this process, which must not have called before."""
    call = call_of(name)
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def first_call_of_a_process(name: str, cache: str) -> float:
    command = [sys.executable, "-m", "flashbwd.bench.host_time", name]
    environment = os.environ | {"FLASHBWD_CACHE_DIR": cache}
    return float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    if len(sys.argv) > 1:
        print(first_call(sys.argv[1]))
        return
    print("| modification | warm call, us | median, us | first call, ms | with the cache on disk, ms |")
    print("| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as cache:
        for name in modifications():
            first, again = (first_call_of_a_process(name, cache) for _ in range(2))
            best, median = warm_call(name)
            print(f"| {name} | {best:.1f} | {median:.1f} | {first:.0f} | {again:.0f} |", flush=True)
    best, median = warm_call("SDPA")
    print(f"| PyTorch's SDPA | {best:.1f} | {median:.1f} | | |")
    addition = min(timeit.repeat("x += 1", "x = 0", number=1_000_000, repeat=5))
    print(f"\nan addition of Python: {addition * 1e3:.1f} ns")


if __name__ == "__main__":
    main()

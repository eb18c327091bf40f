"""Generate text with a small model: a growing key-value cache, ALiBi and a document mask, one token at a time.

In each step, one query per sequence attends to all keys so far, first with flashbwd's flex_decoding, then with
PyTorch's flex_attention on the same tokens. Both must predict the same tokens, or the exit status is 1. In bf16, three
out of four must agree, because near ties may break differently. The script prints the tokens per second of both. With
matplotlib, it also plots the time of every step in `out/decode.png`.

    python examples/decode.py                      # seconds on a CPU; bf16 and a longer prompt on a GPU
    python examples/decode.py --prompt 16384 --steps 256 --out /tmp/decode

The weights are random, so the text is noise. The example shows how to combine a cache, a mask and a score modification.
Each row of the cache holds several documents. The ALiBi slopes, the document ids and the length of the cache are
captured tensors. A step changes only their values, so nothing is compiled after the first step.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import rms_norm

import flashbwd

BLOCK = 128  # keys per block of the mask


@dataclass(frozen=True)
class Config:
    """Sizes of the model."""

    layers: int = 2
    heads: int = 8
    heads_kv: int = 2
    head_dim: int = 64
    vocabulary: int = 256
    batch: int = 2


class Cache:
    """Keys and values of every layer for up to ``capacity`` tokens, and the tensors that the modifications capture."""

    def __init__(self, config: Config, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        shape = (config.layers, config.batch, config.heads_kv, capacity, config.head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros_like(self.keys)
        self.length = torch.zeros((), device=device, dtype=torch.int32)
        self.documents = torch.zeros(config.batch, capacity, device=device, dtype=torch.int32)
        self.slopes = 2.0 ** -torch.arange(1, config.heads + 1, device=device)
        self.blocks = torch.arange(capacity // BLOCK, device=device, dtype=torch.int32).view(1, 1, 1, -1)

    def mask(self) -> BlockMask:
        """A mask of the blocks that are in use; within them, the keys of the last token's document are visible."""
        length, documents = self.length, self.documents

        def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k < length) & (documents[b, k] == documents[b, length - 1])

        used = (length + BLOCK - 1) // BLOCK
        return BlockMask.from_kv_blocks(
            used.view(1, 1, 1),
            self.blocks,
            BLOCK_SIZE=BLOCK,
            mask_mod=visible,
            seq_lengths=(1, self.documents.shape[1]),
            compute_q_blocks=False,
        )

    def alibi(self) -> Callable[..., Tensor]:
        slopes, length = self.slopes, self.length
        return lambda score, b, h, q, k: score - slopes[h] * (length - 1 - k)


class Model(nn.Module):
    """A decoder of attention layers with random weights; its norms and matrix products are PyTorch's."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        width = config.heads * config.head_dim
        kv = config.heads_kv * config.head_dim
        self.embedding = nn.Embedding(config.vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=0.02)  # small, so that attention decides the next token
        self.head = nn.Linear(width, config.vocabulary, bias=False)
        self.qkv = nn.ModuleList(nn.Linear(width, width + 2 * kv, bias=False) for _ in range(config.layers))
        self.out = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(config.layers))

    def step(self, tokens: Tensor, cache: Cache, attend: Callable[..., Any]) -> Tensor:
        """Append ``tokens`` (B,) to the cache and return the most likely next tokens."""
        c = self.config
        position = cache.length.long().view(1)
        cache.length += 1
        mask, alibi = cache.mask(), cache.alibi()
        x = self.embedding(tokens)
        for layer in range(c.layers):
            heads = self.qkv[layer](rms_norm(x, x.shape[-1:])).view(c.batch, -1, 1, c.head_dim)
            q, k, v = heads.split([c.heads, c.heads_kv, c.heads_kv], dim=1)
            cache.keys[layer].index_copy_(2, position, k)
            cache.values[layer].index_copy_(2, position, v)
            attended = attend(q, cache.keys[layer], cache.values[layer], alibi, mask, enable_gqa=True)
            x = x + self.out[layer](attended.reshape(c.batch, -1))
        return self.head(rms_norm(x, x.shape[-1:])).argmax(-1)


def filled_cache(config: Config, prompt: int, steps: int, device: torch.device, dtype: torch.dtype) -> Cache:
    """A cache with ``prompt`` random tokens of three documents; generation continues the last document."""
    capacity = -(-(prompt + steps) // BLOCK) * BLOCK
    cache = Cache(config, capacity, device, dtype)
    generator = torch.Generator(device).manual_seed(1)
    for memory in (cache.keys, cache.values):
        memory[..., :prompt, :] = torch.randn(
            memory[..., :prompt, :].shape, generator=generator, device=device, dtype=dtype
        )
    borders = torch.arange(capacity, device=device) * 3 // max(prompt, 1)
    cache.documents.copy_(borders.clamp(max=2))
    cache.length.fill_(prompt)
    return cache


def generate(
    model: Model, cache: Cache, steps: int, attend: Callable[..., Any], fed: Tensor | None = None
) -> tuple[Tensor, list[float]]:
    """Return tokens (B, steps) and the milliseconds of every step except the first, which compiles.

    If ``fed`` (B, steps) is given, its tokens are the inputs instead of the predicted ones. A tie that breaks
    differently then changes only one token.
    """
    device = cache.length.device
    tokens = torch.arange(model.config.batch, device=device)
    found: list[Tensor] = []
    times: list[Any] = []
    for step in range(steps):
        if step > 0:
            tokens = found[-1] if fed is None else fed[:, step - 1]
        found.append(model.step(tokens, cache, attend))
        times.append(now(device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return torch.stack(found, 1), [milliseconds(*pair) for pair in itertools.pairwise(times)]


def now(device: torch.device) -> Any:
    """A point in time: on a GPU an event, so that the CPU need not wait for every step."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(first: Any, last: Any) -> float:
    return float((last - first) * 1e3 if isinstance(first, float) else first.elapsed_time(last))


def plot(path: Path, prompt: int, times: dict[str, list[float]], title: str) -> None:
    """Draw the time of each step over the number of tokens in the cache, if matplotlib is installed."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: it needs matplotlib (in flashbwd's clone: pip install '.[bench]')")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for (name, values), color in zip(times.items(), ("C3", "0.6"), strict=True):
        axes.plot(range(prompt + 2, prompt + 2 + len(values)), values, color=color, label=name)
    axes.set_title(title)
    axes.set_xlabel("tokens in the cache")
    axes.set_ylabel("milliseconds per step")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(f"wrote {path}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Generate tokens on a growing cache with flex_decoding.", allow_abbrev=False
    )
    parser.add_argument("--prompt", type=int, help="tokens in the cache before the first step")
    parser.add_argument("--steps", type=int, default=32, help="tokens to generate (%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of decode.png (%(default)s)")
    options = parser.parse_args(argv)
    if options.steps < 2:
        parser.error("--steps: expected at least 2, because the first step is not timed")
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    prompt = options.prompt or (32768 if on_gpu else 1024)
    torch.manual_seed(0)
    config = Config()
    model = Model(config).to(device, dtype).requires_grad_(False)
    # PyTorch's compiled CPU kernel for one query supports no block mask. The backend "eager" runs PyTorch's operators.
    peer = torch.compile(flex_attention, backend="inductor" if on_gpu else "eager")
    runs: dict[str, Callable[..., Any]] = {"flashbwd": flashbwd.flex_decoding, "PyTorch flex_attention": peer}
    tokens: dict[str, Tensor] = {}
    times: dict[str, list[float]] = {}
    print(f"{prompt} tokens in the cache, {options.steps} steps for {config.batch} sequences, {dtype}, {device}")
    with torch.no_grad():
        for name, attend in runs.items():
            cache = filled_cache(config, prompt, options.steps, device, dtype)
            tokens[name], times[name] = generate(model, cache, options.steps, attend, fed=tokens.get("flashbwd"))
            values = times[name]
            print(f"{name:24} {config.batch * len(values) / sum(values) * 1e3:9.1f} tokens/s", flush=True)
    ours, theirs = tokens.values()
    same = float((ours == theirs).float().mean())
    agree = same >= (0.75 if on_gpu else 1.0)  # in bf16 a near tie may break differently
    print(f"tokens that agree: {same:.1%}" if agree else f"FAILED: only {same:.1%} of the tokens agree")
    if not on_gpu:
        print("The speeds above say nothing about the kernels: on a CPU, flashbwd runs its reference backend.")
    plot(options.out / "decode.png", prompt, times, f"Decoding step, {config.batch} sequences ({device.type}, {dtype})")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())

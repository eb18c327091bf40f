"""Train a small transformer on several devices and on one device; gradients and loss curves must agree.

    torchrun --nproc-per-node 2 examples/train_distributed.py --parallel fsdp     # parameters sharded, batches split
    torchrun --nproc-per-node 2 examples/train_distributed.py --parallel tensor   # heads, columns and rows split
    torchrun --nproc-per-node 2 examples/train_distributed.py --parallel context  # sequences split
    torchrun --nproc-per-node 8 examples/train_distributed.py --parallel fsdp,tensor,context
    torchrun --nproc-per-node 8 examples/train_distributed.py --parallel fsdp=4,context=2

With GPUs, each process uses one GPU, communicates over NCCL and trains in bf16. Without GPUs, the processes communicate
over gloo and train in fp32 on the CPU. Sequences are split by PyTorch's ``context_parallel`` or, with ``--ring
flashbwd``, by flashbwd's ``context_parallel_attention``. PyTorch's needs GPUs and does not combine with tensor
parallelism. All other distributed code is PyTorch's: ``fully_shard`` and ``parallelize_module``. With matplotlib, the
script also plots both loss curves in the folder ``out``. The exit status is 1 if the run disagrees with that on one
device.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, silu

import flashbwd
from flashbwd.integrations import distributed

# The tolerances of train_gpt.py, for the loss of one step in nats and for all gradients on the first batch (relative
# 2-norm).
LOSS_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.02}
GRADIENT_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of the run."""

    layers: int = 2
    width: int = 256
    heads: int = 8
    context: int = 256
    batch: int = 8
    steps: int = 20
    learning_rate: float = 1e-3
    seed: int = 0


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v and the result are (B, S, H, D)


def our_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flashbwd.attention(q, k, v, causal=True)


def torch_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's function, which ``context_parallel`` replaces by ring attention."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class SelfAttention(nn.Module):
    def __init__(self, config: Config, attention: Attention) -> None:
        super().__init__()
        self.head_dim = config.width // config.heads
        self.attention = attention
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(config.width, config.width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        return self.wo(self.attention(q, k, v).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(config.width, 2 * config.width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config: Config, attention: Attention) -> None:
        super().__init__()
        self.norm1 = flashbwd.LayerNorm(config.width)
        self.attention = SelfAttention(config, attention)
        self.norm2 = flashbwd.RMSNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """A model that predicts the next byte."""

    def __init__(self, config: Config, attention: Attention) -> None:
        super().__init__()
        self.token = nn.Embedding(256, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.layers))
        self.norm = flashbwd.RMSNorm(config.width)
        self.head = nn.Linear(config.width, 256, bias=False)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Logits (B, S, 256) for bytes ids (B, S) at positions (B, S)."""
        x = self.token(ids) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# ---- how the model and the batch are split ----

AXES = ("fsdp", "context", "tensor")  # mesh dimensions; the devices of the last one communicate most


def axis_sizes(text: str, devices: int) -> dict[str, int]:
    """Read ``axis,axis`` or ``axis=size,axis=size``. The devices are divided among the axes without a given size."""
    sizes = dict.fromkeys(AXES, 1)
    free = []
    for part in text.split(","):
        axis, _, size = part.strip().partition("=")
        if axis not in AXES or (size and not size.isdigit()):
            raise ValueError(f"--parallel has {part!r}, expected one of {', '.join(AXES)}, each with or without =SIZE")
        if size:
            sizes[axis] = int(size)
        else:
            free.append(axis)
    left, rest = divmod(devices, max(1, math.prod(sizes.values())))
    prime = 2
    factors = 0
    while free and left > 1:
        if left % prime:
            prime += 1
            continue
        sizes[free[factors % len(free)]] *= prime
        left, factors = left // prime, factors + 1
    if left != 1 or rest:
        raise ValueError(f"--parallel {text} makes {math.prod(sizes.values())} devices, expected {devices}")
    return sizes


@dataclass(frozen=True)
class Layout:
    """The devices as a mesh with the dimensions ``AXES``. ``ring`` names the library that splits sequences."""

    mesh: DeviceMesh
    ring: str

    def size(self, axis: str) -> int:
        return self.mesh[axis].size()

    @property
    def splits_sequences(self) -> bool:
        return self.size("context") > 1

    def attention(self, config: Config) -> Attention:
        if not self.splits_sequences:
            return our_attention
        if self.ring == "torch":
            return torch_attention
        split = distributed.split_context(self.mesh["context"], seqlen=config.context)
        return functools.partial(distributed.context_parallel_attention, split=split)

    def distribute(self, model: Transformer) -> None:
        if self.size("tensor") > 1:
            # Attention over split sequences gets the local heads as plain tensors. All other attention gets DTensors.
            split_tensors(model, self.mesh["tensor"], local_heads=self.splits_sequences)
        # Gradients are averaged over all devices that hold different tokens.
        different_tokens = self.mesh["fsdp", "context"]._flatten("tokens")
        if different_tokens.size() > 1:
            for block in model.blocks:
                fully_shard(block, mesh=different_tokens)
            fully_shard(model, mesh=different_tokens)

    def part_of(self, batch: list[Tensor]) -> list[Tensor]:
        """This device's sequences. The function also selects the rows, unless PyTorch's context manager does."""
        mesh = self.mesh["fsdp"]
        batch = [x.chunk(mesh.size())[mesh.get_local_rank()].clone() for x in batch]
        if self.splits_sequences and self.ring == "flashbwd":
            split = distributed.split_context(self.mesh["context"], seqlen=batch[0].shape[1])
            batch = [split.take(x, dim=1) for x in batch]
        return batch

    def context(self, batch: list[Tensor]) -> contextlib.AbstractContextManager[Any]:
        if self.splits_sequences and self.ring == "torch":
            return context_parallel(self.mesh["context"], buffers=batch, buffer_seq_dims=[1] * len(batch))
        return contextlib.nullcontext()

    def mean(self, loss: Tensor) -> Tensor:
        for axis in ("fsdp", "context"):
            dist.all_reduce(loss, group=self.mesh[axis].get_group())
        return loss / (self.size("fsdp") * self.size("context"))


def split_tensors(model: Transformer, mesh: DeviceMesh, local_heads: bool) -> None:
    """Tensor parallelism: shard heads and hidden columns within a block, and the sequence between blocks."""
    distributed.register()
    gathered = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    ends = {
        "token": embedding,
        "position": embedding,
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)
    for block in model.blocks:
        projections = ("attention.wq", "attention.wk", "attention.wv")
        heads = dict.fromkeys(projections, ColwiseParallel(use_local_output=local_heads))
        columns = dict.fromkeys(("mlp.gate", "mlp.up"), ColwiseParallel())
        rows = dict.fromkeys(("attention.wo", "mlp.down"), RowwiseParallel(output_layouts=Shard(1)))
        norms = dict.fromkeys(("norm1", "norm2"), SequenceParallel())
        inputs = dict.fromkeys(("attention", "mlp"), gathered)
        parallelize_module(block, mesh, {**heads, **columns, **rows, **norms, **inputs})


# ---- training ----


def draw(text: Tensor, config: Config, generator: torch.Generator) -> list[Tensor]:
    """Bytes, the bytes that follow them, and positions, each (B, S)."""
    starts = torch.randint(len(text) - config.context, (config.batch, 1), generator=generator)
    windows = text[starts + torch.arange(config.context + 1)]
    positions = torch.arange(config.context).repeat(config.batch, 1)
    return [windows[:, :-1].contiguous(), windows[:, 1:].contiguous(), positions]


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(
    text: Tensor, config: Config, device: torch.device, layout: Layout | None, report: Callable[[str], None]
) -> tuple[Tensor, list[float]]:
    """All gradients of the first step as one vector, and the loss of every step. Without a layout, use one device."""
    torch.manual_seed(config.seed)
    model = Transformer(config, our_attention if layout is None else layout.attention(config)).to(device)
    if layout is not None:
        layout.distribute(model)
    # A multi-tensor kernel does not accept DTensors of different meshes.
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, foreach=False)
    generator = torch.Generator().manual_seed(config.seed)
    gradients = torch.empty(0)
    losses = []
    for step in range(config.steps):
        batch = [x.to(device) for x in draw(text, config, generator)]
        if layout is not None:
            batch = layout.part_of(batch)
        precision = torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()
        with contextlib.nullcontext() if layout is None else layout.context(batch):
            ids, targets, positions = batch
            with precision:
                logits = model(ids, positions)
            loss = cross_entropy(logits.float().flatten(0, 1), targets.flatten())
            loss.backward()
        if step == 0:
            gradients = torch.cat([whole(p.grad).double().flatten() for p in model.parameters() if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss.detach() if layout is None else layout.mean(loss.detach())).item())
        report(f"step {step + 1} of {config.steps}: loss {losses[-1]:.3f}")
    return gradients, losses


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add(
        "--parallel",
        default="fsdp",
        help="fsdp, context, tensor or several of them, with or without =SIZE (%(default)s)",
    )
    add("--steps", type=int, default=Config.steps, help="training steps of each run (%(default)s)")
    add("--device", choices=["cpu", "cuda"], help="default: cuda if there is a GPU")
    add("--ring", choices=["torch", "flashbwd"], help="the library that splits sequences (default: torch where it can)")
    add("--out", type=Path, default=Path("out"), help="folder of the results, a JSON file and a plot (%(default)s)")
    options = parser.parse_args(arguments)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        options.sizes = axis_sizes(options.parallel, int(os.environ.get("WORLD_SIZE", 1)))
    except ValueError as error:
        parser.error(str(error))
    torch_can = options.device == "cuda" and options.sizes["tensor"] == 1
    options.ring = options.ring or ("torch" if torch_can else "flashbwd")
    if options.ring == "torch" and options.sizes["context"] > 1 and not torch_can:
        parser.error("PyTorch's context parallelism needs GPUs, and does not combine with tensor parallelism here")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    config = Config(steps=options.steps)
    device, dtype = torch.device("cpu"), torch.float32
    if options.device == "cuda":
        device, dtype = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))), torch.bfloat16
        torch.cuda.set_device(device)
    # PyTorch warns that gathering a gradient is slow if FSDP and tensor parallelism both split it. This happens once.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    # PyTorch's default backend on a machine with a GPU serves only the GPU, but --device may be cpu.
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    mesh = init_device_mesh(options.device, tuple(options.sizes[axis] for axis in AXES), mesh_dim_names=AXES)
    text = torch.tensor(list("".join(topics.topics[name] for name in sorted(topics.topics)).encode()))

    def report(line: str) -> None:
        if dist.get_rank() == 0:
            print(line, flush=True)

    first = dist.get_rank() == 0
    one = train(text, config, device, None, lambda line: report(f"one device, {line}")) if first else None
    flashbwd.stats(reset=True)
    start = time.perf_counter()
    with flashbwd.enable():
        layout = Layout(mesh, options.ring)
        several = train(text, config, device, layout, lambda line: report(f"{dist.get_world_size()} devices, {line}"))
    seconds = time.perf_counter() - start
    agree = [one is not None and compare(options, config, device, dtype, one, several, seconds)]
    dist.broadcast_object_list(agree)
    dist.barrier()  # no process exits while another one still communicates with it
    dist.destroy_process_group()
    return 0 if agree[0] else 1


def compare(
    options: argparse.Namespace,
    config: Config,
    device: torch.device,
    dtype: torch.dtype,
    one: tuple[Tensor, list[float]],
    several: tuple[Tensor, list[float]],
    seconds: float,
) -> bool:
    """Write and print how much gradients and losses differ; return whether the differences are allowed."""
    (one_gradient, one_losses), (gradient, losses) = one, several
    gradient_error = ((gradient - one_gradient).norm() / one_gradient.norm()).item()
    loss_error = max(abs(a - b) for a, b in zip(losses, one_losses, strict=True))
    # Comparisons with NaN are false, so a NaN fails.
    agree = gradient_error <= GRADIENT_TOLERANCE[dtype] and loss_error <= LOSS_TOLERANCE[dtype]
    overridden = {name: stats._asdict() for name, stats in flashbwd.stats().items() if stats != (0, {})}
    used = {axis: size for axis, size in options.sizes.items() if size > 1}
    result = {
        "config": asdict(config),
        "parallel": options.parallel,
        "sizes": options.sizes,
        "ring": options.ring if "context" in used else None,
        "devices": dist.get_world_size(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "dtype": str(dtype),
        "gradient_error": gradient_error,
        "loss_error": loss_error,
        "agree": agree,
        "losses": {"one device": one_losses, "all devices": losses},
        "seconds": seconds,
        "overridden": overridden,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"train_distributed_{options.parallel.replace(',', '_')}.json"
    split = ", ".join(f"{axis} {size}" for axis, size in used.items()) or "nothing split"
    ring = f", sequences by {options.ring}" if "context" in used else ""
    print(f"{split}{ring} ({device.type}, {dtype}): loss {losses[0]:.3f} -> {losses[-1]:.3f} in {seconds:.1f} s")
    print(f"first gradient: relative difference {gradient_error:.1e} (allowed {GRADIENT_TOLERANCE[dtype]:g})")
    print(f"loss curves: largest difference {loss_error:.1e} (allowed {LOSS_TOLERANCE[dtype]:g})")
    for name, stats in overridden.items():
        print(f"{name}: {stats['hits']} calls by flashbwd's kernels, by PyTorch's {stats['fallbacks'] or 'none'}")
    print("the two runs agree" if agree else "FAILED: the two runs do not agree")
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}")
    plot(path.with_suffix(".png"), one_losses, losses)
    return agree


def plot(path: Path, one: list[float], several: list[float]) -> None:
    """Draw both loss curves, if matplotlib is installed."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: it needs matplotlib (in flashbwd's clone: pip install '.[bench]')")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    steps = range(1, len(one) + 1)
    axes.plot(steps, one, color="0.6", linewidth=3, label="one device")
    axes.plot(steps, several, color="C3", linewidth=1, label=f"{dist.get_world_size()} devices")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(f"wrote {path}")


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # threads of the process group that return to Python during its shutdown would abort the process

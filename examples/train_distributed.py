"""Train a small transformer on several devices and on one device; gradients and loss curves must agree.

    torchrun --nproc-per-node 2 examples/train_distributed.py --parallel fsdp     # parameters sharded, batches split
    torchrun --nproc-per-node 2 examples/train_distributed.py --parallel tensor   # heads, columns and rows split
    torchrun --nproc-per-node 2 examples/train_distributed.py --parallel context  # sequences split: ring attention

With GPUs, each process uses one GPU, communicates over NCCL and trains in bf16. Without GPUs, the processes communicate
over gloo and train in fp32 on the CPU, where PyTorch has no context parallelism. All distributed code is PyTorch's:
``fully_shard``, ``parallelize_module``, ``context_parallel``. The example shows that flashbwd's operators work with it,
and that ring attention uses flashbwd's kernels under ``flashbwd.enable()``. The exit status is 1 if the run disagrees
with that on one device.
"""

from __future__ import annotations

import argparse
import contextlib
import json
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

# As in train_gpt.py: for the loss of one step in nats, and for all gradients on the first batch (relative, 2-norms).
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
    out = flashbwd.attention(q, k, v, causal=True)
    assert isinstance(out, Tensor)
    return out


def torch_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's function, which ``context_parallel`` replaces with ring attention."""
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


# ---- differences between the kinds of parallelism ----


def shard_parameters(model: Transformer, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def split_tensors(model: Transformer, mesh: DeviceMesh) -> None:
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
        heads = dict.fromkeys(("attention.wq", "attention.wk", "attention.wv"), ColwiseParallel(use_local_output=False))
        columns = dict.fromkeys(("mlp.gate", "mlp.up"), ColwiseParallel())
        rows = dict.fromkeys(("attention.wo", "mlp.down"), RowwiseParallel(output_layouts=Shard(1)))
        norms = dict.fromkeys(("norm1", "norm2"), SequenceParallel())
        inputs = dict.fromkeys(("attention", "mlp"), gathered)
        parallelize_module(block, mesh, {**heads, **columns, **rows, **norms, **inputs})


def part_of_batch(batch: list[Tensor], mesh: DeviceMesh) -> list[Tensor]:
    return [x.chunk(mesh.size())[mesh.get_local_rank()] for x in batch]


@dataclass(frozen=True)
class Parallel:
    """One kind of parallelism."""

    attention: Attention = our_attention
    distribute: Callable[[Transformer, DeviceMesh], None] = lambda model, mesh: None
    take_part: Callable[[list[Tensor], DeviceMesh], list[Tensor]] = lambda batch, mesh: batch
    split_sequences: bool = False
    averages: bool = True  # the devices compute losses of different tokens, which are averaged


PARALLEL = {
    "fsdp": Parallel(distribute=shard_parameters, take_part=part_of_batch),
    "tensor": Parallel(distribute=split_tensors, averages=False),
    "context": Parallel(torch_attention, distribute=shard_parameters, split_sequences=True),
}


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
    text: Tensor, config: Config, device: torch.device, parallel: Parallel, mesh: DeviceMesh | None
) -> tuple[Tensor, list[float]]:
    """All gradients of the first step as one vector, and the loss of every step. Without a mesh: on one device."""
    torch.manual_seed(config.seed)
    model = Transformer(config, parallel.attention).to(device)
    if mesh is not None:
        parallel.distribute(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
    generator = torch.Generator().manual_seed(config.seed)
    gradients = torch.empty(0)
    losses = []
    for step in range(config.steps):
        batch = [x.to(device) for x in draw(text, config, generator)]
        ring: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if mesh is not None:
            batch = parallel.take_part(batch, mesh)
            if parallel.split_sequences:
                ring = context_parallel(mesh, buffers=batch, buffer_seq_dims=[1] * len(batch))
        precision = torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()
        with ring:  # inside the context, the batch holds this device's part
            ids, targets, positions = batch
            with precision:
                logits = model(ids, positions)
            loss = cross_entropy(logits.float().flatten(0, 1), targets.flatten())
            loss.backward()
        if step == 0:
            gradients = torch.cat([whole(p.grad).double().flatten() for p in model.parameters() if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        if mesh is not None and parallel.averages:
            dist.all_reduce(loss)
            loss /= mesh.size()
        losses.append(loss.item())
    return gradients, losses


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallel", choices=list(PARALLEL), default="fsdp", help="how to split (%(default)s)")
    parser.add_argument("--steps", type=int, default=Config.steps, help="training steps of each run (%(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of train_distributed.json (%(default)s)")
    options = parser.parse_args(arguments)

    config = Config(steps=options.steps)
    kind = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    parallel = PARALLEL[options.parallel]
    if parallel.split_sequences and kind == "cpu":
        parser.error("PyTorch has no context parallelism on the CPU")
    device, dtype = torch.device("cpu"), torch.float32
    if kind == "cuda":
        device, dtype = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))), torch.bfloat16
        torch.cuda.set_device(device)
    # PyTorch's default backend on a machine with a GPU serves only the GPU, but --device may be cpu.
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    mesh = init_device_mesh(kind, (int(os.environ.get("WORLD_SIZE", 1)),))
    text = torch.tensor(list("".join(topics.topics[name] for name in sorted(topics.topics)).encode()))

    one_gradient, one_losses = train(text, config, device, parallel, None)
    flashbwd.stats(reset=True)
    start = time.perf_counter()
    with flashbwd.enable():
        gradient, losses = train(text, config, device, parallel, mesh)
    seconds = time.perf_counter() - start
    overridden = {name: stats._asdict() for name, stats in flashbwd.stats().items() if stats != (0, {})}

    gradient_error = ((gradient - one_gradient).norm() / one_gradient.norm()).item()
    loss_error = max(abs(a - b) for a, b in zip(losses, one_losses, strict=True))
    # Comparisons with NaN are false, so a NaN fails.
    agree = gradient_error <= GRADIENT_TOLERANCE[dtype] and loss_error <= LOSS_TOLERANCE[dtype]
    if mesh.get_rank() == 0:
        result = {
            "config": asdict(config),
            "parallel": options.parallel,
            "devices": mesh.size(),
            "device": torch.cuda.get_device_name(device) if kind == "cuda" else "cpu",
            "dtype": str(dtype),
            "gradient_error": gradient_error,
            "loss_error": loss_error,
            "agree": agree,
            "losses": {"one device": one_losses, "all devices": losses},
            "seconds": seconds,
            "overridden": overridden,
        }
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"train_distributed_{options.parallel}.json").write_text(json.dumps(result, indent=1) + "\n")
        print(
            f"{options.parallel} over {mesh.size()} devices ({kind}, {dtype}): loss {losses[0]:.3f} -> {losses[-1]:.3f}"
        )
        print(f"first gradient: relative difference {gradient_error:.1e} (allowed {GRADIENT_TOLERANCE[dtype]:g})")
        print(f"loss curves: largest difference {loss_error:.1e} (allowed {LOSS_TOLERANCE[dtype]:g})")
        for name, stats in overridden.items():
            print(f"{name}: {stats['hits']} calls by flashbwd's kernels, by PyTorch's {stats['fallbacks'] or 'none'}")
        print("the two runs agree" if agree else "FAILED: the two runs do not agree")
    dist.barrier()  # no process leaves while another one still communicates with it
    dist.destroy_process_group()
    return 0 if agree else 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # threads of the process group that return to Python during its shutdown would abort the process

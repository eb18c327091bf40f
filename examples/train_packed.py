"""Train a small GPT on packed documents, with flashbwd's gradients of FlexAttention and with PyTorch's gradients.

    python examples/train_packed.py                  # less than a minute on two cores; in bf16 on a GPU
    python examples/train_packed.py --steps 20 --out /tmp/packed

Each row of a batch holds several documents without padding, and a block mask keeps them apart: a token attends only to
earlier tokens of its own document. Both runs start from the same weights and see the same batches. Their gradients on
the first batch and their loss curves must agree within the tolerances stated below; otherwise the exit status is 1.

    flashbwd    flashbwd.flex_attention
    torch       on a GPU, torch.compile(flex_attention); on a CPU, where PyTorch's flex_attention has no gradients,
                scaled_dot_product_attention with the same mask as a dense tensor

The documents are the topics of the Python language reference, one token per byte. The script needs only flashbwd; with
matplotlib, it also plots both loss curves and the block mask of the first batch. On a CPU it checks the gradients and
does not measure speed, because flashbwd's reference backend is written to be exact, not fast.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import flashbwd

# Largest allowed |loss - loss| of one step, in nats. Rounding differs between the two runs and training amplifies it.
LOSS_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
# Largest allowed |g - g_torch| / |g_torch| of all gradients on the first batch (2-norms).
GRADIENT_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
NO_TARGET = -100  # the last token of a document


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of the run."""

    layers: int
    heads: int
    width: int
    context: int
    batch: int
    block: int  # queries and keys of a block of the mask
    steps: int
    learning_rate: float = 3e-3
    seed: int = 0


CONFIGS = {
    "cuda": Config(layers=4, heads=4, width=256, context=4096, batch=4, block=128, steps=200),
    "cpu": Config(layers=2, heads=4, width=128, context=256, batch=4, block=64, steps=40),
}


@dataclass(frozen=True)
class Batch:
    """Rows of packed documents: all tensors are (batch, context).

    Attributes
    ----------
    ids, targets : Tensor
        The tokens, and the next token of the same document or ``NO_TARGET``.
    documents, positions : Tensor
        The number of a token's document in its row, and its position in the document.
    """

    ids: Tensor
    targets: Tensor
    documents: Tensor
    positions: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(*(x.to(device) for x in (self.ids, self.targets, self.documents, self.positions)))


def pack(documents: Iterator[Tensor], config: Config) -> Batch:
    """Fill the rows with documents. The last document of a row is cut off."""
    rows = []
    for _ in range(config.batch):
        parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        room = config.context
        while room > 0:
            ids = next(documents)[:room]
            targets = torch.cat([ids[1:], torch.tensor([NO_TARGET])])
            parts.append((ids, targets, torch.full_like(ids, len(parts)), torch.arange(len(ids))))
            room -= len(ids)
        rows.append([torch.cat(tensors) for tensors in zip(*parts, strict=True)])
    return Batch(*(torch.stack(tensors) for tensors in zip(*rows, strict=True)))


def document_stream(config: Config) -> Iterator[Tensor]:
    """Yield random documents forever. A document is a window of a topic, of a twentieth to half of the context."""
    generator = torch.Generator().manual_seed(config.seed)
    texts = [torch.tensor(list(topics.topics[name].encode())) for name in sorted(topics.topics)]
    while True:
        text = texts[int(torch.randint(len(texts), (), generator=generator))]
        length = int(torch.randint(config.context // 20, config.context // 2 + 1, (), generator=generator))
        start = int(torch.randint(max(1, len(text) - length), (), generator=generator))
        yield text[start : start + length]


def mask_mod(documents: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The causal mask within documents (batch, context)."""

    def visible(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (documents[b, q_idx] == documents[b, kv_idx]) & (q_idx >= kv_idx)

    return visible


@dataclass(frozen=True)
class Method:
    """How to compute attention: the mask of a batch, and the attention over (batch, heads, context, dim)."""

    name: str
    mask: Callable[[Tensor], Any]
    attention: Callable[[Tensor, Tensor, Tensor, Any], Any]


def block_mask(documents: Tensor, config: Config) -> BlockMask:
    """The block mask, which all heads and layers share."""
    batch, context = documents.shape
    mod = mask_mod(documents)
    return create_block_mask(mod, batch, None, context, context, device=documents.device, BLOCK_SIZE=config.block)


def flashbwd_method(config: Config) -> Method:
    """FlexAttention whose gradients flashbwd computes."""

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Any:
        return flashbwd.flex_attention(q, k, v, block_mask=mask)

    return Method("flashbwd", lambda documents: block_mask(documents, config), attention)


def torch_method(config: Config, device: torch.device) -> Method:
    """Attention whose gradients PyTorch computes."""
    if device.type == "cuda":
        compiled: Any = torch.compile(flex_attention)

        def attention(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Any:
            return compiled(q, k, v, block_mask=mask)

        return Method("torch", lambda documents: block_mask(documents, config), attention)

    def dense_mask(documents: Tensor) -> Tensor:
        batch, context = documents.shape
        return create_mask(mask_mod(documents), batch, 1, context, context, device=str(documents.device))

    return Method("torch", dense_mask, lambda q, k, v, mask: scaled_dot_product_attention(q, k, v, mask))


class Block(nn.Module):
    def __init__(self, config: Config, method: Method) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.method = method
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(self.method.attention(q, k, v, mask).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, config: Config, method: Method) -> None:
        super().__init__()
        self.method = method
        self.token = nn.Embedding(256, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config, method) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, 256, bias=False)

    def forward(self, batch: Batch) -> Tensor:
        """Logits (batch, context, 256). The mask is made once and used by all layers."""
        mask = self.method.mask(batch.documents)
        x = self.token(batch.ids) + self.position(batch.positions)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def loss_of(model: GPT, batch: Batch) -> Tensor:
    """Mean cross entropy of the next byte, in nats: in bf16 on a GPU, in fp32 on a CPU."""
    cuda = batch.ids.device.type == "cuda"
    with torch.autocast("cuda", torch.bfloat16) if cuda else contextlib.nullcontext():
        logits = model(batch)
    return cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten(), ignore_index=NO_TARGET)


def build(config: Config, method: Method, device: torch.device) -> GPT:
    """Build the model. The weights depend only on the seed, not on the method or the device."""
    torch.manual_seed(config.seed)
    return GPT(config, method).to(device)


def first_gradient(config: Config, method: Method, device: torch.device) -> Tensor:
    """All gradients on the first batch, as one float64 vector."""
    model = build(config, method, device)
    loss_of(model, pack(document_stream(config), config).to(device)).backward()
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def train(config: Config, method: Method, device: torch.device) -> dict[str, Any]:
    """Train one model; return its loss curve and the time that it took."""
    model = build(config, method, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.99), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=max(1, config.steps // 5))
    documents = document_stream(config)
    losses = []
    start = time.perf_counter()
    for step in range(config.steps):
        loss = loss_of(model, pack(documents, config).to(device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % max(1, config.steps // 10) == 0 or step == config.steps - 1:
            print(f"{method.name:>8}: step {step + 1} of {config.steps}, loss {losses[-1]:.3f}", flush=True)
    return {"losses": losses, "seconds": time.perf_counter() - start}


def describe_backend(mask: BlockMask, config: Config, device: torch.device) -> dict[str, Any]:
    """Print which backend computes the gradients of this mask, and why the others do not."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = (config.batch, config.heads, config.context, config.width // config.heads)
    q, k, v, out, dout = torch.zeros(5, *shape, device=device, dtype=dtype).unbind(0)
    plan = flashbwd.plan_flex_attention_backward(dout, q, k, v, out, q[..., 0].float(), block_mask=mask)
    print(f"attention gradients: {plan.backend} backend")
    for backend, reason in plan.reasons.items():
        print(f"    not {backend}: {reason}")
    return {"backend": plan.backend, "reasons": dict(plan.reasons)}


def plot(path: Path, runs: dict[str, dict[str, Any]], mask: BlockMask) -> None:
    """Draw both loss curves, their difference, and the blocks of the first mask, if matplotlib is installed."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: it needs matplotlib (in flashbwd's clone: pip install '.[bench]')")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ours, theirs = runs["flashbwd"]["losses"], runs["torch"]["losses"]
    figure, axes = plt.subplot_mosaic(
        [["loss", "mask"], ["difference", "mask"]], figsize=(11, 5), height_ratios=(3, 1), layout="constrained"
    )
    axes["loss"].plot(theirs, color="0.6", linewidth=3, label="PyTorch's gradients")
    axes["loss"].plot(ours, color="C3", linewidth=1, label="flashbwd's gradients")
    axes["loss"].set_ylabel("loss (nats per byte)")
    axes["loss"].legend()
    axes["difference"].plot([abs(a - b) for a, b in zip(ours, theirs, strict=True)], color="C0", linewidth=1)
    axes["difference"].set_ylabel("|difference|")
    axes["difference"].set_xlabel("step")
    axes["mask"].imshow(mask.to_dense()[0, 0].cpu().numpy(), cmap="Blues", interpolation="nearest")
    axes["mask"].set_title("blocks that the first row of the first batch computes")
    axes["mask"].set_xlabel("key block")
    axes["mask"].set_ylabel("query block")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(f"wrote {path}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, help="training steps of each run")
    parser.add_argument("--seed", type=int, default=Config.seed, help="seed of weights and batches (%(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if there is a GPU")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of results and plot (%(default)s)")
    options = parser.parse_args(arguments)

    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    given = {"seed": options.seed} | ({} if options.steps is None else {"steps": options.steps})
    config = Config(**(asdict(CONFIGS[device.type]) | given))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    print(f"device: {device}, {dtype}, torch {torch.__version__}, flashbwd {flashbwd.__version__}")

    batch = pack(document_stream(config), config).to(device)
    mask = block_mask(batch.documents, config)
    per_row = (batch.documents.amax() + 1).item()
    print(f"first batch: up to {per_row} documents per row, {mask.sparsity():.0f}% of the blocks are skipped")
    plan = describe_backend(mask, config, device)

    methods = [flashbwd_method(config), torch_method(config, device)]
    ours, theirs = (first_gradient(config, method, device) for method in methods)
    gradient_error = ((ours - theirs).norm() / theirs.norm()).item()
    runs = {method.name: train(config, method, device) for method in methods}
    pairs = zip(runs["flashbwd"]["losses"], runs["torch"]["losses"], strict=True)
    loss_error = max(abs(a - b) for a, b in pairs)

    # Comparisons with NaN are false, so a NaN fails.
    agree = gradient_error <= GRADIENT_TOLERANCE[dtype] and loss_error <= LOSS_TOLERANCE[dtype]
    result = {
        "config": asdict(config),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "dtype": str(dtype),
        "torch": torch.__version__,
        "flashbwd": flashbwd.__version__,
        "plan": plan,
        "sparsity": mask.sparsity(),
        "gradient_error": gradient_error,
        "loss_error": loss_error,
        "agree": agree,
        "runs": runs,
    }
    for name, run in runs.items():
        print(f"{name:>8}: loss {run['losses'][0]:.3f} -> {run['losses'][-1]:.3f}, {run['seconds']:.1f} s")
    print(f"first gradient: relative difference {gradient_error:.1e} (allowed {GRADIENT_TOLERANCE[dtype]:g})")
    print(f"loss curves: largest difference {loss_error:.1e} (allowed {LOSS_TOLERANCE[dtype]:g})")
    print("the two runs agree" if agree else "FAILED: the two runs do not agree")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "train_packed.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}")
    plot(path.with_suffix(".png"), runs, mask)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())

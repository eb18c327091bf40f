"""Train a small character-level GPT on real text, once with flashbwd's gradients and once with PyTorch's.

Both runs start from the same weights and see the same batches. Their gradients on the first batch and their loss curves
must agree within the tolerances stated below; otherwise the exit status is 1.

    python examples/train_gpt.py                  # less than a minute on two cores; seconds, in bf16, on a GPU
    python examples/train_gpt.py --steps 50 --out /tmp/gpt

The text is the Python language reference that every CPython contains for `help()` (about 0.5 million characters).
The script needs only flashbwd; with matplotlib, it also plots both loss curves. On a CPU it checks the gradients and
does not measure speed, because flashbwd's reference backend is written to be exact, not fast.

On a GPU, both runs train the same PyTorch model; `flashbwd.enable()` is all that differs. On a CPU that line has
nothing to replace, so the model calls flashbwd's own functions.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, layer_norm, scaled_dot_product_attention

import flashbwd

# Largest allowed |loss - loss| of one step, in nats. Rounding differs between the two runs and training amplifies it.
LOSS_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.02}
# Largest allowed |g - g_torch| / |g_torch| of all gradients on the first batch (2-norms).
GRADIENT_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of the run."""

    layers: int = 4
    heads: int = 4
    width: int = 128
    context: int = 128
    batch: int = 16
    steps: int = 300  # of each run on a GPU
    learning_rate: float = 3e-3
    seed: int = 0


CPU_STEPS = 150


@dataclass(frozen=True)
class Operators:
    """The two operators under test: attention over (batch, seq, head, dim), LayerNorm over (..., width)."""

    name: str
    attention: Callable[[Tensor, Tensor, Tensor], Any]
    layer_norm: Callable[[Tensor, Tensor, Tensor], Tensor]
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext  # in which they train


def flashbwd_operators(device: torch.device) -> Operators:
    """Attention and LayerNorm whose gradients flashbwd computes."""
    if device.type == "cuda":
        return replace(torch_operators(), name="flashbwd", context=flashbwd.enable)
    return Operators(
        "flashbwd",
        lambda q, k, v: flashbwd.attention(q, k, v, causal=True),
        lambda x, gamma, beta: flashbwd.layer_norm(x, gamma, beta),
    )


def torch_operators() -> Operators:
    """Attention and LayerNorm whose gradients PyTorch computes."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return Operators("torch", attention, lambda x, gamma, beta: layer_norm(x, gamma.shape, gamma, beta))


class Norm(nn.Module):
    def __init__(self, width: int, operators: Operators) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))
        self.beta = nn.Parameter(torch.zeros(width))
        self.operators = operators

    def forward(self, x: Tensor) -> Tensor:
        return self.operators.layer_norm(x, self.gamma, self.beta)


class Block(nn.Module):
    def __init__(self, config: Config, operators: Operators) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.operators = operators
        self.norm1 = Norm(width, operators)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = Norm(width, operators)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        # Three (B, S, H, D) views of one tensor.
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.proj(self.operators.attention(q, k, v).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, config: Config, operators: Operators) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.Sequential(*(Block(config, operators) for _ in range(config.layers)))
        self.norm = Norm(config.width, operators)
        self.head = nn.Linear(config.width, vocabulary, bias=False)
        self.head.weight = self.token.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("proj.weight", "mlp.2.weight"))
                variance = 1 / (parameter.shape[1] * (2 * config.layers if residual else 1))
                nn.init.normal_(parameter, std=math.sqrt(variance))

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (B, S, vocabulary) for token ids (B, S)."""
        x = self.token(ids) + self.position.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def encode(text: str, characters: str) -> Tensor:
    index = {character: i for i, character in enumerate(characters)}
    return torch.tensor([index[character] for character in text])


@dataclass(frozen=True)
class Text:
    """The corpus as token ids, one per character; every eighth topic is held out."""

    characters: str
    train: Tensor
    held_out: Tensor

    @classmethod
    def load(cls) -> Text:
        documents = [topics.topics[name] for name in sorted(topics.topics)]
        characters = "".join(sorted(set().union(*documents)))
        held_out = "".join(documents[::8])
        del documents[::8]
        return cls(characters, encode("".join(documents), characters), encode(held_out, characters))

    def decode(self, ids: Tensor) -> str:
        return "".join(self.characters[i] for i in ids.tolist())


def draw(ids: Tensor, config: Config, generator: torch.Generator) -> Tensor:
    """Draw a batch (B, context + 1) of random windows of the text."""
    starts = torch.randint(len(ids) - config.context, (config.batch, 1), generator=generator)
    return ids[starts + torch.arange(config.context + 1)]


def autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """bf16 on a GPU, plain fp32 on a CPU."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


def loss_of(model: GPT, batch: Tensor) -> Tensor:
    """Mean cross entropy of the next character, in nats."""
    with autocast(batch.device):
        logits = model(batch[:, :-1])
    return cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def build(text: Text, config: Config, operators: Operators, device: torch.device) -> GPT:
    """Build the model. The weights depend only on the seed, not on the operators or the device."""
    torch.manual_seed(config.seed)
    return GPT(len(text.characters), config, operators).to(device)


def first_gradient(text: Text, config: Config, operators: Operators, device: torch.device) -> Tensor:
    """All gradients on the first batch, as one float64 vector."""
    model = build(text, config, operators, device)
    generator = torch.Generator().manual_seed(config.seed)
    with operators.context():
        loss_of(model, draw(text.train, config, generator).to(device)).backward()
    gradients = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(gradients)


def schedule(step: int, config: Config) -> float:
    """Linear warm-up over a tenth of the steps, then a cosine down to a tenth of the rate."""
    warmup = max(1, config.steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, config.steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def train(text: Text, config: Config, operators: Operators, device: torch.device) -> tuple[GPT, dict[str, Any]]:
    """Train one model; return it with its loss curve, held-out loss and times."""
    model = build(text, config, operators, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.99), weight_decay=0.1)
    generator = torch.Generator().manual_seed(config.seed)
    losses, times = [], []
    for step in range(config.steps):
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * schedule(step, config)
        loss = loss_of(model, draw(text.train, config, generator).to(device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())  # waits for the device
        times.append(time.perf_counter() - start)
        if step % max(1, config.steps // 10) == 0 or step == config.steps - 1:
            print(f"{operators.name:>8}: step {step + 1} of {config.steps}, loss {losses[-1]:.3f}", flush=True)
    with torch.no_grad():
        held_out = [loss_of(model, draw(text.held_out, config, generator).to(device)).item() for _ in range(8)]
    return model, {
        "losses": losses,
        "held_out_loss": sum(held_out) / len(held_out),
        "ms_per_step": 1e3 * statistics.median(times),
    }


@torch.no_grad()
def sample(model: GPT, text: Text, config: Config, device: torch.device, prompt: str, length: int = 300) -> str:
    """Continue the prompt by `length` characters at temperature 0.7."""
    generator = torch.Generator().manual_seed(config.seed)
    ids = encode(prompt, text.characters)
    for _ in range(length):
        with autocast(device):
            logits = model(ids[None, -config.context :].to(device))[0, -1]
        probabilities = (logits.float().cpu() / 0.7).softmax(-1)
        ids = torch.cat([ids, torch.multinomial(probabilities, 1, generator=generator)])
    return text.decode(ids)


def describe_backend(config: Config, device: torch.device) -> dict[str, Any]:
    """Print which backend computes the attention gradients of this model, and why the others do not."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = (config.batch, config.context, config.heads, config.width // config.heads)
    q, k, v, out, dout = torch.zeros(5, *shape, device=device, dtype=dtype).unbind(0)
    lse = torch.zeros(config.batch, config.heads, config.context, device=device)
    plan = flashbwd.plan_attention_backward(dout, q, k, v, out, lse, causal=True)
    print(f"attention gradients: {plan.backend} backend")
    for backend, reason in plan.reasons.items():
        print(f"    not {backend}: {reason}")
    return {"backend": plan.backend, "reasons": dict(plan.reasons)}


def plot(path: Path, runs: dict[str, dict[str, Any]], title: str) -> None:
    """Draw both loss curves, and below them their difference, if matplotlib is installed."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: it needs matplotlib (in flashbwd's clone: pip install '.[bench]')")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ours, theirs = runs["flashbwd"]["losses"], runs["torch"]["losses"]
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 5), sharex=True, height_ratios=(3, 1), layout="constrained")
    top.plot(theirs, color="0.6", linewidth=3, label="PyTorch's gradients")
    top.plot(ours, color="C3", linewidth=1, label="flashbwd's gradients")
    top.set_title(title)
    top.set_ylabel("loss (nats per character)")
    top.legend()
    bottom.plot([abs(a - b) for a, b in zip(ours, theirs, strict=True)], color="C0", linewidth=1)
    bottom.set_ylabel("|difference|")
    bottom.set_xlabel("step")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(f"wrote {path}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--steps", type=int, help=f"training steps of each run ({Config.steps} on a GPU, {CPU_STEPS} on a CPU)"
    )
    parser.add_argument(
        "--seed", type=int, default=Config.seed, help="seed of weights, batches and sample (%(default)s)"
    )
    parser.add_argument("--device", help="cpu or cuda (default: cuda if there is a GPU)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of train_gpt.png and .json (%(default)s)")
    options = parser.parse_args(arguments)

    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_cpu = device.type == "cpu"
    steps = (CPU_STEPS if on_cpu else Config.steps) if options.steps is None else options.steps
    config = Config(steps=steps, seed=options.seed)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    options.out.mkdir(parents=True, exist_ok=True)

    text = Text.load()
    print(f"text: {len(text.train) + len(text.held_out)} characters, {len(text.characters)} different")
    print(f"device: {device}, {dtype}, torch {torch.__version__}, flashbwd {flashbwd.__version__}")
    plan = describe_backend(config, device)

    flashbwd.stats(reset=True)
    ours, theirs = flashbwd_operators(device), torch_operators()
    gradient = first_gradient(text, config, theirs, device)
    gradient_error = ((first_gradient(text, config, ours, device) - gradient).norm() / gradient.norm()).item()

    with ours.context():
        model, our_run = train(text, config, ours, device)
    _, torch_run = train(text, config, theirs, device)
    runs = {"flashbwd": our_run, "torch": torch_run}
    pairs = zip(our_run["losses"], torch_run["losses"], strict=True)
    loss_error = max(abs(a - b) for a, b in pairs)

    computed = {name: hits for name, (hits, _) in flashbwd.stats().items() if hits}  # by flashbwd, on a GPU
    names = " ".join(computed)
    taken_over = on_cpu or ("attention" in names and "layer_norm" in names)

    # Comparisons with NaN are false, so a NaN fails.
    gradients_agree = gradient_error <= GRADIENT_TOLERANCE[dtype]
    curves_agree = loss_error <= LOSS_TOLERANCE[dtype]
    continuation = sample(model, text, config, device, "The ")
    result = {
        "config": asdict(config),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "dtype": str(dtype),
        "torch": torch.__version__,
        "flashbwd": flashbwd.__version__,
        "plan": plan,
        "gradient_error": gradient_error,
        "gradient_tolerance": GRADIENT_TOLERANCE[dtype],
        "loss_error": loss_error,
        "loss_tolerance": LOSS_TOLERANCE[dtype],
        "computed": computed,
        "agree": gradients_agree and curves_agree,
        "runs": runs,
        "sample": continuation,
    }
    for name, run in runs.items():
        print(
            f"{name:>8}: loss {run['losses'][0]:.3f} -> {run['losses'][-1]:.3f}, "
            f"held out {run['held_out_loss']:.3f}, {run['ms_per_step']:.1f} ms per step (median)"
        )
    print(f"first gradient: relative difference {gradient_error:.1e} (allowed {GRADIENT_TOLERANCE[dtype]:g})")
    print(f"loss curves: largest difference {loss_error:.1e} (allowed {LOSS_TOLERANCE[dtype]:g})")
    for name, hits in computed.items():
        print(f"{hits} calls of {name} were computed by flashbwd")
    print(f"sample: {continuation!r}")
    if not taken_over:
        print(f"FAILED: PyTorch computed gradients that flashbwd should have computed\n{flashbwd.stats()}")
    print("the two runs agree" if result["agree"] else "FAILED: the two runs do not agree")
    if on_cpu:
        print("The times above say nothing about the kernels: on a CPU, flashbwd's reference is exact, not fast.")
    else:
        print("The model is tiny, so the times above are those of the host. `python -m flashbwd` measures kernels.")
    print("To train your own PyTorch model with flashbwd's gradients on a GPU, add one line: flashbwd.enable()")
    path = options.out / "train_gpt.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}")
    plot(path.with_suffix(".png"), runs, f"A small GPT trained twice from the same weights ({device.type}, {dtype})")
    return 0 if result["agree"] and taken_over else 1


if __name__ == "__main__":
    sys.exit(main())

"""Train a Llama of Transformers on real text: with PyTorch's gradients, and with flashbwd's in two ways.

    python examples/finetune_transformers.py                      # minutes in bf16 on a GPU; a toy model on a CPU
    python examples/finetune_transformers.py --steps 50 --lengths 1024,4096

    torch       attn_implementation="sdpa", the default of Transformers
    overrides   the same model under flashbwd.enable()
    flashbwd    attn_implementation="flashbwd", and norms replaced in place by flashbwd's

All three start from the same random weights and see the same batches of the Python language reference, one token per
byte. Their loss curves must agree within the tolerance stated below; otherwise the exit status is 1. Then the script
measures the time and the peak memory of a step over a range of sequence lengths, with the same number of tokens per
batch. Without a GPU the overrides have nothing to replace, so that run is skipped. The script needs Transformers
(`pip install transformers`); with matplotlib, it also plots its results.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import flashbwd
from flashbwd.integrations import transformers as integration

# Largest allowed |loss - loss| of one step, in nats. Rounding differs between the runs and training amplifies it.
LOSS_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05}
WARM_UP = 2  # rounds before the timed rounds
ROUNDS = 5


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of the runs."""

    layers: int
    width: int
    heads: int
    heads_kv: int
    length: int
    tokens: int  # tokens per batch
    steps: int
    lengths: tuple[int, ...]  # sequence lengths of the timed steps
    learning_rate: float = 3e-4
    seed: int = 0


CONFIGS = {
    "cuda": Config(8, 1024, 16, 4, length=2048, tokens=16384, steps=150, lengths=(1024, 2048, 4096, 8192, 16384)),
    "cpu": Config(2, 64, 4, 2, length=64, tokens=256, steps=20, lengths=(64, 128), learning_rate=3e-3),
}


@dataclass(frozen=True)
class Variant:
    """One way to compute the gradients."""

    attention: str = "sdpa"
    swap_norms: bool = False
    scope: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


VARIANTS = {
    "torch": Variant(),
    "overrides": Variant(scope=flashbwd.enable),
    "flashbwd": Variant(attention=integration.NAME, swap_norms=True),
}


def build(config: Config, variant: Variant, device: torch.device) -> Any:
    """A Llama with random weights, the same for every variant."""
    torch.manual_seed(config.seed)
    settings: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": config.width,
        "intermediate_size": 4 * config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.heads_kv,
        "max_position_embeddings": max(config.length, *config.lengths),
        "attn_implementation": variant.attention,
        "use_cache": False,
    }
    with device:
        model: Any = LlamaForCausalLM(LlamaConfig(**settings))
    if variant.swap_norms:
        integration.swap_norms(model)
    return model


class Trainer:
    """A model, its optimizer and its own stream of batches."""

    def __init__(self, text: Tensor, config: Config, variant: Variant, device: torch.device) -> None:
        self.text, self.config, self.variant, self.device = text, config, variant, device
        self.model = build(config, variant, device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.learning_rate, fused=device.type == "cuda"
        )
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=max(1, config.steps // 5))
        self.generator = torch.Generator().manual_seed(config.seed)

    def step(self, length: int) -> Tensor:
        """Run one step on a batch of sequences of ``length`` tokens, ``config.tokens`` in all; return the loss."""
        count = max(1, self.config.tokens // length)
        starts = torch.randint(len(self.text) - length, (count, 1), generator=self.generator)
        ids = self.text[starts + torch.arange(length)].to(self.device)
        cuda = self.device.type == "cuda"
        precision = torch.autocast("cuda", torch.bfloat16) if cuda else contextlib.nullcontext()
        with self.variant.scope():
            with precision:
                loss = self.model(input_ids=ids, labels=ids).loss
            loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return loss.detach()


def losses_of(trainer: Trainer, name: str) -> list[float]:
    """The loss of every step of a training run."""
    steps = trainer.config.steps
    losses = []
    for step in range(steps):
        losses.append(trainer.step(trainer.config.length).item())
        if step % max(1, steps // 10) == 0 or step == steps - 1:
            print(f"{name:>10}: step {step + 1} of {steps}, loss {losses[-1]:.3f}", flush=True)
    return losses


def measure(trainers: dict[str, Trainer], length: int) -> dict[str, dict[str, float | None]]:
    """Milliseconds of a step (median over interleaved rounds) and the peak memory of a step in MiB."""
    cuda = next(iter(trainers.values())).device.type == "cuda"
    times: dict[str, list[float]] = {name: [] for name in trainers}
    peaks: dict[str, float | None] = dict.fromkeys(trainers)
    names = list(trainers)
    for round_ in range(WARM_UP + ROUNDS):
        for name in names if round_ % 2 else reversed(names):
            trainer = trainers[name]
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            resident = torch.cuda.memory_allocated() if cuda else 0  # includes the other models
            start = time.perf_counter()
            trainer.step(length)
            if cuda:
                torch.cuda.synchronize()
                peaks[name] = (torch.cuda.max_memory_allocated() - resident) / 2**20
            if round_ >= WARM_UP:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: {"step_ms": statistics.median(times[name]), "peak_mib": peaks[name]} for name in trainers}


def table(ablation: dict[int, dict[str, dict[str, float | None]]]) -> str:
    """Return a Markdown table of the timed steps; the speed is PyTorch's time divided by the variant's."""
    lines = ["| sequence length | gradients | ms per step | speed over torch | peak MiB |", "|" + " --- |" * 5]
    for length, variants in ablation.items():
        stock = variants["torch"]["step_ms"] or 0.0
        for name, figures in variants.items():
            ms, peak = figures["step_ms"] or 0.0, figures["peak_mib"]
            memory = "-" if peak is None else f"{peak:.0f}"
            lines.append(f"| {length} | {name} | {ms:.1f} | {stock / ms:.2f} | {memory} |")
    return "\n".join(lines)


def plot(path: Path, curves: dict[str, list[float]], ablation: dict[int, dict[str, dict[str, float | None]]]) -> None:
    """Plot the loss curves, and the time and (if known) the memory of a step over the sequence length.

    Without matplotlib, say how to install it.
    """
    try:
        import matplotlib
    except ImportError:
        print("no plot: it needs matplotlib (in flashbwd's clone: pip install '.[bench]')")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    labels = {"step_ms": "ms per step", "peak_mib": "peak memory of a step, MiB"}
    known = [key for key in labels if all(of[name][key] is not None for of in ablation.values() for name in of)]
    figure, (left, *others) = plt.subplots(1, 1 + len(known), figsize=(5 + 5 * len(known), 4), layout="constrained")
    for number, (name, losses) in enumerate(curves.items()):
        style = {"color": f"C{number}", "linewidth": 3 - number}
        left.plot(losses, **style, label=name)
        for key, axes in zip(known, others, strict=True):
            axes.plot(list(ablation), [of[name][key] for of in ablation.values()], "o-", **style)
    left.set_xlabel("step")
    left.set_ylabel("loss (nats per byte)")
    left.legend()
    for key, axes in zip(known, others, strict=True):
        axes.set_xlabel("sequence length")
        axes.set_ylabel(labels[key])
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(f"wrote {path}")


def lengths(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, help="training steps of each run")
    parser.add_argument("--lengths", type=lengths, metavar="N,N,...", help="sequence lengths to time")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if there is a GPU")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of results and plot (%(default)s)")
    options = parser.parse_args(arguments)

    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    given = {name: getattr(options, name) for name in ("steps", "lengths") if getattr(options, name) is not None}
    config = Config(**(asdict(CONFIGS[device.type]) | given))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    variants = {name: variant for name, variant in VARIANTS.items() if device.type == "cuda" or name != "overrides"}
    integration.register()
    text = torch.tensor(list("".join(topics.topics[name] for name in sorted(topics.topics)).encode()))
    print(f"device: {device}, {dtype}, torch {torch.__version__}, flashbwd {flashbwd.__version__}")

    flashbwd.stats(reset=True)
    trainers = {name: Trainer(text, config, variant, device) for name, variant in variants.items()}
    curves = {name: losses_of(trainer, name) for name, trainer in trainers.items()}
    ablation = {length: measure(trainers, length) for length in config.lengths}
    pairs = [pair for losses in curves.values() for pair in zip(losses, curves["torch"], strict=True)]
    loss_error = max(abs(a - b) for a, b in pairs)
    agree = loss_error <= LOSS_TOLERANCE[dtype]  # false for NaN
    overridden = {name: stats._asdict() for name, stats in flashbwd.stats().items() if stats != (0, {})}

    options.out.mkdir(parents=True, exist_ok=True)
    result = {
        "config": asdict(config),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "dtype": str(dtype),
        "torch": torch.__version__,
        "loss_error": loss_error,
        "agree": agree,
        "losses": curves,
        "ablation": ablation,
        "overridden": overridden,
    }
    for name, losses in curves.items():
        print(f"{name:>10}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(f"loss curves: largest difference {loss_error:.1e} (allowed {LOSS_TOLERANCE[dtype]:g})")
    print(table(ablation))
    for name, stats in overridden.items():
        print(f"{name}: {stats['hits']} calls by flashbwd's kernels, by PyTorch's {stats['fallbacks'] or 'none'}")
    print("the runs agree" if agree else "FAILED: the runs do not agree")
    path = options.out / "finetune_transformers.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}")
    plot(path.with_suffix(".png"), curves, ablation)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())

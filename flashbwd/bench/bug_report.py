"""Prints the report of ``python -m flashbwd``: the machine, ten common shapes, and what ``enable()`` overrides."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import time
from dataclasses import replace
from typing import Any

import torch

import flashbwd
from flashbwd import _ops
from flashbwd.bench import attention_peers, cases, contenders, machine, report, results, runner, suites
from flashbwd.bench.measure import Settings
from flashbwd.bench.peers import Peer

PACKAGES = ("triton", "transformers", "flash-attn", "kernels")  # they can change which kernels run
HEADER = ["", "gradient of", "backend", "worst error", "ms", "PyTorch ms", "speedup", "gradients"]


def main() -> int:
    """Print the report. Returns 1 if a gradient is wrong, else 0."""
    device = machine.default_device()
    print("\n".join(machine_lines(machine.describe(device))), flush=True)
    start = time.perf_counter()
    found = [_measured(case, device) for case in suites.SMOKE_CASES[device.type]]
    _say("")  # ends the line of the progress
    print(report.table(HEADER, [[str(number), *_row(result)] for number, result in enumerate(found, 1)]))
    print("\nerror: ||g - ref|| / ||ref|| against float64; speedup: median over rounds (smallest-largest)")
    for title, lines in (("backends", _plans(found)), ("why the other backends were not chosen", _refusals(found))):
        print(f"\n{title}:")
        for line, numbers in lines.items():
            print(f"  {line} (case {', '.join(numbers)})")
    print("\nwhat flashbwd.enable() takes over:")
    for line in takeover_lines(device):
        print(f"  {line}")
    wrong = [line for number, result in enumerate(found, 1) for line in _wrong(number, result)]
    right = sum(1 for result in found if result.peers["flashbwd"].status == results.OK)
    print(f"\n{right} of {len(found)} shapes have right gradients; {time.perf_counter() - start:.0f} s")
    for line in wrong:
        print(f"WRONG: {line}", file=sys.stderr)
    return 1 if wrong else 0


def machine_lines(where: machine.Machine) -> list[str]:
    """Return the device, the versions of all software that affects which kernel runs, and the loaded libraries."""
    versions = [f"torch {where.torch}", f"Python {where.python}"]
    if where.kind == "cuda":
        versions += [f"CUDA {where.cuda}", f"cuDNN {where.cudnn}", f"driver {where.driver}"]
    libraries = [f"{name} loaded" for name in _ops.loaded]
    libraries += [f"{name} not loaded: {reason}" for name, reason in _ops.not_loaded.items()]
    settings = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("FLASHBWD_")]
    lines = [
        f"flashbwd {flashbwd.__version__} on {where.device if where.kind == 'cuda' else 'the CPU'}",
        f"  {', '.join(versions)}",
        f"  {', '.join(_packages()) or 'none of ' + ', '.join(PACKAGES) + ' is installed'}",
        f"  package {machine.PACKAGE}",
        f"  {where.platform}; CPU {where.cpu}, {where.threads} threads",
        f"  libraries: {'; '.join(libraries)}",
    ]
    if where.kind == "cuda":
        lines += [f"  GPU {number}: {_gpu(number)}" for number in range(torch.cuda.device_count())]
    elif torch.version.cuda is not None:
        lines.append("  no CUDA device: everything runs on the CPU")
    if where.commit:
        lines.append(f"  commit {where.commit}")
    return [*lines, *(f"  {setting}" for setting in settings), ""]


def _packages() -> list[str]:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _gpu(number: int) -> str:
    gpu = torch.cuda.get_device_properties(number)
    gib = gpu.total_memory / 2**30
    return f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, {gpu.multi_processor_count} SMs, {gib:.0f} GiB"


def _say(text: str) -> None:
    """Show the progress on a terminal, in a line that replaces the previous one."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _measured(case: cases.Case, device: torch.device) -> results.CaseResult:
    _say(f"checking {case.name}")
    settings = Settings(rounds=5, slot_ms=10.0)
    sets = 1 if device.type == "cpu" else None  # 64 sets fit into a server's cache and take a minute to create
    return runner.run_case(case, device, settings, _peers_of(case, device), sets=sets)


def _peers_of(case: cases.Case, device: torch.device) -> list[Peer]:
    """Return PyTorch's peers, which are only timed, and this library with the backend that it chooses itself."""
    peers = [_unchecked(peer) for peer in contenders.peers_of(case, device) if peer.name.startswith("torch")]
    if isinstance(case, cases.AttentionCase):
        return [*peers, Peer("flashbwd", attention_peers.ours("auto"), devices=(device.type,))]
    return [*peers, *(peer for peer in contenders.peers_of(case, device) if peer.ours)]


def _unchecked(peer: Peer) -> Peer:
    return replace(peer, prepare=lambda case, x: replace(peer.prepare(case, x), checked=False))


def _row(result: results.CaseResult) -> list[str]:
    ours = result.peers["flashbwd"]
    error = max(ours.errors.values(), default=float("nan"))
    cells = [result.name, ours.plan.split(":")[0] or "-", f"{error:.1e}"]
    if not ours.timed:
        return [*cells, "-", "-", "-", ours.status]
    other = result.fastest_peer()
    cells.append(f"{ours.median_ms:.3g}")
    cells += ["-", "-"] if other is None else [
        f"{result.peers[other].median_ms:.3g} ({other})",
        str(result.ratio("flashbwd", other)),
    ]  # fmt: skip
    return [*cells, "right" if ours.status == results.OK else "WRONG"]


def _plans(found: list[results.CaseResult]) -> dict[str, list[str]]:
    lines: dict[str, list[str]] = {}
    for number, result in enumerate(found, 1):
        if plan := result.peers["flashbwd"].plan:
            lines.setdefault(plan, []).append(str(number))
    return lines


def _refusals(found: list[results.CaseResult]) -> dict[str, list[str]]:
    lines: dict[str, list[str]] = {}
    for number, result in enumerate(found, 1):
        for backend, reason in result.peers["flashbwd"].refusals.items():
            lines.setdefault(f"{backend}: {reason}", []).append(str(number))
    return lines


def _wrong(number: int, result: results.CaseResult) -> list[str]:
    ours = result.peers["flashbwd"]
    return [] if ours.status == results.OK else [f"case {number}, {result.name}: {ours.status}, {ours.reason}"]


# ---- what flashbwd.enable() takes over ------------------------------------------------------------


def takeover_lines(device: torch.device) -> list[str]:
    """Return which backward operators a training step of a small Llama calls, and which kernels run them."""
    if device.type != "cuda":
        return ["nothing: these are CUDA operators, and there is no CUDA device; flashbwd.attention runs on the CPU"]
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        return ["not measured: it needs Transformers (pip install transformers)"]
    except Exception as error:  # a broken installation must not end the report
        return [f"not measured: {error}"]
    sizes: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "attn_implementation": "sdpa",
        "use_cache": False,
    }
    config = LlamaConfig(**sizes)
    with device:
        model: torch.nn.Module = LlamaForCausalLM(config)
        model.to(torch.bfloat16)
        tokens = torch.arange(1024).remainder(256).view(2, 512)
    before = flashbwd.stats()
    with flashbwd.enable():
        model(input_ids=tokens, labels=tokens).loss.backward()
    return [
        "one training step of LlamaForCausalLM, 2 layers, bf16, scaled_dot_product_attention:",
        *calls_since(before, flashbwd.stats()),
    ]


def calls_since(before: dict[str, flashbwd.OperatorStats], after: dict[str, flashbwd.OperatorStats]) -> list[str]:
    """Return one line for each operator that was called between two readings of :func:`flashbwd.stats`."""
    lines = []
    for name, now in after.items():
        earlier = before.get(name, flashbwd.OperatorStats(0, {}))
        fallbacks = {
            reason: count - earlier.fallbacks.get(reason, 0)
            for reason, count in now.fallbacks.items()
            if count > earlier.fallbacks.get(reason, 0)
        }
        hits = now.hits - earlier.hits
        if hits or fallbacks:
            others = "; ".join(f"PyTorch's kernel {count} times, because {why}" for why, count in fallbacks.items())
            lines.append(f"{name}: flashbwd {hits} times" + (f"; {others}" if others else ""))
    return lines or ["no operator that flashbwd overrides was called"]

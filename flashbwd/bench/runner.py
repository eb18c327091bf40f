"""Runs the cases of a suite: prepares the peers, checks their gradients, times them, and saves the results."""

from __future__ import annotations

import dataclasses
import datetime
import gc
import re
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from flashbwd.bench import ahead, errors, machine, measure
from flashbwd.bench.cases import (
    ANY_PEER,
    BLOCK_SLOT_MS,
    TOLERANCES,
    VARIANTS,
    AttentionCase,
    BlockCase,
    Case,
    DecodingCase,
    FlexCase,
)
from flashbwd.bench.contenders import SEED, make_inputs, peers_of
from flashbwd.bench.energy import EnergyCounter
from flashbwd.bench.flex_cases import relative_bias, visible_pairs
from flashbwd.bench.measure import Settings
from flashbwd.bench.peers import Peer, Prepared, UnsupportedCaseError
from flashbwd.bench.results import FAILED, OK, UNSUPPORTED, WRONG, CaseResult, PeerResult, Report, load

# ---- one case ------------------------------------------------------------------------------------


class DeviceLostError(RuntimeError):
    """The device is unusable for this process. ``result`` is the incomplete result of the case that caused it."""

    def __init__(self, message: str, result: CaseResult) -> None:
        super().__init__(message)
        self.result = result


def run_case(
    case: Case,
    device: torch.device,
    settings: Settings,
    peers: Sequence[Peer],
    ceilings: dict[str, float] | None = None,
    tick: Callable[[], None] = lambda: None,
    sets: int | None = None,
    counter: EnergyCounter | None = None,
) -> CaseResult:
    """Prepare, check and time each of ``peers`` on one case. By default, the input sets together exceed the cache.

    With a ``counter``, the energy of all peers is measured too.
    """
    if isinstance(case, BlockCase):
        slot_ms = max(settings.slot_ms, BLOCK_SLOT_MS)  # long enough for the clock to settle
        sustained_ms = 0.0 if counter is None else slot_ms
        settings = dataclasses.replace(settings, slot_ms=slot_ms, pause_ms=0.0, sustained_ms=sustained_ms)
    sets = sets or measure.input_sets(case.input_bytes, device)
    inputs = [make_inputs(case, device, SEED + n) for n in range(sets)]
    results: dict[str, PeerResult] = {}
    found = CaseResult(
        case.name,
        case.table,
        case.unit,
        TOLERANCES[case.dtype],
        {k: v for k, v in dataclasses.asdict(case).items() if k not in ("bars", "table")},
        results,
        list(case.bars),
        ceilings or {},
        sets,
    )
    ready: dict[str, list[Prepared]] = {}
    if any(peer.compiled for peer in peers):
        torch.compiler.reset()  # otherwise torch.compile falls back to eager after a few shapes
    references: list[errors.AttentionReference] = []
    for peer in peers:
        try:
            prepared = [peer.prepare(case, x) for x in inputs]
            results[peer.name] = _checked(case, inputs[0], prepared[0], device, references)
            ready[peer.name] = prepared
        except (UnsupportedCaseError, NotImplementedError) as reason:
            results[peer.name] = PeerResult(UNSUPPORTED, _first_line(reason))
        except Exception as error:
            results[peer.name] = PeerResult(FAILED, f"{type(error).__name__}: {_first_line(error)}")
            if is_broken(device):
                message = f"flashbwd: the GPU is unusable after {peer.name}: {_first_line(error)}"
                raise DeviceLostError(message, found) from error
    references.clear()  # frees their memory before the timing
    if ready:
        try:
            timings = measure.interleaved(ready, device, settings, tick, sustained_peers(case, list(ready)), counter)
        except Exception as error:
            for name in ready:
                results[name] = PeerResult(FAILED, f"this or another peer raised while timed: {_first_line(error)}")
            if is_broken(device):
                raise DeviceLostError(f"flashbwd: the GPU is unusable: {_first_line(error)}", found) from error
            raise
        for name, timing in timings.items():
            for figure, value in vars(timing).items():
                setattr(results[name], figure, value)
    return found


POWER_LIMITED = ("main", "grouped")  # tables
POWER_LIMITED_SEQLEN = 4096


def sustained_peers(case: Case, names: Sequence[str]) -> list[str]:
    """Return the peers among ``names`` that a bar of an attention case compares; none for other cases.

    Only attention with long sequences brings a GPU to its power limit. Block cases always have long slots.
    """
    if not isinstance(case, AttentionCase) or case.seqlen < POWER_LIMITED_SEQLEN or case.table not in POWER_LIMITED:
        return []
    over = {variant for bar in case.bars for variant in VARIANTS.get(bar.over, (bar.over,))}
    every = any(bar.over == ANY_PEER for bar in case.bars)
    wanted = over | {bar.ours for bar in case.bars}
    return [name for name in names if name in wanted or (every and not name.startswith("flashbwd"))]


def _checked(
    case: Case, x: Any, prepared: Prepared, device: torch.device, references: list[errors.AttentionReference]
) -> PeerResult:
    """Return the result of a peer before it is timed: correctness, work and memory.

    ``references`` keeps the float64 gradients for the next peers, unless a dropout mask depends on the peer.
    """
    with prepared.scope():
        grads = prepared.backward()
    found: dict[str, float] = {}
    if grads and prepared.checked:
        if isinstance(case, AttentionCase | FlexCase):
            dense = case.dense if isinstance(case, FlexCase) else case
            if not references:
                of_flex: dict[str, Any] = {}
                if isinstance(case, FlexCase):
                    of_flex = {"visible": visible_pairs(case, device), "relative": relative_bias(case, device)}
                references.append(errors.attention_reference(dense, x, prepared, **of_flex))
            found = errors.attention_errors(dense, x, prepared, grads, references[0])
            if dense.dropout_p > 0:
                references.clear()
        elif isinstance(case, DecodingCase):
            found = errors.decoding_errors(case, x, grads)
        elif isinstance(case, BlockCase):
            found = errors.block_errors(x, grads)
        else:
            found = errors.norm_errors(case, x, grads)
    bad = {name: error for name, error in found.items() if not error <= TOLERANCES[case.dtype]}
    del grads
    return PeerResult(
        WRONG if bad else OK,
        ", ".join(f"{name} is off by {error:.2e}" for name, error in bad.items()),
        work=case.work if prepared.work is None else prepared.work,
        errors=found,
        extra_bytes=measure.extra_bytes(prepared, device),
        workspace_bytes=prepared.workspace_bytes,
        plan=prepared.plan,
        refusals=dict(prepared.refusals),
        first_ms=prepared.first_ms,
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def is_broken(device: torch.device) -> bool:
    """Return whether an earlier error, such as an illegal access, made the device unusable for this process."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


# ---- a suite -------------------------------------------------------------------------------------


def result_path(directory: Path, suite: str, device_name: str) -> Path:
    slug = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    stamp = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%d-%H%M%S")
    return directory / f"{slug}-{suite}-{stamp}.json"


def unfinished(directory: Path, suite: str, now: machine.Machine, settings: Settings) -> Path | None:
    """Return the newest incomplete result file with the same suite, settings, machine and kernels."""
    for path in sorted(directory.glob("*.json"), reverse=True):
        try:
            report = load(path)
        except ValueError:
            continue
        keys = ("device", "torch", "kernel_sources", "libraries")
        same_code = all(report.machine[key] == getattr(now, key) for key in keys)
        same_run = report.suite == suite and report.settings == dataclasses.asdict(settings)
        if same_code and same_run and not report.complete:
            return path
    return None


def run_suite(
    suite: str,
    cases: Iterable[Case],
    device: torch.device,
    settings: Settings,
    path: Path,
    *,
    only: Sequence[str] = (),
    budget_s: float = float("inf"),
    progress: bool = True,
) -> Report:
    """Measure ``cases`` and save the report to ``path`` after each. An incomplete file at ``path`` is continued.

    No case starts after ``budget_s`` seconds; ``report.complete`` then stays False.

    Raises
    ------
    DeviceLostError
        If a peer makes the device unusable.
    EnergyError
        If ``settings.energy`` is true and the energy of a call cannot be measured.
    """
    counter = EnergyCounter(device) if settings.energy else None  # while the GPU is idle
    deadline = time.monotonic() + budget_s
    report = load(path) if path.exists() else None
    if report is None:
        report = Report(
            suite,
            datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            machine.describe(device).as_dict(),
            dataclasses.asdict(settings),
        )
        if counter is not None:
            report.machine["energy_counter"] = {"update_ms": counter.update_ms, "idle_watts": counter.idle_watts}
    done = report.by_name()
    left = [case for case in cases if f"{case.table}: {case.name}" not in done]
    counts = [len(peers_of(case, device, only)) for case in left]
    slots = sum(map(settings.slots_of, counts))
    work = [(case, peer) for case in left for peer in peers_of(case, device, only) if peer.ahead]
    if len(work) > 1:
        in_order = sorted(work, key=lambda pair: pair[1].name, reverse=True)  # slow, autotuned peers first
        ahead.compile_ahead(in_order, time.monotonic() + budget_s / 3)
    ceilings = measure.ceilings(device, settings) if left else {}
    with Progress(slots, progress) as bar:
        for case in left:
            if time.monotonic() > deadline:
                break
            peers = peers_of(case, device, only)
            bar.begin(case.name)
            try:
                report.results.append(run_case(case, device, settings, peers, ceilings, bar.tick, None, counter))
            except DeviceLostError as lost:
                report.results.append(lost.result)  # a resumed run then continues after this case
                report.save(path)
                raise
            bar.finish(settings.slots_of(len(peers)))
            report.save(path)
            gc.collect()
            if gc.get_freeze_count() == 0:  # compiler modules, which would cost 0.2 s in every later collection
                gc.freeze()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        else:
            report.complete = True
    report.save(path)
    return report


class Progress:
    """A progress bar over timed slots with tqdm; without tqdm, one line per case."""

    def __init__(self, total: int, shown: bool) -> None:
        self.ticked = 0
        self.bar: Any = None
        self.shown = shown
        if shown:
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self.bar = tqdm(total=total, unit="slot", dynamic_ncols=True, smoothing=0.1)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def begin(self, name: str) -> None:
        self.ticked = 0
        if self.bar is not None:
            self.bar.set_description(name)
        elif self.shown:
            print(name, flush=True)

    def tick(self) -> None:
        self.ticked += 1
        if self.bar is not None:
            self.bar.update()

    def finish(self, expected: int) -> None:
        """Count the slots of peers that could not run."""
        if self.bar is not None:
            self.bar.update(expected - self.ticked)

"""Measures time and memory.

All peers of a case are timed in one process on the same inputs, in interleaved rounds. In a round, each peer gets one
slot of many calls. A peer runs at a lower clock if the previous peer heated the card, so the order of the peers differs
between rounds (``order``). A time is the median over rounds of (time of a slot / calls). A ratio is the median over
rounds of the ratio within the round, so that slow drifts of the clock cancel. A time includes the allocations and the
zeroing of a call.

On CUDA, slots are timed with events. The first call of a slot is not counted: while it runs, the host launches the
other calls, and it absorbs the one-time cost of switching to another peer's memory. If a call is so short that its
launch would dominate the time, a slot replays a CUDA graph of it. The report then also contains the time of eager
calls, which includes the host. The host time of a call is measured in bursts that start with an idle GPU and fit into
its launch queue, so the host never waits for the GPU. If all inputs fit into the cache, calls rotate among
several sets of inputs.

A card at its power limit lowers its clock over a few tenths of a second, so there are two figures: cool (short slots,
each after a pause) and sustained (long slots, of which the second half is timed). The energy of a call is measured in
the sustained slots, between two readings of the GPU's energy counter.
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashbwd.bench.energy import EnergyCounter
from flashbwd.bench.peers import Prepared

GRAPH_BELOW_MS = 0.15  # includes host time: launching a call of 50 us of device time often takes 100 us
FEWEST_ROUNDS = 5
HOST_ROUNDS = 5
HOST_CALLS = 30  # most calls per burst, so that their kernels fit into the launch queue, which holds about 1000
HOST_BURST_MS = 20.0  # GPU time after which a burst ends; one call at least
SUSTAINED_ROUNDS = 3  # rounds of slots with a settled clock, which are long and vary little
CPU_CACHE_BYTES = 2**25  # used if the system does not report the size


@dataclass(frozen=True)
class Settings:
    """How long to measure.

    Attributes
    ----------
    rounds
        Minimum number of rounds.
    slot_ms
        Minimum length of a slot in milliseconds.
    pause_ms
        Time in milliseconds for which a GPU rests before each slot.
    sustained_ms
        Length in milliseconds of the slots with a settled clock, of which the second half is timed; 0 for none.
    energy
        Whether every peer also gets slots with a settled clock in which its energy is measured.
    """

    rounds: int = 7
    slot_ms: float = 30.0
    pause_ms: float = 0.0
    sustained_ms: float = 0.0
    energy: bool = False

    def __post_init__(self) -> None:
        if self.rounds < FEWEST_ROUNDS:
            raise ValueError(f"flashbwd: rounds is {self.rounds}, expected at least {FEWEST_ROUNDS}")

    def rounds_of(self, peers: int) -> int:
        """Return the number of rounds for this number of peers. It is a multiple of the number of peers (``order``)."""
        return math.ceil(self.rounds / max(peers, 1)) * max(peers, 1)

    def slots_of(self, peers: int) -> int:
        """Return the number of slots of this number of peers that a progress bar counts."""
        return peers * (self.rounds_of(peers) + (SUSTAINED_ROUNDS if self.energy else 0))


@dataclass(frozen=True)
class Timing:
    times_ms: list[float]  # time of one call, one value per round
    method: str  # "events", "graph" or "clock"
    host_us: float | None  # host time of one call on a GPU
    eager_ms: list[float] = field(default_factory=list)  # time of one call without the graph, one value per round
    sustained_ms: list[float] = field(default_factory=list)  # time of one call with a settled clock, one per round
    joules: list[float] = field(default_factory=list)  # energy of one call with a settled clock, one per round
    energy_error: list[float] = field(default_factory=list)  # largest error of each of ``joules``, as a fraction


@dataclass(frozen=True)
class Metered:
    """Time and energy of one call in one slot, and the largest error of the energy as a fraction."""

    ms: float
    joules: float
    error: float


class Timer:
    """Times slots of calls on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def pause(self, milliseconds: float) -> None:
        """Let the GPU rest."""
        if self.cuda and milliseconds > 0:
            self.synchronize()
            time.sleep(milliseconds / 1e3)

    def slot(self, calls: Iterator[Callable[[], Any]], repeats: int, lead: int = 1) -> float:
        """Return milliseconds per call over ``repeats`` calls; on CUDA after ``lead`` calls that are not counted."""
        if not self.cuda:
            start = time.perf_counter()
            for call in itertools.islice(calls, repeats):
                call()
            return (time.perf_counter() - start) / repeats * 1e3
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self.device)
        for call in itertools.islice(calls, lead):
            call()
        first.record()
        for call in itertools.islice(calls, repeats):
            call()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / repeats

    def metered_slot(
        self, calls: Iterator[Callable[[], Any]], repeats: int, lead: int, counter: EnergyCounter
    ) -> Metered:
        """Measure ``repeats`` calls after ``lead`` calls that are not counted.

        The counter is read when the GPU has finished the last call that is not counted. The first counted calls are
        launched before, so that the GPU does not wait for the reading.
        """
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self.device)
        for call in itertools.islice(calls, lead):
            call()
        first.record()
        ahead = max(1, repeats // 200)
        for call in itertools.islice(calls, ahead):
            call()
        first.synchronize()
        before = counter.millijoules()
        for call in itertools.islice(calls, repeats - ahead):
            call()
        last.record()
        last.synchronize()
        joules = counter.joules_since(before)
        slot_ms = first.elapsed_time(last)
        return Metered(slot_ms / repeats, joules / repeats, counter.update_ms / slot_ms)


def host_bursts(call: Callable[[], Any], bursts: int, calls: int) -> list[float]:
    """Return host microseconds per call, one value per burst of ``calls`` calls; a burst starts with an idle GPU."""
    times = []
    for _ in range(bursts):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return times


def capture(calls: Sequence[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    """Return a CUDA graph that runs all ``calls`` in sequence."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


class _Runner:
    """The calls of one peer, one per set of inputs, and the method by which their slots are timed."""

    def __init__(self, sets: Sequence[Prepared], method: str) -> None:
        self.scope = sets[0].scope
        self.backwards = [prepared.backward for prepared in sets]
        self.calls: Iterator[Callable[[], Any]] = itertools.cycle(self.backwards)  # continues across slots
        self.backwards_a_call = 1
        self.repeats = 1
        self.eager: Iterator[Callable[[], Any]] = itertools.cycle(self.backwards)
        self.eager_repeats = 1
        self.method = method
        self.capturable = sets[0].capturable

    def slot(self, timer: Timer) -> float:
        """Return the milliseconds of one backward."""
        with self.scope():
            return timer.slot(self.calls, self.repeats) / self.backwards_a_call

    def eager_slot(self, timer: Timer) -> float:
        """Return the milliseconds of one backward without the graph, which include the host time."""
        with self.scope():
            return timer.slot(self.eager, self.eager_repeats)

    def sustained_slot(self, timer: Timer, slot_ms: float, call_ms: float) -> float:
        """Return the milliseconds of one backward in the second half of a slot; the clock settles in the first half."""
        repeats = repeats_for(slot_ms / 2, call_ms * self.backwards_a_call)
        with self.scope():
            return timer.slot(self.calls, repeats, lead=repeats) / self.backwards_a_call

    def metered_slot(self, timer: Timer, slot_ms: float, call_ms: float, counter: EnergyCounter) -> Metered:
        """Measure one backward as ``sustained_slot`` does. The timed half is longer if the counter requires it."""
        lead, repeats = (
            repeats_for(half_ms, call_ms * self.backwards_a_call)
            for half_ms in (slot_ms / 2, counter.timed_ms(slot_ms / 2))
        )
        with self.scope():
            slot = timer.metered_slot(self.calls, repeats, lead, counter)
        return replace(slot, ms=slot.ms / self.backwards_a_call, joules=slot.joules / self.backwards_a_call)

    def host_us(self, call_ms: float) -> float:
        """Return the host time of one backward without the graph, in microseconds, from one burst of calls."""
        calls = max(1, min(HOST_CALLS, int(HOST_BURST_MS / max(call_ms, 1e-3))))
        with self.scope():
            return host_bursts(self.backwards[0], 1, calls)[0]

    def use_graph(self, timer: Timer) -> None:
        """Replay a CUDA graph of all sets from now on. A peer that cannot be captured is still timed eagerly."""
        with self.scope():
            if not self.capturable:
                return
            try:
                graph = capture(self.backwards)
            except RuntimeError:
                timer.synchronize()
                return
        self.calls, self.backwards_a_call, self.method = itertools.repeat(graph.replay), len(self.backwards), "graph"


def interleaved(
    peers: Mapping[str, Sequence[Prepared]],
    device: torch.device,
    settings: Settings,
    tick: Callable[[], None] = lambda: None,
    sustained: Collection[str] = (),
    counter: EnergyCounter | None = None,
) -> dict[str, Timing]:
    """Time every peer, each given as one ``Prepared`` per set of inputs; ``tick`` is called after each slot.

    Peers named in ``sustained`` are also timed with a settled clock, if ``settings`` request it and no call is short.
    With a ``counter``, all peers are, and their energy is measured in the same slots.
    """
    timer = Timer(device)
    runners = {name: _Runner(sets, "events" if timer.cuda else "clock") for name, sets in peers.items()}
    pilots = {}
    for name, runner in runners.items():
        with runner.scope():
            runner.backwards[0]()  # warm-up: loads modules, creates handles, runs heuristics, fills the allocator
        pilots[name] = runner.slot(timer)
    short = timer.cuda and min(pilots.values()) < GRAPH_BELOW_MS
    for name, runner in runners.items():
        if short:
            runner.use_graph(timer)
            runner.eager_repeats = repeats_for(settings.slot_ms, pilots[name])
            pilots[name] = runner.slot(timer)
        runner.repeats = repeats_for(settings.slot_ms, pilots[name] * runner.backwards_a_call)
    gc.collect()
    host_us = _host_times(runners, pilots) if timer.cuda else dict.fromkeys(runners)
    timings = {name: Timing([], runner.method, host_us[name]) for name, runner in runners.items()}
    for name in in_rounds(list(runners), settings):
        timer.pause(settings.pause_ms)
        timings[name].times_ms.append(runners[name].slot(timer))
        if runners[name].method == "graph":
            timings[name].eager_ms.append(runners[name].eager_slot(timer))
        tick()
    if timer.cuda and settings.sustained_ms > 0 and (counter is not None or not short):
        chosen = [name for name in runners if counter is not None or name in sustained]
        _settled_rounds({name: runners[name] for name in chosen}, timings, timer, settings, tick, counter)
    return timings


def _host_times(runners: Mapping[str, _Runner], call_ms: Mapping[str, float]) -> dict[str, float | None]:
    """Return the median host time of a call of each peer, in microseconds, from interleaved bursts."""
    bursts: dict[str, list[float]] = {name: [] for name in runners}
    for turn in range(HOST_ROUNDS):
        for name in order(list(runners), turn):
            bursts[name].append(runners[name].host_us(call_ms[name]))
    return {name: statistics.median(times) for name, times in bursts.items()}


def _settled_rounds(
    runners: Mapping[str, _Runner],
    timings: Mapping[str, Timing],
    timer: Timer,
    settings: Settings,
    tick: Callable[[], None],
    counter: EnergyCounter | None,
) -> None:
    """Time peers with a settled clock and, with a counter, measure their energy."""
    for turn in range(SUSTAINED_ROUNDS):
        for name in order(list(runners), turn):
            timing = timings[name]
            call_ms = statistics.median(timing.times_ms)
            if counter is None:
                timing.sustained_ms.append(runners[name].sustained_slot(timer, settings.sustained_ms, call_ms))
                continue
            slot = runners[name].metered_slot(timer, settings.sustained_ms, call_ms, counter)
            timing.sustained_ms.append(slot.ms)
            timing.joules.append(slot.joules)
            timing.energy_error.append(slot.error)
            tick()
    if counter is not None:
        counter.require_sole_use()


def repeats_for(slot_ms: float, call_ms: float) -> int:
    """Return the number of calls that fill a slot."""
    return max(1, math.ceil(slot_ms / max(call_ms, 1e-3)))


def in_rounds(names: Sequence[str], settings: Settings) -> Iterator[str]:
    """Yield the names of the peers in the order of their slots, for all rounds."""
    for turn in range(settings.rounds_of(len(names)) if names else 0):
        yield from order(names, turn)


def order(names: Sequence[str], turn: int) -> list[str]:
    """Return the order of the peers in round ``turn``.

    In ``len(names)`` rounds, each peer is first once and follows each other peer once. An odd number of peers needs
    twice as many rounds. (E. J. Williams, Experimental designs balanced for the estimation of residual effects of
    treatments, 1949.)
    """
    count = len(names)
    side = -1 if count % 2 and turn % 2 else 1
    zigzag = [(i + 1) // 2 * side * (-1) ** i for i in range(count)]
    return [names[(turn + step) % count] for step in zigzag]


def extra_bytes(prepared: Prepared, device: torch.device) -> int | None:
    """Return the peak memory of one call in bytes, without inputs and returned gradients; None on the CPU."""
    if device.type != "cuda":
        return None
    with prepared.scope():
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        grads = prepared.backward()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device)
    storages = {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in grads if isinstance(g, Tensor)}
    return max(0, peak - before - sum(storages.values()))


def cache_bytes(device: torch.device) -> int:
    """Return the size of the last-level cache in bytes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        return int(text.rstrip("KM")) * {"K": 2**10, "M": 2**20}.get(text[-1], 1)
    except (OSError, ValueError):
        return CPU_CACHE_BYTES


def input_sets(input_bytes: int, device: torch.device) -> int:
    """Return how many input sets are three times as large as the cache, so that calls miss it; at most 64."""
    return min(64, max(1, math.ceil(3 * cache_bytes(device) / max(input_bytes, 1))))


def ceilings(device: torch.device, settings: Settings) -> dict[str, float]:
    """Measure upper bounds of the rates on this machine: a large matrix product (TFLOP/s), a large copy (GB/s)."""
    cuda = device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if cuda else (2048, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    source = torch.randn(2**28 if cuda else 2**25, device=device)
    target = torch.empty_like(source)
    calls = {"matmul": Prepared(lambda: (a @ b,)), "copy": Prepared(lambda: (target.copy_(source),))}
    timings = interleaved({name: [call] for name, call in calls.items()}, device, settings)
    return {
        "matmul_tflops": 2.0 * size**3 / statistics.median(timings["matmul"].times_ms) / 1e9,
        "copy_gbs": 2.0 * source.nbytes / statistics.median(timings["copy"].times_ms) / 1e6,
    }

"""How time and memory are taken.

All peers of a case are timed in one process on the same inputs, interleaved: a round gives each of them one slot of
many calls, in an order that lets each follow all others in turn: whoever comes behind a peer that has made the card hot
gets its clock. There are as many rounds as it takes until each has had every place in that order. A figure is the
median over rounds of (time of a slot / calls), a ratio the median over rounds of the ratio within the round, so that
slow drifts of the clock cancel. Allocation and zeroing inside a call are part of it.

On CUDA, slots are timed with events, from the end of a first call that is not counted: under it the host launches the
rest, and it pays what the device pays once for coming from another peer's memory. Where a call is so short that
launching it would be what is timed, a slot replays a CUDA graph of it; slots of eager calls, with what the host adds,
and the time that the host spends on one call are reported beside it. Inputs that fit the cache together are
multiplied: calls rotate among sets of them.

A card at its power limit lowers its clock over some tenths of a second, so there are two figures: cool (short slots,
each after a pause) and sustained (long slots, of which the second half is timed).
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

from flashbwd.bench.peers import Prepared

GRAPH_BELOW_MS = 0.15  # includes the host's part: a call of 50 us of device time often takes 100 us to launch
FEWEST_ROUNDS = 5
CPU_CACHE_BYTES = 2**25  # where the system does not say


@dataclass(frozen=True)
class Settings:
    """How long to measure: rounds at least; milliseconds that a slot lasts at least, and that a GPU rests before it.

    ``sustained_ms`` is the length of the slots in whose second half the clock has settled; with 0 there are none.
    """

    rounds: int = 7
    slot_ms: float = 30.0
    pause_ms: float = 0.0
    sustained_ms: float = 0.0

    def __post_init__(self) -> None:
        if self.rounds < FEWEST_ROUNDS:
            raise ValueError(f"flashbwd: rounds is {self.rounds}, expected at least {FEWEST_ROUNDS}")

    def rounds_of(self, peers: int) -> int:
        """Rounds in which so many peers are interleaved: a multiple of their number, see ``order``."""
        return math.ceil(self.rounds / max(peers, 1)) * max(peers, 1)


@dataclass(frozen=True)
class Timing:
    times_ms: list[float]  # of one call, a value a round
    method: str  # "events", "graph" or "clock"
    host_us: float | None  # the host's time for one call, where calls are short
    eager_ms: list[float] = field(default_factory=list)  # of one call without the graph, a value a round
    sustained_ms: list[float] = field(default_factory=list)  # of one call with a settled clock, a value a round


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
        """Milliseconds for one of ``repeats`` calls; on CUDA after ``lead`` calls that are not counted."""
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

    def host_us(self, call: Callable[[], Any]) -> float:
        """Median microseconds until a call returns, the device idle before it."""
        times = []
        for _ in range(20):
            self.synchronize()
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
        self.synchronize()
        return statistics.median(times)


def host_bursts(call: Callable[[], Any], bursts: int, calls: int) -> list[float]:
    """Microseconds of the host for a call, in each of ``bursts`` of ``calls`` that find an idle GPU."""
    times = []
    for _ in range(bursts):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return times


def capture(calls: Sequence[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of all of ``calls``, one after the other."""
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
    """One peer's calls, one for each set of inputs, and how a slot of them is timed."""

    def __init__(self, sets: Sequence[Prepared], method: str) -> None:
        self.scope = sets[0].scope
        self.backwards = [prepared.backward for prepared in sets]
        self.calls: Iterator[Callable[[], Any]] = itertools.cycle(self.backwards)  # goes on from slot to slot
        self.backwards_a_call = 1
        self.repeats = 1
        self.eager: Iterator[Callable[[], Any]] = itertools.cycle(self.backwards)
        self.eager_repeats = 1
        self.method = method
        self.host_us: float | None = None
        self.capturable = sets[0].capturable

    def slot(self, timer: Timer) -> float:
        """Milliseconds of one backward."""
        with self.scope():
            return timer.slot(self.calls, self.repeats) / self.backwards_a_call

    def eager_slot(self, timer: Timer) -> float:
        """Milliseconds of one backward called without the graph, the host's time included."""
        with self.scope():
            return timer.slot(self.eager, self.eager_repeats)

    def sustained_slot(self, timer: Timer, slot_ms: float, call_ms: float) -> float:
        """Milliseconds of one backward in the second half of a slot; in the first the clock settles."""
        repeats = repeats_for(slot_ms / 2, call_ms * self.backwards_a_call)
        with self.scope():
            return timer.slot(self.calls, repeats, lead=repeats) / self.backwards_a_call

    def use_graph(self, timer: Timer) -> None:
        """Replay a CUDA graph of all sets from now on. What cannot be captured keeps its eager time."""
        with self.scope():
            self.host_us = timer.host_us(self.backwards[0])
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
) -> dict[str, Timing]:
    """Time every peer, each given as one ``Prepared`` for each set of inputs; ``tick`` is called after each slot.

    Peers named in ``sustained`` are timed with a settled clock too, where ``settings`` ask for it and calls are long.
    """
    timer = Timer(device)
    runners = {name: _Runner(sets, "events" if timer.cuda else "clock") for name, sets in peers.items()}
    pilots = {}
    for name, runner in runners.items():
        with runner.scope():
            runner.backwards[0]()  # warm-up: modules, handles, heuristics, the allocator's blocks
        pilots[name] = runner.slot(timer)
    short = timer.cuda and min(pilots.values()) < GRAPH_BELOW_MS
    for name, runner in runners.items():
        if short:
            runner.use_graph(timer)
            runner.eager_repeats = repeats_for(settings.slot_ms, pilots[name])
            pilots[name] = runner.slot(timer)
        runner.repeats = repeats_for(settings.slot_ms, pilots[name] * runner.backwards_a_call)
    timings = {name: Timing([], runner.method, runner.host_us) for name, runner in runners.items()}
    gc.collect()
    for name in in_rounds(list(runners), settings):
        timer.pause(settings.pause_ms)
        timings[name].times_ms.append(runners[name].slot(timer))
        if runners[name].method == "graph":
            timings[name].eager_ms.append(runners[name].eager_slot(timer))
        tick()
    if timer.cuda and settings.sustained_ms > 0 and not short:
        fewest = replace(settings, rounds=FEWEST_ROUNDS)  # each takes long
        for name in in_rounds([name for name in runners if name in sustained], fewest):
            timings[name].sustained_ms.append(runners[name].sustained_slot(timer, settings.sustained_ms, pilots[name]))
    return timings


def repeats_for(slot_ms: float, call_ms: float) -> int:
    """How many calls make a slot."""
    return max(1, math.ceil(slot_ms / max(call_ms, 1e-3)))


def in_rounds(names: Sequence[str], settings: Settings) -> Iterator[str]:
    """Whose slot comes next, through all rounds."""
    for turn in range(settings.rounds_of(len(names)) if names else 0):
        yield from order(names, turn)


def order(names: Sequence[str], turn: int) -> list[str]:
    """The order of a round: in ``len(names)`` rounds each comes first once and follows each of the others once.

    An odd number of names takes twice as many rounds for it. (E. J. Williams, Experimental designs balanced for the
    estimation of residual effects of treatments, 1949.)
    """
    count = len(names)
    side = -1 if count % 2 and turn % 2 else 1
    zigzag = [(place + 1) // 2 * side * (-1) ** place for place in range(count)]
    return [names[(turn + step) % count] for step in zigzag]


def extra_bytes(prepared: Prepared, device: torch.device) -> int | None:
    """Peak memory that one call takes beyond its inputs and the gradients it returns; None on the CPU."""
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
    """Size of the last cache before memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        return int(text.rstrip("KM")) * {"K": 2**10, "M": 2**20}.get(text[-1], 1)
    except (OSError, ValueError):
        return CPU_CACHE_BYTES


def input_sets(input_bytes: int, device: torch.device) -> int:
    """How many sets of inputs make a rotation miss the cache: three times its size, at most 64 sets."""
    return min(64, max(1, math.ceil(3 * cache_bytes(device) / max(input_bytes, 1))))


def ceilings(device: torch.device, settings: Settings) -> dict[str, float]:
    """The rates that nothing on this machine beats: a large matrix product (TFLOP/s) and a large copy (GB/s)."""
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

"""The arithmetic of time slots, on a simulated GPU: each call advances its clock, and it throttles when hot."""

from __future__ import annotations

import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flashbwd.bench import attention_cases, cases, contenders, machine, measure, runner
from flashbwd.bench.energy import MAX_ERROR, EnergyCounter
from flashbwd.bench.measure import Settings, Timer
from flashbwd.bench.peers import Peer, Prepared

GPU = torch.device("cuda")
FIRST_MS = 1000.0  # extra time of a call that follows a call of another peer
THROTTLED_AFTER_MS = 200.0  # work without a rest after which calls take twice as long, at the same energy
WATTS = 600.0  # at the full clock


class PretendedGpu:
    """A GPU whose clock advances only by calls and rests.

    The host sees the energy as it is when the device has finished what the host waits for, not what was launched later.
    """

    def __init__(self) -> None:
        self.now = self.busy = 0.0
        self.millijoules = self.seen_millijoules = self.seen_at = 0.0
        self.last: object = None
        self.counts: Counter[object] = Counter()
        self.rests: list[float] = []

    def run(self, peer: object, cost: float, calls: int = 1) -> None:
        took = cost * calls * (2.0 if self.busy >= THROTTLED_AFTER_MS else 1.0)
        self.millijoules += cost * calls * WATTS + (1e6 if self.last != peer else 0.0)
        took += FIRST_MS if self.last != peer else 0.0
        self.busy += cost * calls
        self.now += took
        self.last = peer
        self.counts[peer] += calls

    def rest(self, seconds: float) -> None:
        self.rests.append(seconds * 1e3)
        self.busy = 0.0

    def peer(self, name: object, cost: float, sets: int = 1) -> list[Prepared]:
        def backward() -> tuple[torch.Tensor | None, ...]:
            self.run(name, cost)
            return ()

        return [Prepared(backward) for _ in range(sets)]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PretendedGpu:
    pretended = PretendedGpu()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = self.millijoules = 0.0

        def record(self) -> None:
            self.at, self.millijoules = pretended.now, pretended.millijoules

        def synchronize(self) -> None:
            pretended.seen_millijoules, pretended.seen_at = self.millijoules, self.at

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: None)
    monkeypatch.setattr(measure.time, "sleep", pretended.rest)
    return pretended


@pytest.mark.parametrize("repeats", [1, 7])
def test_the_first_call_of_a_slot_is_not_counted(gpu, repeats):
    calls = iter([prepared.backward for prepared in gpu.peer("a", 2.0, sets=20)])
    assert Timer(GPU).slot(calls, repeats) == 2.0
    assert gpu.counts["a"] == repeats + 1


def test_the_extra_time_of_a_call_after_another_peer_is_not_counted(gpu):
    timings = measure.interleaved({"a": gpu.peer("a", 2.0), "b": gpu.peer("b", 3.0)}, GPU, Settings(6, 10.0, 1.0))
    assert timings["a"].times_ms == [2.0] * 6
    assert timings["b"].times_ms == [3.0] * 6
    assert timings["a"].method == "events"
    # Calls of a: a warm-up, a pilot of 1 + 1, 5 bursts of 20 ms for the host time, and 6 slots of 1 + 5. The slots of
    # b have 1 + 4 calls.
    assert gpu.counts == {"a": 3 + 5 * 10 + 6 * 6, "b": 3 + 5 * 6 + 6 * 5}


@pytest.fixture
def _graphs(gpu, monkeypatch):
    """A call of a replay takes 0.01 ms on the GPU."""

    class Graph:
        def __init__(self, calls: list[object]) -> None:
            self.count = len(calls)

        def replay(self) -> None:
            gpu.run("a", 0.01, self.count)

    monkeypatch.setattr(measure, "capture", Graph)


@pytest.mark.parametrize("sets", [1, 3])
@pytest.mark.usefixtures("_graphs")
def test_a_replay_counts_as_one_call_per_input_set(gpu, sets):
    """A call takes 0.05 ms on the host if it is launched by itself."""
    timing = measure.interleaved({"a": gpu.peer("a", 0.05, sets)}, GPU, Settings(6, 1.0, 1.0))["a"]
    assert timing.method == "graph"
    assert timing.times_ms == pytest.approx([0.01] * 6)
    assert timing.eager_ms == pytest.approx([0.05] * 6)
    assert timing.sustained_ms == []


def test_short_slots_start_cool_and_long_slots_have_a_settled_clock(gpu):
    peers = {name: gpu.peer(name, 1.0) for name in "abc"}
    timings = measure.interleaved(peers, GPU, Settings(6, 30.0, 50.0, 500.0), sustained="ab")
    for timing in timings.values():
        assert timing.times_ms == pytest.approx([1.0] * 6)
    assert timings["a"].sustained_ms == timings["b"].sustained_ms == pytest.approx([2.0] * measure.SUSTAINED_ROUNDS)
    assert timings["c"].sustained_ms == []
    assert gpu.rests == [50.0] * 18  # one rest before each short slot, and none before the long slots


class PretendedCounter(EnergyCounter):
    """A counter that is always up to date or, if ``late``, lacks the energy since the last update (throttled)."""

    def __init__(self, gpu: PretendedGpu, update_ms: float, late: bool = False) -> None:
        self.gpu, self.update_ms, self.late, self.sole_use_checks = gpu, update_ms, late, 0

    def millijoules(self) -> int:
        missing = self.gpu.seen_at % self.update_ms * WATTS / 2 if self.late else 0.0
        return int(self.gpu.seen_millijoules - missing)

    def require_sole_use(self) -> None:
        self.sole_use_checks += 1


@pytest.mark.parametrize(("update_ms", "timed_ms"), [(1.0, 250.0), (20.0, 1000.0)])
def test_energy_is_that_of_the_timed_half_over_its_calls(gpu, update_ms, timed_ms):
    """The energy of the first half, which includes a start that takes as much as 1667 calls, does not count."""
    counter = PretendedCounter(gpu, update_ms)
    peers = {"a": gpu.peer("a", 1.0), "b": gpu.peer("b", 2.0)}
    ticks: list[None] = []
    before = measure.interleaved(peers, GPU, Settings(6, 30.0, 50.0))["a"]
    gpu.counts.clear()
    timings = measure.interleaved(
        peers, GPU, Settings(6, 30.0, 50.0, 500.0, energy=True), lambda: ticks.append(None), counter=counter
    )
    assert before.joules == before.energy_error == []
    assert timings["a"].joules == pytest.approx([0.6] * measure.SUSTAINED_ROUNDS)
    assert timings["b"].joules == pytest.approx([1.2] * measure.SUSTAINED_ROUNDS)
    assert timings["a"].sustained_ms == pytest.approx([2.0] * measure.SUSTAINED_ROUNDS)
    # The throttled GPU takes twice as long as planned, which halves the error.
    assert timings["a"].energy_error == pytest.approx([update_ms / timed_ms / 2] * measure.SUSTAINED_ROUNDS)
    assert max(timings["a"].energy_error) <= MAX_ERROR
    assert len(ticks) == Settings(6, 30.0, energy=True).slots_of(2)
    assert counter.sole_use_checks == 1
    # A warm-up, a pilot of 2, 5 bursts of 20, 6 slots of 1 + 30, and the slots with a settled clock.
    assert gpu.counts["a"] == 3 + 100 + 6 * 31 + measure.SUSTAINED_ROUNDS * (250 + timed_ms)


def test_a_late_counter_is_wrong_by_at_most_the_error_that_is_stated(gpu):
    counter = PretendedCounter(gpu, 37.0, late=True)
    settings = Settings(6, 30.0, 50.0, 500.0, energy=True)
    timing = measure.interleaved({"a": gpu.peer("a", 1.3)}, GPU, settings, counter=counter)["a"]
    true = 1.3 * WATTS / 1e3
    errors = [abs(joules / true - 1) for joules in timing.joules]
    assert max(errors) > 1e-4  # the counter was late
    assert all(error <= stated for error, stated in zip(errors, timing.energy_error, strict=True))


@pytest.mark.usefixtures("_graphs")
def test_energy_of_a_replay_is_divided_by_its_calls(gpu):
    peers, settings = {"a": gpu.peer("a", 0.05, 3)}, Settings(6, 1.0, 1.0, 500.0, energy=True)
    timing = measure.interleaved(peers, GPU, settings, counter=PretendedCounter(gpu, 1.0))["a"]
    assert timing.method == "graph"
    assert timing.joules == pytest.approx([0.006] * measure.SUSTAINED_ROUNDS)


def test_slots_of_blocks_are_long_enough_for_energy(gpu, monkeypatch):
    seen = []
    monkeypatch.setattr(measure, "interleaved", lambda peers, device, settings, *rest: seen.append(settings) or {})
    monkeypatch.setattr(runner, "make_inputs", lambda *arguments: None)
    block = cases.BlockCase("t", "gpt", 1, 8, 16, 2, 2, 32)
    idle = Peer("idle", lambda case, x: Prepared(lambda: ()))
    for counter in (None, PretendedCounter(gpu, 1.0)):
        runner.run_case(block, torch.device("cpu"), Settings(), [idle], sets=1, counter=counter)
    assert [asked.sustained_ms for asked in seen] == [0.0, cases.BLOCK_SLOT_MS]


# ---- host time ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cost", "calls"), [(0.2, 30), (2.0, 10), (15.0, 1), (50.0, 1)])
def test_a_burst_for_the_host_time_fits_into_the_launch_queue(gpu, monkeypatch, cost, calls):
    bursts: list[int] = []

    def burst(call: object, count: int, calls: int) -> list[float]:
        bursts.append(calls)
        return [float(len(bursts))]

    monkeypatch.setattr(measure, "host_bursts", burst)
    timing = measure.interleaved({"a": gpu.peer("a", cost)}, GPU, Settings(6, 10.0))["a"]
    assert bursts == [calls] * measure.HOST_ROUNDS
    assert timing.host_us == 3.0  # the median


def test_there_is_no_host_time_on_the_cpu():
    timing = measure.interleaved({"a": [Prepared(lambda: ())]}, torch.device("cpu"), Settings(5, 0.01))["a"]
    assert timing.host_us is None


def test_settled_clocks_are_measured_for_the_peers_that_bars_compare():
    case = next(c for c in attention_cases.ATTENTION_CASES if c.table == "main" and c.seqlen == 4096)
    names = [peer.name for peer in contenders.peers_of(case, GPU)]
    wanted = {cases.SM90, cases.CUDNN, cases.CUDNN_HEADS_FIRST, cases.SM80, cases.FLASH, cases.SM90 + " deterministic"}
    assert set(runner.sustained_peers(case, names)) == wanted
    anyone = replace(case, bars=(cases.Bar(cases.SM90, cases.ANY_PEER, 1.0),))
    assert set(runner.sustained_peers(anyone, ["a", cases.SM80, cases.SM90])) == {"a", cases.SM90}


def test_settled_clocks_are_measured_only_for_cases_at_the_power_limit():
    case = next(c for c in attention_cases.ATTENTION_CASES if c.table == "main" and c.seqlen == 4096)
    names = [peer.name for peer in contenders.peers_of(case, GPU)]
    assert runner.sustained_peers(case, names)
    assert runner.sustained_peers(replace(case, seqlen=2048), names) == []
    assert runner.sustained_peers(replace(case, table="bias"), names) == []


def test_each_time_of_a_peer_is_recorded_under_its_own_name(monkeypatch):
    timing = measure.Timing([1.0], "graph", 4.0, [2.0], sustained_ms=[3.0], joules=[5.0], energy_error=[0.1])
    monkeypatch.setattr(measure, "interleaved", lambda peers, *rest: dict.fromkeys(peers, timing))
    idle = Peer("idle", lambda case, x: Prepared(lambda: ()))
    case = cases.NormCase("t", 4, 8, "fp32", compiled=False)
    found = runner.run_case(case, torch.device("cpu"), Settings(), [idle]).peers["idle"]
    assert {name: getattr(found, name) for name in vars(timing)} == vars(timing)


# ---- the commit that a result names ---------------------------------------------------------------


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_of_a_changed_tree_is_dirty(monkeypatch, tmp_path):
    monkeypatch.delenv("FLASHBWD_COMMIT", raising=False)
    monkeypatch.setattr(machine, "SOURCE_TREE", tmp_path)
    assert machine.commit() is None
    git(tmp_path, "init", "-q")
    (tmp_path / "kernel.cu").write_text("1")
    git(tmp_path, "add", "kernel.cu")
    git(tmp_path, "commit", "-qm", "kernel")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert machine.commit() == head
    (tmp_path / "results.json").write_text("what a run leaves behind")
    assert machine.commit() == head
    (tmp_path / "kernel.cu").write_text("2")
    assert machine.commit() == f"{head}-dirty"
    git(tmp_path, "add", "kernel.cu")
    assert machine.commit() == f"{head}-dirty"

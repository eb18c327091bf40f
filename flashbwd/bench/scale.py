"""Runs the suite ``scale``: one process per GPU of this machine, or two processes on the CPU.

All devices run the same peer at the same time, even if the peer does not split the work, so that the temperatures and
the clocks of all devices are alike. A time is the time of the slowest device. Peers are timed in interleaved rounds of
one step each (a forward and a backward). A ratio is the median over rounds of the ratio within the round.
"""

from __future__ import annotations

import dataclasses
import datetime
import gc
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import flashbwd
from flashbwd.bench import machine, measure, scale_peers
from flashbwd.bench.cases import TOLERANCES
from flashbwd.bench.measure import Settings
from flashbwd.bench.report import table
from flashbwd.bench.results import OK, WRONG, CaseResult, PeerResult, Report, load
from flashbwd.bench.scale_cases import ONE_FLASHBWD, ONE_TORCH, WITHOUT_EXCHANGE, ScaleCase, scale_cases
from flashbwd.bench.scale_peers import ScaleInputs, ScalePeer

SUITE = "scale"
_SEED = 20
_CPU_DEVICES = 2


def devices() -> int:
    """Return the number of devices that the suite uses on this machine."""
    return torch.cuda.device_count() if torch.cuda.is_available() else _CPU_DEVICES


def chosen_cases(quick: bool, texts: Sequence[str]) -> list[ScaleCase]:
    """Return the cases on this machine whose "table: name" contains one of ``texts``."""
    kind = machine.default_device().type
    return [c for c in scale_cases(devices(), kind, quick) if any(text in f"{c.table}: {c.name}" for text in texts)]


def run_suite(path: Path, *, quick: bool, texts: Sequence[str] = ("",), progress: bool = True) -> Report:
    """Measure the cases whose "table: name" contains one of ``texts``, and save the report to ``path`` after each.

    Raises
    ------
    RuntimeError
        If a process fails. The results of the cases before it are in the file.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (devices(), f"file://{folder}/store", path, quick, tuple(texts), progress)
        processes = [context.Process(target=_work, args=(rank, *arguments)) for rank in range(devices())]
        for process in processes:
            process.start()
        while any(process.is_alive() for process in processes):
            if any(process.exitcode not in (None, 0) for process in processes):
                for process in processes:
                    process.terminate()  # a process that waits for a failed process would wait forever
            processes[0].join(timeout=0.2)
    failed = [rank for rank, process in enumerate(processes) if process.exitcode != 0]
    if failed:
        raise RuntimeError(f"flashbwd: the processes of devices {failed} failed; {path} has the cases before")
    return load(path)


def _work(rank: int, size: int, store: str, path: Path, quick: bool, texts: Sequence[str], progress: bool) -> None:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // size))
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=size)
    mesh = init_device_mesh(device.type, (size,))
    silent = scale_peers.silent_mesh(mesh)
    chosen = chosen_cases(quick, texts)
    settings = {"rounds": min(case.rounds for case in chosen), "slot_ms": 0.0}
    report = Report(
        SUITE + ("-quick" if quick else ""),
        datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        machine.describe(device).as_dict() | {"devices": size},
        settings,
    )
    ceilings = measure.ceilings(device, Settings(5, 10.0)) if device.type == "cuda" else {}
    for case in chosen:
        start = time.perf_counter()
        result = run_case(case, device, mesh, silent, ceilings)
        report.results.append(result)
        report.complete = case is chosen[-1]
        if rank == 0:
            report.save(path)
        if rank == 0 and progress:
            rates = ", ".join(f"{name} {peer.median_ms:.4g} ms" for name, peer in result.peers.items() if peer.timed)
            print(f"{case.name}: {rates} ({time.perf_counter() - start:.0f} s)", flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group()


def run_case(
    case: ScaleCase, device: torch.device, mesh: DeviceMesh, silent: DeviceMesh, ceilings: dict[str, float]
) -> CaseResult:
    """Check and time all peers of a case. Every device must call it, and all devices get the same result."""
    x = scale_peers.make_inputs(case, device, _SEED)
    peers = list(scale_peers.prepare(case, x, mesh, silent))
    reference = [grad.clone() for grad in peers[0].step()]
    results = {peer.name: _checked(case, peer, x, reference, device, mesh) for peer in peers}
    del reference
    for turn in range(case.rounds):
        for peer in (peers, peers[::-1])[turn % 2]:
            results[peer.name].times_ms.append(_time_ms(peer, device, mesh))
    case_fields = {key: value for key, value in dataclasses.asdict(case).items() if key != "table"}
    bars = list(case.bars) if device.type == "cuda" else []
    return CaseResult(case.name, case.table, "TFLOP/s", TOLERANCES[case.dtype], case_fields, results, bars, ceilings)


def _checked(
    case: ScaleCase, peer: ScalePeer, x: ScaleInputs, reference: list[Tensor], device: torch.device, mesh: DeviceMesh
) -> PeerResult:
    """Return the result of a peer before it is timed, after comparing its gradients with the first peer's."""
    cuda = device.type == "cuda"
    before = 0
    if cuda:
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    flashbwd.stats(reset=True)
    grads = peer.step()
    called = [f"{name} {stats.hits}" for name, stats in flashbwd.stats().items() if stats.hits]
    extra = _largest(torch.cuda.max_memory_allocated(device) - before, mesh) if cuda else None
    errors = {}
    if peer.checked:
        for name, got, want in zip(("dq", "dk", "dv"), grads, reference, strict=True):
            errors[name] = _relative_error(got, peer.rows(want), mesh)
    bad = {name: error for name, error in errors.items() if not error <= TOLERANCES[case.dtype]}
    return PeerResult(
        WRONG if bad else OK,
        ", ".join(f"{name} is off by {error:.2e}" for name, error in bad.items()),
        method="events" if cuda else "clock",
        work=case.work,
        errors=errors,
        extra_bytes=None if extra is None else int(extra),
        plan=f"overridden calls: {', '.join(called)}" if peer.overrides else "",
    )


def _relative_error(got: Tensor, want: Tensor, mesh: DeviceMesh) -> float:
    """Return ||got - want|| / ||want|| over the rows of all devices."""
    norms = [torch.linalg.vector_norm(x, dtype=torch.float64) for x in (got.float() - want, want)]
    squares = torch.stack(norms).square()
    dist.all_reduce(squares, group=mesh.get_group())
    return float((squares[0] / squares[1]).sqrt())


def _time_ms(peer: ScalePeer, device: torch.device, mesh: DeviceMesh) -> float:
    """Return the time of one step on the slowest device, in milliseconds. All devices start together."""
    # With NCCL, the barrier is a kernel for which the stream waits, so the devices start within microseconds.
    ready = torch.zeros(1, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.all_reduce(ready, group=mesh.get_group())
        start.record()
        peer.step()
        end.record()
        end.synchronize()
        return _largest(start.elapsed_time(end), mesh)
    dist.all_reduce(ready, group=mesh.get_group())
    began = time.perf_counter()
    peer.step()
    return _largest(1e3 * (time.perf_counter() - began), mesh)


def _largest(value: float, mesh: DeviceMesh) -> float:
    tensor = torch.tensor(float(value), dtype=torch.float64, device=mesh.device_type)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=mesh.get_group())
    return tensor.item()


# ---- report ----


def efficiency_table(results: Sequence[CaseResult]) -> str:
    """Return a table of time, efficiency, exposed communication and memory of each peer that splits the work.

    Efficiency is the time on one device divided by the number of devices and by the time of the peer. Exposed
    communication is the time that a step takes in addition to the time of a step without exchange.
    """
    rows = []
    for result in results:
        one = {name: result.peers[name].median_ms for name in (ONE_TORCH, ONE_FLASHBWD) if name in result.peers}
        for name, peer in result.peers.items():
            if name.endswith(WITHOUT_EXCHANGE) or not peer.timed:
                continue
            same_kernels = ONE_TORCH if name.startswith("torch") else ONE_FLASHBWD
            split = name not in one
            alone = result.peers.get(name + WITHOUT_EXCHANGE)
            efficiency = one[same_kernels] / (result.case["devices"] * peer.median_ms) if split else None
            exposed = None
            if alone is not None:
                exposed = statistics.median(a - b for a, b in zip(peer.times_ms, alone.times_ms, strict=True))
            rows.append(
                [
                    result.name,
                    name,
                    f"{peer.median_ms:.4g}",
                    "-" if efficiency is None else f"{efficiency:.3f}",
                    "-" if exposed is None else f"{exposed:.3g} ({100 * exposed / peer.median_ms:.1f} %)",
                    "-" if peer.extra_bytes is None else f"{peer.extra_bytes / 2**30:.2f}",
                ]
            )
    header = ["case", "peer", "ms", "efficiency", "exposed communication, ms", "peak memory, GiB"]
    return table(header, rows)

"""Compiles slow peers before the measurement, in parallel processes.

The measuring process then finds the compiled kernels on disk instead of compiling each shape for seconds. Autotuning
results are not kept, because parallel processes would disturb the timings on which autotuning relies.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import torch

from flashbwd.bench import machine
from flashbwd.bench.cases import Case
from flashbwd.bench.contenders import SEED, make_inputs, peers_of
from flashbwd.bench.peers import Peer
from flashbwd.bench.suites import suite

Work = Sequence[tuple[Case, Peer]]


def _command(case: Case, peer: Peer) -> list[str]:
    return [sys.executable, "-m", "flashbwd.bench.ahead", f"{case.table}: {case.name}", peer.name]


def compile_ahead(
    work: Work,
    until: float = float("inf"),
    at_once: int | None = None,
    command: Callable[[Case, Peer], list[str]] = _command,
) -> None:
    """Compile each peer for its case, at most ``at_once`` at a time (default: one per CPU).

    The function stops when ``time.monotonic()`` reaches ``until``. It ignores errors: a peer that fails will fail again
    in the measuring process, which reports the reason.
    """
    at_once = at_once or os.cpu_count() or 1
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    waiting = list(work)
    running: list[subprocess.Popen[bytes]] = []
    try:
        while (waiting or running) and time.monotonic() < until:
            running = [process for process in running if process.poll() is None]
            while waiting and len(running) < at_once:
                running.append(subprocess.Popen(command(*waiting.pop(0)), env=environment, **quiet))  # type: ignore[call-overload]
            time.sleep(0.05)
    finally:
        for process in running:
            process.kill()
            process.wait()


def main() -> None:
    from torch._inductor import config

    _, name, peer_name = sys.argv
    device = machine.default_device()
    (case,) = (case for case in suite("all", device.type) if f"{case.table}: {case.name}" == name)
    (peer,) = (peer for peer in peers_of(case, device) if peer.name == peer_name)
    inputs = make_inputs(case, device, SEED)
    with config.patch(fx_graph_cache=False, autotune_local_cache=False):
        prepared = peer.prepare(case, inputs)
        with prepared.scope():
            prepared.backward()
    torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()

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


def _command(work: Work) -> list[str]:
    names = [name for case, peer in work for name in (f"{case.table}: {case.name}", peer.name)]
    return [sys.executable, "-m", "flashbwd.bench.ahead", *names]


def compile_ahead(
    work: Work,
    until: float = float("inf"),
    at_once: int | None = None,
    command: Callable[[Work], list[str]] = _command,
) -> None:
    """Compile each peer for its case, in ``at_once`` processes that share the work (default: one per CPU).

    The function stops when ``time.monotonic()`` reaches ``until``. It ignores errors: a peer that fails will fail again
    in the measuring process, which reports the reason.
    """
    at_once = min(at_once or os.cpu_count() or 1, len(work))
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    shares = [work[first::at_once] for first in range(at_once)]
    running = [subprocess.Popen(command(share), env=environment, **quiet) for share in shares]  # type: ignore[call-overload]
    try:
        while any(process.poll() is None for process in running) and time.monotonic() < until:
            time.sleep(0.05)
    finally:
        for process in running:
            process.kill()
            process.wait()


def _compile(case: Case, peer: Peer, device: torch.device) -> None:
    torch.compiler.reset()  # otherwise torch.compile falls back to eager after a few shapes
    prepared = peer.prepare(case, make_inputs(case, device, SEED))
    with prepared.scope():
        prepared.backward()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    from torch._inductor import config

    device = machine.default_device()
    cases = {f"{case.table}: {case.name}": case for case in suite("all", device.type)}
    for name, peer_name in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        (peer,) = (peer for peer in peers_of(cases[name], device) if peer.name == peer_name)
        with config.patch(fx_graph_cache=False, autotune_local_cache=False):
            try:
                _compile(cases[name], peer, device)
            except Exception as error:
                print(f"{peer_name} on {name}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()

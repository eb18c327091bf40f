"""A process group of local processes that run the functions of a test."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch
import torch.distributed


def _work(rank: int, size: int, backend: str, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    while (call := pipe.recv()) is not None:
        function, args = call
        try:
            function(*args)
            pipe.send(None)
        except BaseException:
            pipe.send(traceback.format_exc())
    torch.distributed.destroy_process_group()


def gpu_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """The body of a fixture whose parameter is the number of processes, each with a GPU of its own."""
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} GPUs")
    with Ranks(request.param, tmp_path_factory.mktemp("ranks"), backend="nccl") as processes:
        yield processes


class Ranks:
    """A context manager that starts processes and joins them into a process group.

    Parameters
    ----------
    size : int
        Number of processes.
    folder : Path
        Folder of the file that the processes use to find each other.
    backend : str
        ``"gloo"``, or ``"nccl"`` with one GPU per process.
    """

    def __init__(self, size: int, folder: Path, backend: str = "gloo") -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, size, backend, str(folder / "store"), theirs)
            self._pipes.append(ours)
            self._processes.append(context.Process(target=_work, args=arguments, daemon=True))
            self._processes[-1].start()
            theirs.close()

    def run(self, function: Callable[..., None], *args: Any) -> None:
        """Call a module-level function in every process; raise here if one process raises, with its traceback."""
        for pipe in self._pipes:
            pipe.send((function, args))
        failures: list[str] = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(timeout=120), f"rank {rank} does not answer: {failures or 'the others do'}"
            if (failure := pipe.recv()) is not None:
                failures.append(f"rank {rank}: {failure}")
        assert not failures, "\n".join(failures)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(timeout=20)
            process.kill()

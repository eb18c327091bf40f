"""Independent pieces of work spread over CPU threads that run torch's operators single-threaded.

An operator that splits itself over threads ends at a barrier. A tile takes eight operators of some 50 us, and where one
thread is late (a busy machine, a core that is shared) all wait, eight times a tile. Threads that each work through
their own heads meet once, at the end: docs/kernels/reference.md has the measurements.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")

_pool: tuple[int, ThreadPoolExecutor] | None = None
_pool_lock = threading.Lock()


def _forget_pool() -> None:
    """A forked child has none of its parent's threads."""
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_pool)


def run_all(tasks: Sequence[Callable[[], T]], threads: int) -> list[T]:
    """Call every task, on `threads` CPU threads if more than one; results are in the order of the tasks."""
    threads = min(threads, len(tasks))
    if threads <= 1:
        return [task() for task in tasks]
    inference = torch.is_inference_mode_enabled()
    results: dict[int, T] = {}
    left = deque(enumerate(tasks))

    def work() -> None:
        with torch.inference_mode() if inference else torch.no_grad():  # both are settings of a thread
            while True:
                try:
                    index, task = left.popleft()
                except IndexError:
                    return
                results[index] = task()

    pool = _pool_of(threads)
    for done in [pool.submit(work) for _ in range(threads)]:
        done.result()
    return [results[index] for index in range(len(tasks))]


def _pool_of(threads: int) -> ThreadPoolExecutor:
    global _pool
    with _pool_lock:
        if _pool is None or _pool[0] < threads:
            _pool = threads, _start(threads)
        return _pool[1]


def _start(threads: int) -> ThreadPoolExecutor:
    """Threads in which torch's operators use no further threads.

    ``torch.set_num_threads`` sets the number of the calling thread, and what threads that appear later begin with. So
    every worker sets its own to 1, and when all have, the second is put back.
    """
    before = torch.get_num_threads()
    begun = threading.Barrier(threads)

    def begin() -> None:
        torch.get_num_threads()  # at its first question a thread takes over the common number: not after the next line
        torch.set_num_threads(1)
        begun.wait()

    pool = ThreadPoolExecutor(threads, thread_name_prefix="flashbwd", initializer=begin)
    for _ in range(threads):
        pool.submit(int)  # starts a worker: none is idle before all have begun
    pool.submit(int).result()
    torch.set_num_threads(before)
    return pool
